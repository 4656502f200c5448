"""FuseSampleAgg's operator (section 3): sampling and aggregation of one or two hops as one differentiable function.

Where ``Block`` programs are compiled, the compiler finds this fusion by itself; here it is for use by hand.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from joestar.ops.differentiation import refuse_tangents
from joestar.ops.once import refusing
from joestar.ops.registry import CSC, DSTS, HASHED, define_structural

ops = torch.ops.joestar
_REDUCES = ("sum", "mean", "max", "min")


class Structure(Protocol):
    """What is read of a graph: in-neighbours as CSC, ``indptr`` int64 ``[N + 1]`` and ``indices`` ``[E]``."""

    indptr: Tensor
    indices: Tensor


def sample_aggregate_two_hops(indptr, indices, dsts, dst_count, k, inner, replace, key, site, x, reduce, node_ids=None):
    """The two hops as two ops; the picks of the first are stored."""
    bound = dsts.numel() * k if k >= 0 else -1
    sub, picked, count = ops.sample_cols(indptr, indices, dsts, dst_count, k, replace, key, site, bound, node_ids)
    rows, _ = ops.sample_aggregate(indptr, indices, picked, count, inner, replace, key, site + 1, x, reduce, node_ids)
    return ops.spmm(sub, _identity(picked), rows, None, reduce)


def _identity(edges: Tensor) -> Tensor:
    return torch.arange(edges.numel(), dtype=edges.dtype, device=edges.device)


def _fake(indptr, indices, dsts, dst_count, k, inner, replace, key, site, x, reduce, node_ids=None):
    return x.new_empty((dsts.shape[0], *x.shape[1:]))


define_structural(
    f"sample_aggregate_two_hops({CSC}, {DSTS}, int k, int inner, bool replace, Tensor key, int site, Tensor x,"
    f" str reduce, {HASHED}) -> Tensor", sample_aggregate_two_hops, fake=_fake, cuda="gpu_two_hops",
)  # fmt: skip


def _sample(structure: tuple, dsts: Tensor, count: Tensor, hop: int, draws: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, global ids, count) of a hop."""
    fanouts, replace, key, site = draws
    indptr, indices, node_ids = structure
    bound = dsts.numel() * fanouts[hop] if fanouts[hop] >= 0 else -1
    return ops.sample_cols(indptr, indices, dsts, count, fanouts[hop], replace, key, site + hop, bound, node_ids)


def _samples(structure: tuple, dsts: Tensor, draws: tuple) -> list[tuple[Tensor, Tensor]]:
    """(offsets, global ids) of every hop, rows of the second being the picks of the first."""
    count = torch.full((), dsts.numel(), dtype=torch.int64, device=dsts.device)
    hops = []
    for hop in range(len(draws[0])):
        sub, dsts, count = _sample(structure, dsts, count, hop, draws)
        hops.append((sub, dsts))
    return hops


def _aggregate(hops: list[tuple[Tensor, Tensor]], x: Tensor, reduce: str) -> list[Tensor]:
    """The rows of every hop, the seeds' first, from stored samples."""
    sub, picked = hops[-1]
    rows = [ops.spmm(sub, picked, x, None, reduce)]
    for sub, edges in reversed(hops[:-1]):
        rows.insert(0, ops.spmm(sub, _identity(edges), rows[0], None, reduce))
    return rows


def _gradient(hops: list[tuple[Tensor, Tensor]], x: Tensor, grad: Tensor, reduce: str) -> Tensor:
    """Gradient of ``_aggregate`` for ``x``, from the seeds inwards."""
    extremum = reduce in ("max", "min")
    rows = _aggregate(hops, x, reduce) if extremum else [None] * len(hops)
    for hop, (sub, picked) in enumerate(hops):
        last = hop == len(hops) - 1
        indices = picked if last else _identity(picked)
        if extremum:
            inner = x if last else rows[hop + 1]
            grad = ops.spmm_extremum_grad(sub, indices, inner, None, rows[hop], grad)[0]
        else:
            grad = ops.spmm_grad_x(sub, indices, grad, None, x.shape[0] if last else picked.numel(), reduce)
    return grad


