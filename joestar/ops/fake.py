"""Shapes and dtypes of every op for tracing: a bound given as a symbolic integer becomes a symbolic size."""

import itertools

import torch
from torch.library import register_fake

from joestar.kernels.edge_program import EdgeProgram, heads_of, width_of
from joestar.kernels.layout import cat_width, message_shape


def _count(like):
    return like.new_empty((), dtype=torch.int64)


def _bound(size):
    """-1 asks for a data-dependent size: an unbacked symbol, as in ``torch.nonzero``."""
    if isinstance(size, int) and size < 0:
        return torch.library.get_ctx().new_dynamic_size()
    return size


def _sampled(indices, rows, num_edges):
    indptr = indices.new_empty((rows.shape[0] + 1,), dtype=torch.int64)
    return indptr, indices.new_empty((_bound(num_edges),)), _count(indices)


@register_fake("joestar::slice_cols")
def _(indptr, indices, dsts, dst_count, num_edges):
    return _sampled(indices, dsts, num_edges)


@register_fake("joestar::rowwise_sample")
def _(indptr, indices, row_ids, k, replace, key, site, num_edges, node_ids=None):
    return _sampled(indices, row_ids, num_edges)


@register_fake("joestar::sample_cols")
def _(indptr, indices, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return _sampled(indices, dsts, num_edges)


@register_fake("joestar::sample_eids")
def _(indptr, dsts, dst_count, k, replace, key, site, num_edges, node_ids=None):
    return dsts.new_empty((_bound(num_edges),), dtype=torch.int64)


@register_fake("joestar::weighted_sample")
def _(indptr, weight, row_ids, row_count, sliced, k, replace, key, site, num_edges, node_ids=None):
    sub_indptr = indptr.new_empty((row_ids.shape[0] + 1,))
    return sub_indptr, indptr.new_empty((_bound(num_edges),)), _count(indptr)


@register_fake("joestar::collective_sample")
def _(sub_indptr, sub_indices, weight, num_nodes, k, key, site, node_ids=None):
    return sub_indices.new_empty((k,)), _count(sub_indices)


@register_fake("joestar::slice_rows")
def _(sub_indptr, sub_indices, row_ids, srcs, src_count, num_edges):
    return sub_indptr.new_empty(sub_indptr.shape), sub_indptr.new_empty((_bound(num_edges),)), _count(sub_indptr)


@register_fake("joestar::compact")
def _(dsts, dst_count, sub_indptr, sub_indices, num_nodes, num_src):
    srcs = sub_indices.new_empty((_bound(num_src),))
    return srcs, torch.empty_like(sub_indices), _count(sub_indices)


@register_fake("joestar::spmm")
def _(indptr, indices, x, weight, reduce):
    return x.new_empty((indptr.shape[0] - 1, *message_shape(x, weight)))


@register_fake("joestar::spmm_grad_x")
def _(indptr, indices, grad, weight, num_src, reduce, shared=False):
    return grad.new_empty((num_src, *((1, *grad.shape[2:]) if shared else grad.shape[1:])))


@register_fake("joestar::spmm_grad_weight")
def _(indptr, indices, x, grad, weight_like, reduce):
    return weight_like.new_empty(weight_like.shape)


@register_fake("joestar::spmm_extremum_grad")
def _(indptr, indices, x, weight, y, grad):
    return x.new_empty(x.shape), x.new_empty((0,)) if weight is None else weight.new_empty(weight.shape)


@register_fake("joestar::spmm_csr")
def _(indptr, indices, x, weight, num_dst, reduce):
    return x.new_empty((num_dst, *x.shape[1:]))


@register_fake("joestar::spmm_csr_extremum_grad")
def _(indptr, indices, x, weight, y, grad):
    return x.new_empty(x.shape), x.new_empty((0,)) if weight is None else weight.new_empty(weight.shape)


@register_fake("joestar::spmm_coo")
def _(src, dst, x, weight, num_dst, reduce):
    return x.new_empty((num_dst, *x.shape[1:]))


@register_fake("joestar::sddmm")
def _(indptr, indices, lhs, rhs, op):
    value = rhs if lhs is None else lhs
    dtype = value.dtype if lhs is None or rhs is None else torch.promote_types(lhs.dtype, rhs.dtype)
    shape = value.shape[1:-1] if op == "dot" else value.shape[1:]
    return value.new_empty((indices.shape[0], *shape), dtype=dtype)


@register_fake("joestar::scatter_src")
def _(indptr, indices, e, num_src):
    return e.new_empty((num_src, *e.shape[1:]))


@register_fake("joestar::scatter_dst")
def _(indptr, e):
    return e.new_empty((indptr.shape[0] - 1, *e.shape[1:]))


@register_fake("joestar::edge_softmax")
def _(indptr, s):
    return s.new_empty(s.shape)


@register_fake("joestar::edge_softmax_grad")
def _(indptr, out, grad):
    return out.new_empty(out.shape)


@register_fake("joestar::attend")
def _(indptr, indices, s_src, s_dst, x, slope, bits, scale):
    rows = s_dst.shape
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    top, total = (x.new_empty(rows, dtype=wide) for _ in range(2))
    return x.new_empty((*rows, x.shape[2])), top, total


@register_fake("joestar::attend_grad")
def _(indptr, indices, s_src, s_dst, x, top, total, grad, slope, bits, scale, needs_x):
    return s_src.new_empty(s_src.shape), s_dst.new_empty(s_dst.shape), x.new_empty(x.shape if needs_x else (0,))


@register_fake("joestar::edge_map")
def _(indptr, indices, leaves, program, reduce):
    heads = heads_of(reduce)
    width = width_of(EdgeProgram.parse(program), leaves)
    return leaves[0].new_empty((indices.shape[0], heads) if heads else (indptr.shape[0] - 1, width))


@register_fake("joestar::edge_map_grad")
def _(indptr, indices, leaves, program, reduce, grad, wanted):
    return [leaf.new_empty(leaf.shape if w else (0,)) for leaf, w in zip(leaves, wanted, strict=True)]


@register_fake("joestar::edge_dst")
def _(indptr, num_edges, like):
    return like.new_empty((num_edges,))


@register_fake("joestar::sample_aggregate_self")
def _(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids=None):
    rows = (dsts.shape[0], *x.shape[1:])
    return x.new_empty(rows), x.new_empty(rows), _count(indices)


@register_fake("joestar::sample_aggregate_cat")
def _(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, ones=True, node_ids=None):
    return x.new_empty((dsts.shape[0], cat_width(x.shape[1], ones))), _count(indices)


@register_fake("joestar::aggregate_cat")
def _(indptr, indices, x, bits, scale, reduce):
    return x.new_empty((indptr.shape[0] - 1, 2 * x.shape[1]))


@register_fake("joestar::aggregate_cat_grad")
def _(indptr, indices, grad, x, bits, scale, reduce):
    return x.new_empty(x.shape)


@register_fake("joestar::aggregate_rows")
def _(indptr, indices, x, weight, own, bits, scale, reduce):
    return x.new_empty((indptr.shape[0] - 1, x.shape[1]))


@register_fake("joestar::aggregate_rows_grad")
def _(indptr, indices, grad, x, weight, own, bits, scale, reduce):
    return x.new_empty(x.shape)


def _words(x):
    return x.new_empty((x.shape[0], (x.shape[1] + 31) // 32), dtype=torch.int32)


@register_fake("joestar::aggregate_cat_kept")
def _(indptr, indices, x, bits, scale, reduce, bias=None):
    return x.new_empty((indptr.shape[0] - 1, 2 * x.shape[1])), _words(x)


@register_fake("joestar::aggregate_cat_kept_grad")
def _(indptr, indices, grad, kept, scale, reduce, biased=False):
    width = grad.shape[1] // 2
    return grad.new_empty((kept.shape[0], width)), grad.new_empty((width if biased else 0,))


@register_fake("joestar::aggregate_rows_kept")
def _(indptr, indices, x, weight, own, bits, scale, reduce, bias=None):
    return x.new_empty((indptr.shape[0] - 1, x.shape[1])), _words(x)


@register_fake("joestar::aggregate_rows_kept_grad")
def _(indptr, indices, grad, weight, own, kept, scale, reduce, biased=False):
    return grad.new_empty((kept.shape[0], grad.shape[1])), grad.new_empty((grad.shape[1] if biased else 0,))


@register_fake("joestar::sample_aggregate_own")
def _(indptr, indices, dsts, dst_count, k, replace, key, site, x, own, reduce, node_ids=None):
    return x.new_empty((dsts.shape[0], *x.shape[1:])), _count(indices)


@register_fake("joestar::add_bias")
def _(x, bias):
    return x.new_empty(x.shape)


@register_fake("joestar::bias_relu")
def _(x, bias, bits, scale):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], (x.shape[1] + 31) // 32), dtype=torch.int32)


@register_fake("joestar::bias_relu_grad")
def _(grad, kept, scale, biased):
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1] if biased else 0)


