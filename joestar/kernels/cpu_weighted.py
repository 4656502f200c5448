"""Weighted and collective sampling, and rows of a slice, on the CPU: checks, allocation, and calls into C++.

Every function has the signature and the result of its namesake in ``joestar.ops.reference``, bit for bit.
"""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_node_ids, check_offsets, check_ranks, check_weights, require
from joestar.kernels.race import table


def weighted_sample(
    indptr: Tensor, weight: Tensor, row_ids: Tensor, row_count: Tensor, sliced: bool, k: int, replace: bool,
    key: Tensor, site: int, num_edges: int, node_ids: Tensor | None = None, ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row by weight: offsets, edge positions int64 ``[num_edges]`` (padding 0), count.

    ``weight`` is float32, one number per edge of ``indptr``; what is not above 0 (or is NaN or subnormal) is never
    picked. Row ``i`` is column ``row_ids[i]``, or column ``i`` if ``sliced``; it hashes as node ``row_ids[i]``.
    Edges draw by ``ranks``, int32, one per weight, or by their positions in their rows.
    """
    indptr, row_ids, weight = check_offsets(indptr), check_ids(row_ids, "row_ids"), check_weights(weight)
    if sliced:
        require(indptr.numel() == row_ids.numel() + 1, "one row id per row", f"{row_ids.numel()} ids")
    rows = indptr, weight, row_ids, int(row_count), sliced, k, replace
    sub_indptr = torch.empty(row_ids.numel() + 1, dtype=torch.int64, device="cpu")
    total = _native.weighted_offsets(*rows, num_edges, sub_indptr)
    eids = torch.empty(total if num_edges < 0 else num_edges, dtype=torch.int64, device="cpu")
    hashed = check_node_ids(node_ids, None if sliced else indptr.numel() - 1)
    ranks = check_ranks(ranks, weight)
    _native.weighted_sample(*rows, key.contiguous(), site, table(), sub_indptr, eids, hashed, ranks)
    return sub_indptr, eids, torch.scalar_tensor(total, dtype=torch.int64, device="cpu")


def collective_sample(
    sub_indptr: Tensor, sub_indices: Tensor, weight: Tensor | None, num_nodes: int, k: int, key: Tensor, site: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` distinct sources of a slice, together: (node ids ``[k]``, ascending, their number).

    ``weight`` is float32 ``[num_nodes]`` or ``None``; padding repeats the first node (0 if there is none).
    """
    sub_indptr, sub_indices = check_offsets(sub_indptr), check_ids(sub_indices, "sub_indices")
    if weight is not None:
        weight = check_weights(weight)
        require(weight.numel() == num_nodes, f"one weight per node, {num_nodes}", f"{weight.numel()}")
    nodes = torch.empty(k, dtype=sub_indices.dtype, device="cpu")
    edges, key, hashed = int(sub_indptr[-1]), key.contiguous(), check_node_ids(node_ids, num_nodes)
    if hashed is not None:
        require(hashed.dtype == nodes.dtype, f"node_ids of {nodes.dtype}", f"{hashed.dtype}")
    count = _native.collective_sample(sub_indices, edges, weight, num_nodes, key, site, table(), nodes, hashed)
    return nodes, torch.scalar_tensor(count, dtype=torch.int64, device="cpu")


def slice_rows(
    sub_indptr: Tensor, sub_indices: Tensor, row_ids: Tensor, srcs: Tensor, src_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges whose source is among ``srcs[:src_count]``: offsets, positions int64 ``[num_edges]``, count.

    Positions are ascending, padding 0. ``row_ids`` are the ids of the rows, which are not read.
    """
    sub_indptr, sub_indices = check_offsets(sub_indptr), check_ids(sub_indices, "sub_indices")
    srcs = check_ids(srcs, "srcs")
    require(srcs.dtype == sub_indices.dtype, "node ids of one dtype", f"{srcs.dtype} and {sub_indices.dtype}")
    indptr = torch.empty_like(sub_indptr)
    room = int(sub_indptr[-1]) if num_edges < 0 else num_edges
    eids = torch.empty(room, dtype=torch.int64, device="cpu")
    total = _native.slice_rows(sub_indptr, sub_indices, srcs, int(src_count), indptr, eids)
    return (
        indptr,
        eids if num_edges >= 0 else eids[:total].clone(),
        torch.scalar_tensor(total, dtype=torch.int64, device="cpu"),
    )
