"""Gradients of the differentiable ops, themselves written as ops so that AOTAutograd traces them.

The structure (indptr, indices) is never differentiable (thesis 5.3.1, "Graph Computation").
"""

import torch
from torch.library import register_autograd

from joestar.kernels.edge_program import EdgeProgram, check_wanted
from joestar.kernels.layout import shares_rows

ops = torch.ops.joestar


def _spmm_setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.reduce = inputs
    extremum = ctx.reduce in ("max", "min")
    ctx.num_src, ctx.shared = x.shape[0], shares_rows(x, weight)
    needs_x = extremum or (weight is not None and ctx.needs_input_grad[3])
    ctx.save_for_backward(indptr, indices, x if needs_x else None, weight, output if extremum else None)


def _spmm_backward(ctx, grad):
    indptr, indices, x, weight, y = ctx.saved_tensors
    grad = grad.contiguous()
    if ctx.reduce in ("max", "min"):
        grad_x, grad_weight = ops.spmm_extremum_grad(indptr, indices, x, weight, y, grad)
        return None, None, grad_x, grad_weight if weight is not None else None, None
    grad_x = grad_weight = None
    if ctx.needs_input_grad[2]:
        grad_x = ops.spmm_grad_x(indptr, indices, grad, weight, ctx.num_src, ctx.reduce, ctx.shared)
    if ctx.needs_input_grad[3]:
        grad_weight = ops.spmm_grad_weight(indptr, indices, x, grad, weight, ctx.reduce)
    return None, None, grad_x, grad_weight, None


register_autograd("joestar::spmm", _spmm_backward, setup_context=_spmm_setup)


def _csr_setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.num_dst, ctx.reduce = inputs
    extremum = ctx.reduce in ("max", "min")
    needs_x = extremum or (weight is not None and ctx.needs_input_grad[3])
    ctx.save_for_backward(indptr, indices, x if needs_x else None, weight, output if extremum else None)
    ctx.dtype = x.dtype


def _csr_backward(ctx, grad):
    """The transpose of a scatter is a gather over the same offsets: nothing is converted."""
    indptr, indices, x, weight, y = ctx.saved_tensors
    grad = grad.contiguous()
    if y is not None:
        grad_x, grad_weight = ops.spmm_csr_extremum_grad(indptr, indices, x, weight, y, grad)
        return None, None, grad_x, grad_weight if weight is not None else None, None, None
    grad_x = grad_weight = None
    if ctx.reduce == "mean":
        degree = ops.out_degrees(indptr, indices, ctx.num_dst).clamp(min=1)
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide) / degree.to(wide).reshape((-1,) + (1,) * (grad.dim() - 1))
    if ctx.needs_input_grad[2]:
        grad_x = ops.spmm(indptr, indices, grad, weight, "sum").to(ctx.dtype)
    if ctx.needs_input_grad[3]:
        grad_weight = ops.spmm_grad_weight(indptr, indices, grad, x, weight, "sum")
    return None, None, grad_x, grad_weight, None, None


register_autograd("joestar::spmm_csr", _csr_backward, setup_context=_csr_setup)


def _coo_setup(ctx, inputs, output):
    src, dst, x, weight, num_dst, reduce = inputs
    bounds = torch.arange(num_dst + 1, dtype=dst.dtype, device=dst.device)
    _spmm_setup(ctx, (torch.searchsorted(dst, bounds), src, x, weight, reduce), output)


def _coo_backward(ctx, grad):
    """Offsets of the rows, found by bisection, are all that the gradients of ``spmm`` need beyond the edges."""
    return None, None, *_spmm_backward(ctx, grad)[2:4], None, None


register_autograd("joestar::spmm_coo", _coo_backward, setup_context=_coo_setup)


def _sddmm_setup(ctx, inputs, output):
    indptr, indices, lhs, rhs, ctx.op = inputs
    ctx.num_src = 0 if lhs is None else lhs.shape[0]
    product = ctx.op in ("mul", "div", "dot")
    ctx.save_for_backward(indptr, indices, lhs if product else None, rhs if product else None)