@register_fake("joestar::column_sums")
def _(x):
    return x.new_empty(x.shape[1:])


@register_fake("joestar::join_columns")
def _(parts, width):
    return parts[0].new_empty((parts[0].shape[0], width))


@register_fake("joestar::split_columns")
def _(joined, widths):
    rows = joined.shape[0]
    return [joined.new_empty((rows, width) if width else (rows,)) for width in widths]


@register_fake("joestar::join_columns_all")
def _(parts, counts, widths):
    firsts = (parts[end - count] for end, count in zip(itertools.accumulate(counts), counts, strict=True))
    return [first.new_empty((first.shape[0], width)) for first, width in zip(firsts, widths, strict=True)]


@register_fake("joestar::split_columns_all")
def _(joined, counts, widths):
    owners = [matrix for matrix, count in zip(joined, counts, strict=True) for _ in range(count)]
    return [
        matrix.new_empty((matrix.shape[0], width) if width else (matrix.shape[0],))
        for matrix, width in zip(owners, widths, strict=True)
    ]


@register_fake("joestar::dropout_apply")
def _(x, bits, p, relu):
    return x.new_empty(x.shape)


@register_fake("joestar::relu_dropout_grad")
def _(grad, y, p):
    return grad.new_empty(grad.shape)


@register_fake("joestar::dropout_bits")
def _(ids, key, site, p, columns):
    return ids.new_empty((ids.shape[0], (columns + 31) // 32), dtype=torch.int32)


@register_fake("joestar::edge_dropout_bits")
def _(indptr, num_edges, dsts, key, site, p, columns):
    return dsts.new_empty((num_edges, (columns + 31) // 32), dtype=torch.int32)


@register_fake("joestar::add_self_loops")
def _(indptr, indices, dst_count):
    return torch.empty_like(indptr), indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))


@register_fake("joestar::sampled_self_loops")
def _(indptr, indices, dsts, dst_count):
    return torch.empty_like(indptr), indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))


@register_fake("joestar::block_self_loops")
def _(indptr, indices, sources, dsts, dst_count, num_src):
    looped = indices.new_empty((indices.shape[0] + indptr.shape[0] - 1,))
    return torch.empty_like(indptr), looped, indptr.new_empty((num_src,))


@register_fake("joestar::out_degrees")
def _(indptr, indices, num_src):
    return indptr.new_empty((num_src,))


@register_fake("joestar::sample_aggregate")
def _(indptr, indices, dsts, dst_count, k, replace, key, site, x, reduce, node_ids=None):
    return x.new_empty((dsts.shape[0], *x.shape[1:])), _count(indices)


@register_fake("joestar::overflow")
def _(counts, bounds, flag):
    return flag.new_empty((len(counts),), dtype=torch.int64), flag.new_empty(())


@register_fake("joestar::take_batch")
def _(order, run, key, size):
    return order.new_empty((size,)), _count(order)


@register_fake("joestar::finish_step")
def _(key, flag, losses, run, loss, ok):
    return None
