"""Gradients of the differentiable ops, themselves written as ops so that AOTAutograd traces them.

The structure (indptr, indices) is never differentiable (thesis 5.3.1, "Graph Computation").
"""

import torch
from torch.library import register_autograd

ops = torch.ops.joestar


def _spmm_setup(ctx, inputs, output):
    indptr, indices, x, weight, ctx.reduce = inputs
    extremum = ctx.reduce in ("max", "min")
    ctx.num_src = x.shape[0]
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
        grad_x = ops.spmm_grad_x(indptr, indices, grad, weight, ctx.num_src, ctx.reduce)
    if ctx.needs_input_grad[3]:
        grad_weight = ops.spmm_grad_weight(indptr, indices, x, grad, weight, ctx.reduce)
    return None, None, grad_x, grad_weight, None


register_autograd("joestar::spmm", _spmm_backward, setup_context=_spmm_setup)


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
