"""First stages on the CPU: the union of sampled hops as one CSC with local ids."""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar import _native
from joestar.errors import SamplerError
from joestar.kernels.checks import check_ids, check_offsets, check_weights, require
from joestar.kernels.race import table

Empty = Callable[[int, torch.dtype], Tensor]
"""Makes an uninitialised, contiguous tensor ``[n]`` on the CPU."""

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""(local ids of the seeds, ids, indptr, indices, eids): the fields of ``joestar.stages.MacroBatch``."""


def large_batch(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanouts: list[int], replace: bool, key: Tensor, sites: list[int],
    weight: Tensor | None, want_eids: bool, empty: Empty | None = None,
) -> Parts:  # fmt: skip
    """The union of ``len(fanouts)`` hops of neighbour sampling from ``seeds``: what ``union_hops`` makes of its blocks.

    Args:
        seeds: ids ``[m]`` in the dtype of ``indices``, in any order, duplicates allowed; the caller has checked them.
        fanouts: from the seeds outwards; sites: call site of every hop's draws, with key int64 ``[3]``.
        weight: float32 ``[num_edges]``, or ``None`` for uniform picks.
        empty: where to write all but the local ids of the seeds; ``None`` for new memory.
    """
    task = _large_batch(indptr, indices, seeds, fanouts, replace, key, sites, weight)
    return written(_native.large_batch(*task, want_eids), task[2], want_eids, empty)


def pick_large_batch(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanouts: list[int], replace: bool, key: Tensor, sites: list[int],
    weight: Tensor | None, want_eids: bool, empty: Empty | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The same edges in the ids of the graph: (rows, indptr, sources, eids or ``None``), as ``stages.macro.Picked``."""
    task = _large_batch(indptr, indices, seeds, fanouts, replace, key, sites, weight)
    parts, empty = _native.pick_large_batch(*task, want_eids), empty or fresh
    dtype, rows, edges = indices.dtype, parts.num_rows, parts.num_edges
    sizes = (rows, dtype), (rows + 1, torch.int64), (edges, dtype)
    made = [_given(empty, *size) for size in sizes]
    made.append(_given(empty, edges, torch.int64) if want_eids else None)
    parts.write(*made)
    return tuple(made)


def _large_batch(indptr, indices, seeds, fanouts, replace, key, sites, weight) -> tuple:
    """Checked arguments of the native function, but the last."""
    indptr, indices, seeds = check_offsets(indptr), check_ids(indices, "indices"), check_ids(seeds, "seeds")
    require(indices.dtype == seeds.dtype, "node ids of one dtype", f"{indices.dtype} and {seeds.dtype}")
    weight = None if weight is None else check_weights(weight)
    return indptr, indices, seeds, fanouts, replace, key.contiguous(), sites, weight, table()


def union_hops(
    indptr: Tensor, indices: Tensor, seeds: Tensor, hops: list[tuple[Tensor, Tensor, Tensor, Tensor]], want_eids: bool,
    empty: Empty | None = None,
) -> Parts:  # fmt: skip
    """The union of blocks.

    Args:
        seeds: ids ``[m]``; they are rows in any case.
        hops: (indptr, local indices, ids of the sources, eids) of every block; row ``i`` is source ``i``. Ids of
            sources are those of nodes: the caller has checked them.

    Raises:
        ValueError: where an eid is not the position of the edge in the graph.
    """
    indptr, indices, seeds = check_offsets(indptr), check_ids(indices, "indices"), check_ids(seeds, "seeds")
    require(indices.dtype == seeds.dtype, "node ids of one dtype", f"{indices.dtype} and {seeds.dtype}")
    parts = _native.union_hops(indptr, indices, seeds, [_checked_hop(*hop, indices.dtype) for hop in hops])
    return written(parts, seeds, want_eids, empty)


def edge_ranks(whole: Tensor, rows: Tensor, indptr: Tensor, eids: Tensor, out: Tensor) -> Tensor:
    """``out``, int32 ``[e]``: position of every edge of a part in its row of the whole graph.

    Args:
        whole: ``indptr`` of the whole graph. rows: nodes ``[r]`` that the part's rows are of.
        indptr: int64 ``[r + 1]``; eids: int64 ``[e]``, positions of the part's edges in the whole graph.
    """
    whole, indptr, rows = check_offsets(whole), check_offsets(indptr), check_ids(rows, "rows")
    eids = check_ids(eids, "eids")
    right = eids.dtype == torch.int64 and out.dtype == torch.int32 and out.is_contiguous()
    require(right, "eids int64 and contiguous ranks int32", f"{eids.dtype} and {out.dtype}")
    _native.edge_ranks(whole, rows, indptr, eids, out)
    return out


def _checked_hop(indptr: Tensor, local: Tensor, srcs: Tensor, eids: Tensor, dtype: torch.dtype) -> list[Tensor]:
    indptr, local, srcs = check_offsets(indptr), check_ids(local, "local indices"), check_ids(srcs, "srcs")
    eids = check_ids(eids, "eids")
    require(local.dtype == srcs.dtype == dtype, f"ids of {dtype}", f"{local.dtype} and {srcs.dtype}")
    require(eids.dtype == torch.int64, "eids int64", f"{eids.dtype}")
    edges = int(indptr[-1])
    counts = f"{local.numel()} indices, {eids.numel()} eids"
    rises = int(indptr[0]) == 0 and bool((indptr.diff() >= 0).all())
    require(rises, "indptr from 0, non-decreasing", f"one from {int(indptr[0])} to {edges}")
    require(edges == local.numel() == eids.numel(), f"{edges} edges", counts)
    return [indptr, local, srcs, eids]


def fresh(n: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[n]``, in huge pages where there are any: a macro-batch is written once, all over."""
    tensor = torch.empty(n, dtype=dtype, device="cpu")
    _native.advise_huge(tensor, tensor.element_size())
    return tensor


def in_huge_pages(tensor: Tensor) -> bool:
    """Moves a large CPU tensor into huge pages, where it is: random reads of it miss the TLB less. Whether it was done:
    the system may not know how, and memory that is page-locked or of a file stays as it is."""
    return tensor.is_cpu and tensor.is_contiguous() and _native.collapse_huge(tensor, tensor.element_size())


def written(parts, given: Tensor, want_eids: bool, empty: Empty | None = None) -> Parts:
    """What the native ``parts`` hold, and the local ids of ``given``; afterwards they are empty."""
    empty = empty or fresh
    seeds = torch.empty(given.numel(), dtype=torch.int32, device="cpu")
    ids, indptr = _given(empty, parts.num_nodes, given.dtype), _given(empty, parts.num_rows + 1, torch.int64)
    indices = _given(empty, parts.num_edges, torch.int32)
    eids = _given(empty, parts.num_edges, torch.int64) if want_eids else None
    parts.write(given, seeds, ids, indptr, indices, eids)
    return seeds, ids, indptr, indices, eids


def _given(empty: Empty, size: int, dtype: torch.dtype) -> Tensor:
    """Memory that the first stage's ``empty`` gives, if it can be written to."""
    tensor = empty(size, dtype)
    if not (tensor.is_cpu and tensor.is_contiguous() and tensor.shape == (size,) and tensor.dtype == dtype):
        raise SamplerError(
            f"empty({size}, {dtype}) of the first stage gave {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
            f"strides {tensor.stride()}: expected contiguous memory [{size}] of that dtype on the CPU."
        )
    return tensor
