"""Sampling, relabelling and structure on the CPU: checks, allocation, and one call into the C++ kernels.

Every function has the signature and the result of its namesake in ``joestar.ops.reference``, bit for bit.
"""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_node_ids, check_offsets, require


def _count(count: Tensor) -> int:
    return int(count)


def _sample_indptr(
    indptr: Tensor, nodes: Tensor, count: int, sliced: bool, k: int, replace: bool, bound: int
) -> tuple[Tensor, int]:
    """Offsets of the sampled rows, cut at the bound (-1: none), and the true number of picks."""
    sub_indptr = torch.empty(nodes.numel() + 1, dtype=torch.int64, device="cpu")
    return sub_indptr, _native.sample_offsets(indptr, nodes, count, sliced, k, replace, bound, sub_indptr)


def _sample(
    indptr: Tensor, indices: Tensor, nodes: Tensor, count: int, sliced: bool, k: int, replace: bool,
    key: Tensor | None, site: int, num_edges: int, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    indptr, indices, nodes = check_offsets(indptr), check_ids(indices, "indices"), check_ids(nodes, "nodes")
    require(indices.dtype == nodes.dtype, "node ids of one dtype", f"{indices.dtype} and {nodes.dtype}")
    sub_indptr, total = _sample_indptr(indptr, nodes, count, sliced, k, replace, num_edges)
    out = torch.empty(total if num_edges < 0 else num_edges, dtype=nodes.dtype, device="cpu")
    key = None if key is None else key.contiguous()
    hashed = check_node_ids(node_ids, None if sliced else indptr.numel() - 1)
    _native.sample_neighbors(indptr, indices, nodes, count, sliced, k, replace, key, site, sub_indptr, out, hashed)
    return sub_indptr, out, torch.scalar_tensor(total, dtype=torch.int64, device="cpu")


def slice_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All in-edges of every destination: (sub_indptr int64 ``[n_dst + 1]``, global ids ``[num_edges]``, count)."""
    return _sample(indptr, indices, dsts, _count(dst_count), False, -1, False, None, 0, num_edges)


def rowwise_sample(
    indptr: Tensor, indices: Tensor, row_ids: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row of a sliced matrix; row ``i`` hashes as node ``row_ids[i]``."""
    require(indptr.numel() == row_ids.numel() + 1, "one row id per row", f"{row_ids.numel()} ids")
    return _sample(indptr, indices, row_ids, row_ids.numel(), True, k, replace, key, site, num_edges, node_ids)


def sample_cols(
    indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int,
    num_edges: int, node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` in-neighbours of every destination (thesis table 5.3): offsets, global ids, count."""
    return _sample(indptr, indices, dsts, _count(dst_count), False, k, replace, key, site, num_edges, node_ids)


def sample_eids(
    indptr: Tensor, dsts: Tensor, dst_count: Tensor, k: int, replace: bool, key: Tensor, site: int, num_edges: int,
    node_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """CSC positions of the edges that ``sample_cols`` picks, recomputed: int64 ``[num_edges]``, 0 in the padding."""
    indptr, dsts, count = check_offsets(indptr), check_ids(dsts, "dsts"), _count(dst_count)
    sub_indptr, total = _sample_indptr(indptr, dsts, count, False, k, replace, num_edges)
    out = torch.empty(total if num_edges < 0 else num_edges, dtype=torch.int64, device="cpu")
    hashed = check_node_ids(node_ids, indptr.numel() - 1)
    _native.sample_edges(indptr, dsts, count, k, replace, key.contiguous(), site, sub_indptr, out, hashed)
    return out


def compact(
    dsts: Tensor, dst_count: Tensor, sub_indptr: Tensor, sub_indices: Tensor, num_nodes: int, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Local ids for the sources of a sampled set: (srcs ``[num_src]``, local indices ``[E]``, count).

    Destinations come first, then new nodes in order of first appearance; local ids past ``num_src`` become 0.
    """
    dsts, sub_indices = check_ids(dsts, "dsts"), check_ids(sub_indices, "sub_indices")
    require(dsts.dtype == sub_indices.dtype, "node ids of one dtype", f"{dsts.dtype} and {sub_indices.dtype}")
    edges, count = int(sub_indptr[-1]), _count(dst_count)
    room = dsts.numel() + min(edges, num_nodes) if num_src < 0 else num_src
    srcs, local = torch.empty(room, dtype=dsts.dtype, device="cpu"), torch.empty_like(sub_indices)
    total = _native.compact(dsts, count, sub_indices, edges, num_nodes, srcs, local)
    return (
        srcs if num_src >= 0 else srcs[:total].clone(),
        local,
        torch.scalar_tensor(total, dtype=torch.int64, device="cpu"),
    )


def edge_dst(indptr: Tensor, num_edges: int, like: Tensor) -> Tensor:
    """Row of each edge ``[num_edges]`` in the id dtype of ``like``; 0 past the last valid edge."""
    indptr = check_offsets(indptr)
    out = torch.empty(num_edges, dtype=like.dtype, device="cpu")
    _native.edge_dst(indptr, check_ids(out, "like"))
    return out


def add_self_loops(indptr: Tensor, indices: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly one self-loop per destination, at the end of its row; existing loops are dropped. ``[E + n_dst]``.

    Rows past ``dst_count`` are padding and stay empty.
    """
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    out_indptr = torch.empty_like(indptr)
    out_indices = indices.new_empty(indices.numel() + indptr.numel() - 1)
    _native.add_self_loops(indptr, indices, int(dst_count), out_indptr, out_indices)
    return out_indptr, out_indices


def block_self_loops(
    indptr: Tensor, indices: Tensor, sources: Tensor, dsts: Tensor, dst_count: Tensor, num_src: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_self_loops`` of a block, whose loops are found by global ids; also the out-degrees, int64 ``[num_src]``."""
    check_ids(sources, "sources")
    check_ids(dsts, "dsts")
    row = edge_dst(indptr, indices.numel(), indices)
    if dsts.numel():
        indices = torch.where(sources == torch.index_select(dsts, 0, row), row, indices)
    looped = add_self_loops(indptr, indices, dst_count)
    return *looped, out_degrees(*looped, num_src) if num_src else indptr.new_empty(0)


def sampled_self_loops(indptr: Tensor, indices: Tensor, dsts: Tensor, dst_count: Tensor) -> tuple[Tensor, Tensor]:
    """``add_self_loops`` of a sample whose edges and destinations are global ids: so are the loops."""
    check_ids(indices, "indices")
    check_ids(dsts, "dsts")
    n = dsts.numel()
    numbers = torch.arange(n, n + indices.numel(), dtype=indices.dtype, device="cpu")
    looped, edges, _ = block_self_loops(indptr, numbers, indices, dsts, dst_count, 0)
    ids = torch.index_select(torch.cat((dsts, indices)), 0, edges) if n else edges
    ids[int(looped[-1]) :] = 0
    return looped, ids


def out_degrees(indptr: Tensor, indices: Tensor, num_src: int) -> Tensor:
    """Edges leaving every source, int64 ``[num_src]``, over the valid edges."""
    out = torch.empty(num_src, dtype=torch.int64, device="cpu")
    _native.out_degrees(check_offsets(indptr), check_ids(indices, "indices"), out)
    return out
