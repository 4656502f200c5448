"""First stages on the CPU: the union of sampled hops as one CSC with local ids."""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_weights, require
from joestar.kernels.race import table

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""(local ids of the seeds, ids, indptr, indices, eids): the fields of ``joestar.stages.MacroBatch``."""


def large_batch(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanouts: list[int], replace: bool, key: Tensor, sites: list[int],
    weight: Tensor | None, want_eids: bool,
) -> Parts:  # fmt: skip
    """The union of ``len(fanouts)`` hops of neighbour sampling from ``seeds``: what ``union_hops`` makes of its blocks.

    Args:
        seeds: ids ``[m]`` in the dtype of ``indices``, in any order, duplicates allowed; the caller has checked them.
        fanouts: from the seeds outwards; sites: call site of every hop's draws, with key int64 ``[3]``.
        weight: float32 ``[num_edges]``, or ``None`` for uniform picks.
    """
    indptr, indices, seeds = check_offsets(indptr), check_ids(indices, "indices"), check_ids(seeds, "seeds")
    require(indices.dtype == seeds.dtype, "node ids of one dtype", f"{indices.dtype} and {seeds.dtype}")
    weight = None if weight is None else check_weights(weight)
    parts = _native.large_batch(
        indptr, indices, seeds, fanouts, replace, key.contiguous(), sites, weight, table(), want_eids
    )
    return written(parts, seeds, want_eids)


def union_hops(
    indptr: Tensor, indices: Tensor, srcs: Tensor, num_dst: int, hops: list[tuple[Tensor, Tensor, Tensor]],
    seeds: Tensor, want_eids: bool,
) -> Parts:  # fmt: skip
    """The union of blocks.

    Args:
        srcs: ids ``[n]`` of the outermost block's sources, which begin with its ``num_dst`` destinations.
        hops: (indptr, local indices, eids) of every block; row ``i`` is ``srcs[i]``.

    Raises:
        ValueError: where an eid is not the position of the edge in the graph.
    """
    indptr, indices, srcs = check_offsets(indptr), check_ids(indices, "indices"), check_ids(srcs, "srcs")
    seeds = check_ids(seeds, "seeds")
    require(indices.dtype == srcs.dtype == seeds.dtype, "node ids of one dtype", f"{indices.dtype} and {srcs.dtype}")
    offsets, local, eids = [], [], []
    for rows, sources, positions in hops:
        offsets.append(check_offsets(rows))
        local.append(check_ids(sources, "local indices"))
        require(local[-1].dtype == indices.dtype, f"local indices of {indices.dtype}", f"{local[-1].dtype}")
        require(positions.dtype == torch.int64, "eids int64", f"{positions.dtype}")
        eids.append(check_ids(positions, "eids"))
        edges = int(offsets[-1][-1])
        require(edges == local[-1].numel() == eids[-1].numel(), f"{edges} edges", f"{local[-1].numel()} indices")
    parts = _native.union_hops(indptr, indices, srcs, num_dst, offsets, local, eids)
    return written(parts, seeds, want_eids)


def written(parts, given: Tensor, want_eids: bool) -> Parts:
    """What the native ``parts`` hold, and the local ids of ``given``; afterwards they are empty."""
    seeds = torch.empty(given.numel(), dtype=torch.int32, device="cpu")
    ids = torch.empty(parts.num_nodes, dtype=given.dtype, device="cpu")
    indptr = torch.empty(parts.num_rows + 1, dtype=torch.int64, device="cpu")
    indices = torch.empty(parts.num_edges, dtype=torch.int32, device="cpu")
    eids = torch.empty(parts.num_edges, dtype=torch.int64, device="cpu") if want_eids else None
    parts.write(given, seeds, ids, indptr, indices, eids)
    return seeds, ids, indptr, indices, eids
