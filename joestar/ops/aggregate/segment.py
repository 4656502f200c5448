"""``joestar::segment``: what a program computes per edge, reduced per destination, or stored per edge.

Attention of any score is one op: scores, their softmax over a destination's edges and the weighted sum are made where
rows are read, forward in one pass over the edges, and again in the backward pass, whose program is derived from the
forward one (``kernels/segment_gradient.py``). Of the softmax only its largest score and its sum of exponentials per
destination are kept. Rows without edges are 0.
"""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.kernels.segment_gradient import check_segment_wanted, degrees, grad_rows, rows_kinds
from joestar.kernels.segment_program import (
    FULL,
    HEAD,
    SIZES,
    SegmentProgram,
    check_segment,
    dtype_of,
    groups_of,
    repeated,
    tensors_apart,
    width_of,
)
from joestar.kernels.segment_steps import MEANING, Step
from joestar.ops.registry import Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import valid_edges

ops = torch.ops.joestar

ARGUMENTS = "Tensor indptr, Tensor indices, Tensor[] leaves, str program, int heads"
"""What ops of segment programs are given first."""


def reference(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int) -> list[Tensor]:
    """Plain PyTorch, all edges' values in memory, which autograd differentiates.

    Args:
        indptr: int64 ``[num_dst + 1]``; indices: rows of the ``src`` leaves per edge, ``[E]``.
        leaves: the tensors of the program's leaves, all of one dtype, bits int32; one matrix of leaves beside one
            another (``dst dst+``).
        program: see ``joestar.kernels.segment_program``; heads: into which the columns split.

    Returns:
        Per result ``[num_dst, W]`` or ``[num_dst, H]``, ``[E, ...]`` of values of edges, in the leaves' dtype, of a
        softmax at least float32: gradients of scores are differences to it, which rounding would not leave at 0 where
        one edge has all the weight. Then, per softmax, the largest score and the sum of exponentials of each
        destination, at least float32. All 0 where there are no edges.
    """
    parsed = SegmentProgram.parse(program)
    leaves = tensors_apart(parsed, leaves)
    n = indptr.numel() - 1
    width = check_segment(parsed, leaves, heads, n, indices.numel()) // heads
    src, dst = valid_edges(indptr, indices)
    dtype = dtype_of(parsed, leaves)
    wide = torch.promote_types(dtype, torch.float32)
    values = [
        _leaf(kind, group, src, dst, (heads, width), wide)
        for kind, group in zip(parsed.leaves, groups_of(parsed.leaves, leaves), strict=True)
    ]
    for name, *arguments in parsed.steps:
        read = [values[a] if isinstance(a, int) else a for a in arguments]
        across = {
            "dot": lambda a, b: (a * b).sum(2, keepdim=True),
            "total": lambda a: a.sum(2, keepdim=True),
            "spread": lambda a: a.expand(-1, heads, width),
        }
        values.append({**MEANING, **across}[name](*read))
    found, saved = [], []
    for result in parsed.results:
        rows = [heads, width if parsed.size_of(result) == FULL else 1]
        value, weight = values[result[-1]], None
        if result[0] == "softmax":
            columns = width if parsed.score_size(result) == FULL else 1
            weight, *rest = _softmax(values[result[1]].expand(src.numel(), heads, columns), dst, n)
            saved += rest
            value = value * weight
        value = value.expand(src.numel(), *rows)
        if result[0] == "edges":
            y = torch.cat([value, value.new_zeros(indices.numel() - src.numel(), *rows)])
        else:
            y = value.new_zeros(n, *rows).index_add(0, dst, value)
        if result[0] == "mean":
            y = y / degrees(indptr)[..., None]
        found.append(y.flatten(1).to(wide if result[0] == "softmax" else dtype))
    return [*found, *saved]