def _sddmm_backward(ctx, grad):
    indptr, indices, lhs, rhs = ctx.saved_tensors
    grad, op = grad.contiguous(), ctx.op
    if op == "dot":
        for_lhs = ops.spmm_grad_x(indptr, indices, rhs, grad, ctx.num_src, "sum") if ctx.needs_input_grad[2] else None
        for_rhs = ops.spmm(indptr, indices, lhs, grad, "sum") if ctx.needs_input_grad[3] else None
        return None, None, for_lhs, for_rhs, None
    edge_lhs = edge_rhs = grad
    if op == "sub":
        edge_rhs = -grad
    elif op in ("mul", "div"):
        right = ops.sddmm(indptr, indices, None, rhs, "copy_rhs")
        left = ops.sddmm(indptr, indices, lhs, None, "copy_lhs")
        if op == "mul":
            edge_lhs, edge_rhs = grad * right, grad * left
        else:
            edge_lhs, edge_rhs = grad / right, -grad * left / (right * right)
    for_lhs = ops.scatter_src(indptr, indices, edge_lhs, ctx.num_src) if ctx.needs_input_grad[2] else None
    for_rhs = ops.scatter_dst(indptr, edge_rhs) if ctx.needs_input_grad[3] else None
    return None, None, for_lhs, for_rhs, None


register_autograd("joestar::sddmm", _sddmm_backward, setup_context=_sddmm_setup)


def _softmax_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _softmax_backward(ctx, grad):
    indptr, out = ctx.saved_tensors
    return None, ops.edge_softmax_grad(indptr, out, grad.contiguous())


register_autograd("joestar::edge_softmax", _softmax_backward, setup_context=_softmax_setup)


def _attend_setup(ctx, inputs, output):
    indptr, indices, s_src, s_dst, x, ctx.slope, bits, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(indptr, indices, s_src, s_dst, x, *output[1:], bits)


def _attend_backward(ctx, grad, *of_saved):
    *saved, bits = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grads = ops.attend_grad(*saved, grad.contiguous(), ctx.slope, bits, ctx.scale, needs[4])
    return None, None, *(g if needed else None for g, needed in zip(grads, needs[2:5], strict=True)), None, None, None


register_autograd("joestar::attend", _attend_backward, setup_context=_attend_setup)


def _edge_map_setup(ctx, inputs, output):
    indptr, indices, leaves, ctx.program, ctx.reduce = inputs
    check_wanted(EdgeProgram.parse(ctx.program), leaves, [leaf.requires_grad for leaf in leaves])
    ctx.save_for_backward(indptr, indices, *leaves)


def _edge_map_backward(ctx, grad):
    indptr, indices, *leaves = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[2])
    grads = ops.edge_map_grad(indptr, indices, leaves, ctx.program, ctx.reduce, grad.contiguous(), wanted)
    return None, None, [g if w else None for g, w in zip(grads, wanted, strict=True)], None, None


register_autograd("joestar::edge_map", _edge_map_backward, setup_context=_edge_map_setup)


def _dropout_setup(ctx, inputs, output):
    _, bits, ctx.p, ctx.relu = inputs
    ctx.save_for_backward(output if ctx.relu else bits)


def _dropout_backward(ctx, grad):
    (saved,) = ctx.saved_tensors
    grad_x = ops.relu_dropout_grad(grad, saved, ctx.p) if ctx.relu else ops.dropout_apply(grad, saved, ctx.p, False)
    return grad_x, None, None, None


register_autograd("joestar::dropout_apply", _dropout_backward, setup_context=_dropout_setup)


def _cat_setup(ctx, inputs, output):
    indptr, indices, x, bits, ctx.scale, ctx.reduce = inputs
    ctx.save_for_backward(indptr, indices, x, bits)


def _cat_backward(ctx, grad):
    indptr, indices, x, bits = ctx.saved_tensors
    grad_x = ops.aggregate_cat_grad(indptr, indices, grad, x, bits, ctx.scale, ctx.reduce)
    return None, None, grad_x, None, None, None


register_autograd("joestar::aggregate_cat", _cat_backward, setup_context=_cat_setup)


