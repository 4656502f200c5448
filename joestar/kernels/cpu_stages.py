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
    indptr, indices, seeds = check_offsets(indptr), check_ids(indices, "indices"), check_ids(seeds, "seeds")
    require(indices.dtype == seeds.dtype, "node ids of one dtype", f"{indices.dtype} and {seeds.dtype}")
    weight = None if weight is None else check_weights(weight)
    parts = _native.large_batch(
        indptr, indices, seeds, fanouts, replace, key.contiguous(), sites, weight, table(), want_eids
    )
    return _written(parts, seeds, want_eids, empty or fresh)


def union_hops(
    indptr: Tensor, indices: Tensor, srcs: Tensor, num_dst: int, hops: list[tuple[Tensor, Tensor, Tensor]],
    seeds: Tensor, want_eids: bool, empty: Empty | None = None,
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
    return _written(parts, seeds, want_eids, empty or fresh)


def fresh(n: int, dtype: torch.dtype) -> Tensor:
    """New memory ``[n]``, in huge pages where there are any: a macro-batch is written once, all over."""
    tensor = torch.empty(n, dtype=dtype, device="cpu")
    _native.advise_huge(tensor, tensor.element_size())
    return tensor


def _written(parts, given: Tensor, want_eids: bool, empty: Empty) -> Parts:
    seeds = torch.empty(given.numel(), dtype=torch.int32, device="cpu")
    ids, indptr = empty(parts.num_nodes, given.dtype), empty(parts.num_rows + 1, torch.int64)
    indices = empty(parts.num_edges, torch.int32)
    eids = empty(parts.num_edges, torch.int64) if want_eids else None
    for tensor, size in ((ids, parts.num_nodes), (indptr, parts.num_rows + 1), (indices, parts.num_edges)):
        if not (tensor.is_cpu and tensor.is_contiguous() and tensor.shape == (size,)):
            raise SamplerError(
                f"empty({size}, ...) of the first stage gave {list(tensor.shape)} on {tensor.device}, strides "
                f"{tensor.stride()}: expected contiguous memory [{size}] on the CPU."
            )
    parts.write(given, seeds, ids, indptr, indices, eids)
    return seeds, ids, indptr, indices, eids