def unpacked(words: Tensor, heads: int) -> Tensor:
    """Bits int32 ``[E, words]`` as 0 and 1, ``[E, H]``, laid out as ``dropout_apply`` reads them."""
    head, count = torch.arange(heads, device=words.device), words.shape[1]
    return torch.index_select(words, 1, head % count) >> (head // count) & 1


def _leaf(kind: str, tensors: tuple, src: Tensor, dst: Tensor, sizes: tuple[int, int], wide: torch.dtype) -> Tensor:
    first, *rest = (t if t.dtype == torch.int32 else t.to(wide) for t in tensors)
    shape = (-1, sizes[0], sizes[1] if SIZES[kind] == FULL else 1)
    if kind == "src_row":
        return first[src][:, None]
    if kind == "bits":
        return unpacked(first[: src.numel()], sizes[0]).to(wide).view(shape)
    if kind.startswith(("src", "dst")):
        return first[src if kind.startswith("src") else dst].view(shape)
    if kind.startswith("vector"):
        return first.view(shape)
    value = first[: src.numel()]
    if kind == "scalar":
        return value.view(-1, 1, 1)
    return (F.linear(value, *rest) if rest else value).view(shape)


def _softmax(score: Tensor, dst: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax per destination, largest scores, sums of exponentials)."""
    index = dst.view(-1, 1, 1).expand_as(score)
    top = score.new_zeros(n, *score.shape[1:]).scatter_reduce(0, index, score.detach(), "amax", include_self=False)
    power = (score - top[dst]).exp()
    total = torch.zeros_like(top).index_add(0, dst, power)
    return power / total[dst], top.flatten(1), total.detach().flatten(1)


def reference_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, rows: list[Tensor],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``segment`` for the tensors of ``leaves`` that are ``wanted``, else empty ``[0]``.

    ``rows``: gradients of the results, and what the forward pass left: ``joestar.kernels.segment_gradient.grad_rows``.
    """
    parsed = SegmentProgram.parse(program)
    grads, left = [], iter(rows)
    for kinds in rows_kinds(parsed):
        grads.append(next(left))
        list(itertools.islice(left, len(kinds) - 1))
    apart = tensors_apart(parsed, leaves)
    check_segment_wanted(parsed, apart, repeated(parsed, wanted))
    wide = torch.promote_types(dtype_of(parsed, apart), torch.float32)
    with torch.enable_grad():
        own = [
            (leaf if leaf.dtype == torch.int32 else leaf.detach().to(wide, copy=True)).requires_grad_(w)
            for leaf, w in zip(leaves, wanted, strict=True)
        ]
        asked = [leaf for leaf in own if leaf.requires_grad]
        found = []
        if asked:
            made = reference(indptr, indices, own, program, heads)[: len(parsed.results)]
            pairs = [(y, grad.to(wide)) for y, grad in zip(made, grads, strict=False) if y.requires_grad]
            found = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], materialize_grads=True)
    given = iter(found)
    return [
        next(given).to(leaf.dtype).contiguous() if w else leaf.new_empty(0)
        for leaf, w in zip(leaves, wanted, strict=True)
    ]


def result_shapes(indptr, indices, leaves, program, heads):
    """Tensors like what ``segment`` gives, without their numbers."""
    parsed = SegmentProgram.parse(program)
    leaves = tensors_apart(parsed, leaves)
    like, n = leaves[0], indptr.shape[0] - 1
    dtype, width = dtype_of(parsed, leaves), width_of(parsed, leaves, heads)
    wide = torch.promote_types(dtype, torch.float32)
    out = [
        like.new_empty(
            (indices.shape[0] if r[0] == "edges" else n, width if parsed.size_of(r) == FULL else heads),
            dtype=wide if r[0] == "softmax" else dtype,
        )
        for r in parsed.results
    ]
    for result in parsed.softmaxes:
        columns = heads if parsed.score_size(result) == HEAD else width
        out += [like.new_empty((n, columns), dtype=wide) for _ in range(2)]
    return out


def _grad_fake(indptr, indices, leaves, program, heads, rows, wanted):
    return [leaf.new_empty(leaf.shape if w else (0,)) for leaf, w in zip(leaves, wanted, strict=True)]


def _setup(ctx, inputs, output):
    indptr, indices, leaves, ctx.program, ctx.heads = inputs
    parsed = SegmentProgram.parse(ctx.program)
    wanted = [leaf.requires_grad for leaf in leaves]
    check_segment_wanted(parsed, tensors_apart(parsed, leaves), repeated(parsed, wanted))
    ctx.mark_non_differentiable(*output[len(parsed.results) :])
    ctx.num_leaves = len(leaves)
    ctx.save_for_backward(indptr, indices, *leaves, *output)