def _cat_kept_setup(ctx, inputs, output):
    indptr, indices, _, _, ctx.scale, ctx.reduce, bias = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(indptr, indices, output[1])


def _cat_kept_backward(ctx, grad, of_kept):
    indptr, indices, kept = ctx.saved_tensors
    grad_x, grad_bias = ops.aggregate_cat_kept_grad(indptr, indices, grad, kept, ctx.scale, ctx.reduce, ctx.biased)
    return None, None, grad_x, None, None, None, grad_bias if ctx.biased else None


register_autograd("joestar::aggregate_cat_kept", _cat_kept_backward, setup_context=_cat_kept_setup)


def _check_constant(ctx, inputs):
    for name, position in (("weight", 3), ("own", 4)):
        if inputs[position] is not None and ctx.needs_input_grad[position]:
            raise RuntimeError(f"aggregate_rows has no gradient for {name}; use spmm, whose weights may be trained")


def _rows_setup(ctx, inputs, output):
    _check_constant(ctx, inputs)
    indptr, indices, x, weight, own, bits, ctx.scale, ctx.reduce = inputs
    ctx.save_for_backward(indptr, indices, x, weight, own, bits)


def _rows_backward(ctx, grad):
    indptr, indices, x, weight, own, bits = ctx.saved_tensors
    grad_x = ops.aggregate_rows_grad(indptr, indices, grad.contiguous(), x, weight, own, bits, ctx.scale, ctx.reduce)
    return None, None, grad_x, None, None, None, None, None


register_autograd("joestar::aggregate_rows", _rows_backward, setup_context=_rows_setup)


def _rows_kept_setup(ctx, inputs, output):
    _check_constant(ctx, inputs)
    indptr, indices, _, weight, own, _, ctx.scale, ctx.reduce, bias = inputs
    ctx.biased = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(indptr, indices, weight, own, output[1])


def _rows_kept_backward(ctx, grad, of_kept):
    indptr, indices, weight, own, kept = ctx.saved_tensors
    grad_x, grad_bias = ops.aggregate_rows_kept_grad(
        indptr, indices, grad.contiguous(), weight, own, kept, ctx.scale, ctx.reduce, ctx.biased
    )
    return None, None, grad_x, None, None, None, None, None, grad_bias if ctx.biased else None


register_autograd("joestar::aggregate_rows_kept", _rows_kept_backward, setup_context=_rows_kept_setup)


def _bias_setup(ctx, inputs, output):
    pass


def _bias_backward(ctx, grad):
    return grad, ops.column_sums(grad.contiguous()) if ctx.needs_input_grad[1] else None


register_autograd("joestar::add_bias", _bias_backward, setup_context=_bias_setup)


def _bias_relu_setup(ctx, inputs, output):
    ctx.scale = inputs[3]
    ctx.save_for_backward(output[1])


def _bias_relu_backward(ctx, grad, of_kept):
    (kept,) = ctx.saved_tensors
    biased = ctx.needs_input_grad[1]
    grad_x, grad_bias = ops.bias_relu_grad(grad.contiguous(), kept, ctx.scale, biased)
    return grad_x, grad_bias if biased else None, None, None


register_autograd("joestar::bias_relu", _bias_relu_backward, setup_context=_bias_relu_setup)


def _join_setup(ctx, inputs, output):
    ctx.widths = [part.shape[1] if part.dim() == 2 else 0 for part in inputs[0]]


def _join_backward(ctx, grad):
    return ops.split_columns(grad, ctx.widths), None


register_autograd("joestar::join_columns", _join_backward, setup_context=_join_setup)


def _join_all_setup(ctx, inputs, output):
    ctx.counts = inputs[1]
    ctx.widths = [part.shape[1] if part.dim() == 2 else 0 for part in inputs[0]]


def _join_all_backward(ctx, grads):
    """Gradients of matrices that nobody reads are zeros here."""
    return ops.split_columns_all(grads, ctx.counts, ctx.widths), None, None


register_autograd("joestar::join_columns_all", _join_all_backward, setup_context=_join_all_setup)
