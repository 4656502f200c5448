"""``joestar::attend_own``: attention whose scores are products of the rows it aggregates, which need gradients.

The gradient of a row has three parts: through the weighted sums, through its score as a source and through that as a
destination. One kernel writes their sum; separately, each would be as large as the rows.
"""

import torch
from torch import Tensor

from joestar import kernels
from joestar.kernels.determinism import is_deterministic
from joestar.kernels.layout import NARROW
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.shapes import wide_dtype

ops = torch.ops.joestar

_ARGUMENTS = f"{CSC}, Tensor x, Tensor v_src, Tensor v_dst"
_DROPOUT = "float slope, Tensor? bits, float scale, Tensor? s_edge=None"


def attend_own(
    indptr: Tensor, indices: Tensor, x: Tensor, v_src: Tensor, v_dst: Tensor, slope: float, bits: Tensor | None,
    scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``attend`` of rows ``x`` ``[N, F]``, the first of which are the destinations', with vectors ``[H, F]``.

    ``s_edge`` ``[E, H]``, scores of the edges, are rounded to the dtype of ``x`` as those of both ends are.

    Returns:
        (sums ``[num_dst, H, F]``, scores ``[N, H]`` and ``[num_dst, H]``, and what else ``attend`` returns).
    """
    n = indptr.shape[0] - 1
    if x.dim() != 2 or v_src.shape != v_dst.shape or v_src.shape[1:] != x.shape[1:] or n > x.shape[0]:
        raise ValueError(
            "attend_own: expected rows [N, F], N at least the number of destinations, and vectors [H, F]; got "
            f"{list(x.shape)}, {list(v_src.shape)}, {list(v_dst.shape)} and {n} destinations"
        )
    with torch.autocast(x.device.type, enabled=False):
        s_src, s_dst = _scores(x, x.shape[0], v_src), _scores(x, n, v_dst)
        s_edge = s_edge if s_edge is None else s_edge.to(x.dtype)
        y, top, total = ops.attend(indptr, indices, s_src, s_dst, x.unsqueeze(1), slope, bits, scale, s_edge)
    return y, s_src, s_dst, top, total


def _scores(x: Tensor, n: int, vectors: Tensor) -> Tensor:
    """``[n, H]``: products of the first rows of ``x`` and every head's vector."""
    kernel = kernels.find("gpu_gather_attend.first_products") if x.device.type == "cuda" else None
    vectors = vectors.to(x.dtype)
    return x[:n] @ vectors.t() if kernel is None or vectors.shape[0] > NARROW else kernel(x, n, vectors)


def attend_own_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, v_src: Tensor, v_dst: Tensor, s_src: Tensor, s_dst: Tensor,
    top: Tensor, total: Tensor, grad: Tensor, slope: float, bits: Tensor | None, scale: float,
    s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, of both vectors ``[2, H, F]`` and (empty without) ``s_edge`` in the dtype of ``x``."""
    n, dtype = s_dst.shape[0], x.dtype
    with torch.autocast(x.device.type, enabled=False):
        s_edge = s_edge if s_edge is None else s_edge.to(dtype)
        for_src, for_dst, for_x, for_edge = ops.attend_grad(
            indptr, indices, s_src, s_dst, x.unsqueeze(1), top, total, grad, slope, bits, scale, True, s_edge
        )
        for_x = for_x.squeeze(1).addmm_(for_src, v_src.to(dtype))
        for_x[:n].addmm_(for_dst, v_dst.to(dtype))
        return for_x, torch.stack((for_src.t() @ x, for_dst.t() @ x[:n])), for_edge


def _on_gpu(kernel):
    """The kernel adds in any order."""

    def run(indptr, indices, x, v_src, v_dst, s_src, s_dst, top, total, grad, slope, bits, scale, s_edge=None):
        s_edge = s_edge if s_edge is None else s_edge.to(x.dtype)
        arguments = indptr, indices, x, v_src, v_dst, s_src, s_dst, top, total, grad, slope, bits, scale, s_edge
        if is_deterministic():
            return attend_own_grad(*arguments)
        with torch.autocast("cuda", enabled=False):
            return kernel(*arguments)

    return run


def _fake(indptr, indices, x, v_src, v_dst, slope, bits, scale, s_edge=None):
    heads, rows = v_src.shape[0], (indptr.shape[0] - 1, v_src.shape[0])
    wide = wide_dtype(x.dtype)
    top, total = (x.new_empty(rows, dtype=wide) for _ in range(2))
    return x.new_empty((*rows, x.shape[1])), x.new_empty((x.shape[0], heads)), x.new_empty(rows), top, total


def _grad_fake(indptr, indices, x, v_src, v_dst, s_src, s_dst, top, total, grad, slope, bits, scale, s_edge=None):
    for_edge = x.new_empty((0,) if s_edge is None else s_edge.shape)
    return x.new_empty(x.shape), x.new_empty((2, *v_src.shape)), for_edge


def _setup(ctx, inputs, output):
    indptr, indices, x, v_src, v_dst, ctx.slope, bits, ctx.scale, s_edge = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(indptr, indices, x, v_src, v_dst, *output[1:], bits, s_edge)


def _backward(ctx, grad, *of_saved):
    *saved, bits, s_edge = ctx.saved_tensors
    for_x, vectors, for_edge = ops.attend_own_grad(*saved, grad.contiguous(), ctx.slope, bits, ctx.scale, s_edge)
    for_src, for_dst = (g.to(v.dtype) for g, v in zip(vectors.unbind(0), saved[3:5], strict=True))
    for_edge = for_edge.to(s_edge.dtype) if s_edge is not None and ctx.needs_input_grad[8] else None
    return None, None, for_x, for_src, for_dst, None, None, None, for_edge


define(
    f"attend_own({_ARGUMENTS}, {_DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", attend_own, fake=_fake,
    gradient=(_setup, _backward), padding=Padding.SAFE,
)  # fmt: skip
define_gradient(
    f"attend_own_grad({_ARGUMENTS}, Tensor s_src, Tensor s_dst, Tensor top, Tensor total, Tensor grad, {_DROPOUT})"
    " -> (Tensor, Tensor, Tensor)", attend_own_grad, fake=_grad_fake, cuda="gpu_attend", around_cuda=_on_gpu,
)  # fmt: skip