def _backward(ctx, grads):
    indptr, indices, *rest = ctx.saved_tensors
    leaves, outputs = rest[: ctx.num_leaves], rest[ctx.num_leaves :]
    wanted = list(ctx.needs_input_grad[2])
    program = SegmentProgram.parse(ctx.program)
    apart = tensors_apart(program, leaves)
    dtype = dtype_of(program, apart)
    grads = [grad.to(dtype) for grad in grads[: len(program.results)]]  # read again along every edge
    rows = grad_rows(program, ctx.heads, width_of(program, apart, ctx.heads), indptr, outputs, grads)
    found = ops.segment_grad(indptr, indices, leaves, ctx.program, ctx.heads, rows, wanted)
    return None, None, [g if w else None for g, w in zip(found, wanted, strict=True)], None, None


_ORDER = (
    ("src", "src_row", "src_head"), ("dst", "edge", "dst_head", "edge_head"), ("narrow", "narrow_plain"),
    ("scalar", "vector", "vector_head"),
)  # fmt: skip
"""Kinds of leaves whose dtype counts under autocast, the first that there are."""


def _common_dtype(program: SegmentProgram, leaves: list[Tensor], short: torch.dtype) -> torch.dtype:
    """The dtype of the rows of sources, else of other rows; products would give ``short``."""
    groups = list(zip(program.leaves, groups_of(program.leaves, tensors_apart(program, leaves)), strict=True))
    for kinds in _ORDER:
        found = [tensors[0].dtype for kind, tensors in groups if kind in kinds]
        if found:
            return short if "narrow" in kinds else functools.reduce(torch.promote_types, found)
    return short


def _result_dtype(program: SegmentProgram, leaves: list[Tensor], short: torch.dtype, device: str) -> torch.dtype:
    """What PyTorch would compute of the values: the widest dtype of the leaves, products being ``short``."""
    groups = zip(program.leaves, groups_of(program.leaves, tensors_apart(program, leaves)), strict=True)
    found = [short if kind.startswith("narrow") else tensors[0].dtype for kind, tensors in groups if kind != "bits"]
    found += [torch.float32] if device == "cuda" and any(map(_is_wide, program.steps)) else []
    return functools.reduce(torch.promote_types, found)


def _is_wide(step: Step) -> bool:
    """Whether PyTorch may compute a step in float32 under autocast on CUDA; products with itself are squares there."""
    return step[0] in ("exp", "total") or (step[0] == "mul" and step[1] == step[2])


def _leaves_dtype(program: SegmentProgram, leaves: list[Tensor], short: torch.dtype, wanted: torch.dtype):
    """The dtype that an op takes its leaves in under autocast.

    Results are stored in it: float16, which could not hold what PyTorch computes in float32, only where that is
    ``wanted``. bfloat16 has the range.
    """
    floats = {leaf.dtype for leaf in leaves if leaf.dtype != torch.int32}
    if len(floats) > 1:
        return wanted if short == torch.float16 else _common_dtype(program, leaves, short)
    (own,) = floats
    return torch.promote_types(own, wanted) if short == torch.float16 else own


def _autocast(device: str):
    """Leaves come in several dtypes under autocast, and the op takes one; results are as wide as PyTorch's."""

    def run(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int) -> list[Tensor]:
        parsed, short = SegmentProgram.parse(program), torch.get_autocast_dtype(device)
        wanted = _result_dtype(parsed, leaves, short, device)
        dtype = _leaves_dtype(parsed, leaves, short, wanted)
        leaves = [leaf if leaf.dtype == torch.int32 else leaf.to(dtype) for leaf in leaves]
        with torch.autocast(device, enabled=False):
            out = torch.ops.joestar.segment(indptr, indices, leaves, program, heads)
        count = len(parsed.results)
        given = torch.promote_types(dtype, wanted)
        return [y.to(given) for y in out[:count]] + out[count:]

    return run


define(
    f"segment({ARGUMENTS}) -> Tensor[]", reference, fake=result_shapes, gradient=(_setup, _backward),
    padding=Padding.SAFE, cpu="cpu_segment", cuda="gpu_segment", autocast=_autocast,
)  # fmt: skip
define_gradient(
    f"segment_grad({ARGUMENTS}, Tensor[] rows, bool[] wanted) -> Tensor[]", reference_grad,
    fake=_grad_fake, cpu="cpu_segment", cuda="gpu_segment_grad",
)  # fmt: skip