class _SampleAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seeds, structure, draws, reduce, replay):
        fanouts, replace, key, site = draws
        ctx.structure, ctx.draws, ctx.reduce, hops = structure, draws, reduce, []
        if replay == "saved" and ctx.needs_input_grad[0]:
            hops = _samples(structure, seeds, draws)
            y = _aggregate(hops, x, reduce)[0]
        else:
            count = torch.full((), seeds.numel(), dtype=torch.int64, device=seeds.device)
            op = ops.sample_aggregate if len(fanouts) == 1 else ops.sample_aggregate_two_hops
            y = op(*structure[:2], seeds, count, *fanouts, replace, key, site, x, reduce, structure[2])
            y = y if len(fanouts) == 2 else y[0]
        kept = [tensor for hop in hops for tensor in hop]
        # A key that is written to in place between forward and backward must not change the replay.
        ctx.draws = (fanouts, replace, key.clone() if ctx.needs_input_grad[0] and not hops else key, site)
        ctx.save_for_backward(x, seeds, *kept)
        return y

    @staticmethod
    def backward(ctx, grad):
        refuse_tangents("joestar.ops.sample_aggregate", grad)
        x, seeds, *kept = ctx.saved_tensors
        hops = list(zip(kept[::2], kept[1::2], strict=True)) or _samples(ctx.structure, seeds, ctx.draws)
        grad_x = _gradient(hops, x, grad.contiguous(), ctx.reduce)
        return refusing("joestar.ops.sample_aggregate", grad_x, (x, grad)), None, None, None, None, None


def sample_aggregate(
    graph: Structure,
    x: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    reduce: str = "mean",
    *,
    key: Tensor | Sequence[int] = (0, 0, 0),
    site: int = 0,
    replace: bool = False,
    replay: Literal["saved", "recomputed"] = "recomputed",
) -> Tensor:
    """Samples one or two hops of in-neighbours and aggregates their features, in one kernel on a GPU.

    One hop: ``y[i] = reduce of x[u]`` over up to ``fanouts[0]`` in-neighbours ``u`` of ``seeds[i]``. Two hops:
    ``y[i] = reduce over u of (reduce of x[w])`` over up to ``fanouts[1]`` in-neighbours ``w`` of every ``u``. A node
    without in-neighbours gives 0. The picks are those of ``NeighborSampler`` for the same key and call sites ``site``
    and ``site + 1``; nothing is deduplicated. See FuseSampleAgg, section 3.

    Args:
        graph: has ``indptr`` int64 ``[N + 1]`` and ``indices`` ``[E]``, e.g. a ``joestar.Graph``; its
            ``ids``, if any, are what nodes hash as.
        x: features ``[N, ...]`` in float32, float64, bfloat16 or float16 (accumulated in float32); may need gradients,
            which are dense ``[N, ...]``.
        seeds: node ids ``[n]``. fanouts: one or two fanouts, seeds first; -1 takes all neighbours.
        reduce: "sum", "mean", "max" or "min". replace: whether to draw with replacement.
        key: int64 ``[3]`` (seed, epoch, step); as a tensor on the device it may change between replays of a CUDA graph.
        replay: how the backward pass knows the picks: "recomputed" draws them again, and the forward pass stores
            nothing; "saved" stores their ids in the forward pass, which is then a sample and a gather.

    Raises:
        ValueError: fanouts, reduce, replay or the number of feature rows are not as above.
    """
    fanouts = tuple(int(k) for k in fanouts)
    if len(fanouts) not in (1, 2) or any(k < -1 for k in fanouts):
        raise ValueError(f"sample_aggregate: expected one or two fanouts, each -1 or more, got {list(fanouts)}")
    if reduce not in _REDUCES:
        raise ValueError(f"sample_aggregate: expected reduce to be one of {', '.join(_REDUCES)}, got {reduce!r}")
    if replay not in ("saved", "recomputed"):
        raise ValueError(f"sample_aggregate: expected replay to be 'saved' or 'recomputed', got {replay!r}")
    if x.dim() == 0 or x.shape[0] != graph.indptr.numel() - 1:
        raise ValueError(
            f"sample_aggregate: expected features with a row for each of the {graph.indptr.numel() - 1} nodes,"
            f" got {list(x.shape)}"
        )
    if not isinstance(key, Tensor):
        key = torch.tensor(list(key), dtype=torch.int64, device=x.device)
    draws = (fanouts, replace, key, site)
    structure = (graph.indptr, graph.indices, getattr(graph, "ids", None))
    return _SampleAggregate.apply(x, seeds.to(graph.indices.dtype), structure, draws, reduce, replay)
