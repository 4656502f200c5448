"""Graph attention on the CPU. Edge values live in a row's scratch memory; only the backward pass holds them all."""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_rows, check_values, require
from joestar.kernels.layout import shares_rows, wide_dtype


def attend(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, slope: float, bits: Tensor | None,
    scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Softmax over in-edges of ``leaky_relu(s_src[source] + s_dst[row] + s_edge)``, dropout, sum of source rows.

    ``s_src`` ``[N, H]``, ``s_dst`` ``[num_dst, H]``, ``s_edge`` ``[E, H]`` or none, ``x`` ``[N, H, F]`` or
    ``[N, 1, F]``; see ``reference.attend``.
    """
    args, dtype = _checked(indptr, indices, s_src, s_dst, s_edge, x, bits), x.dtype
    x, heads, width = args[5], s_dst.shape[1], x.shape[2]
    y = x.new_empty((s_dst.shape[0], heads, width))
    top, total = (torch.empty(s_dst.shape, dtype=wide_dtype(x.dtype), device="cpu") for _ in range(2))
    _native.attend(*args, heads, width, shares_rows(x, s_dst), slope, scale, y, top, total)
    return y.to(dtype), top, total


def attend_grad(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, top: Tensor, total: Tensor, grad: Tensor,
    slope: float, bits: Tensor | None, scale: float, needs_x: bool, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``attend``, in edge order: for ``s_src``, ``s_dst``, ``x`` if ``needs_x`` and ``s_edge`` if given.

    Those that there are not are empty.
    """
    args, dtype = _checked(indptr, indices, s_src, s_dst, s_edge, x, bits), x.dtype
    x, heads, width, wide = args[5], s_dst.shape[1], x.shape[2], wide_dtype(x.dtype)
    shape = [s_dst.shape[0], heads, width]
    require(list(grad.shape) == shape, f"grad {shape}", f"{list(grad.shape)}")
    for value, name in ((top, "top"), (total, "total")):
        right = value.shape == s_dst.shape and value.dtype == wide
        require(right, f"{name} {wide} {list(s_dst.shape)}", f"{value.dtype} {list(value.shape)}")
    saved = (top.contiguous(), total.contiguous(), check_values(grad.to(x.dtype), "grad"))
    grads = (x.new_empty(s_src.shape), x.new_empty(s_dst.shape), x.new_empty(x.shape if needs_x else 0))
    for_edge = x.new_empty(0 if s_edge is None else s_edge.shape)
    _native.attend_grad(
        *args, heads, width, shares_rows(x, s_dst), slope, scale, *saved, x.shape[0], *grads[:2],
        grads[2] if needs_x else None, None if s_edge is None else for_edge,
    )  # fmt: skip
    return *grads[:2], grads[2].to(dtype), for_edge


def _checked(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, s_edge: Tensor | None, x: Tensor,
    bits: Tensor | None,
) -> tuple:  # fmt: skip
    """The operands, contiguous, 16-bit rows in float32 where scores are."""
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    s_src, s_dst, x = check_values(s_src, "s_src"), check_values(s_dst, "s_dst"), check_values(x, "x")
    one = s_src.dtype == s_dst.dtype and s_src.dtype in (x.dtype, wide_dtype(x.dtype))
    require(one, "scores of the rows' dtype, or float32", f"{s_src.dtype}, {s_dst.dtype} and {x.dtype}")
    x = x.to(s_src.dtype)
    heads = s_dst.shape[1] if s_dst.dim() == 2 else -1
    fits = x.dim() == 3 and s_src.shape == (x.shape[0], heads) and x.shape[1] in (1, heads)
    expected = "scores [N, H] and [num_dst, H] with rows [N, H, F] or [N, 1, F]"
    require(fits, expected, f"{list(s_src.shape)}, {list(s_dst.shape)} and {list(x.shape)}")
    check_rows(s_dst, indptr.numel() - 1, "s_dst")
    if s_edge is not None:
        s_edge, like = check_values(s_edge, "s_edge"), (indices.numel(), heads)
        right = s_edge.shape == like and s_edge.dtype == s_src.dtype
        require(right, f"s_edge {s_src.dtype} {list(like)}", f"{s_edge.dtype} {list(s_edge.shape)}")
    if bits is not None:
        words = (indices.numel(), (heads + 31) // 32)
        right = bits.shape == words and bits.dtype == torch.int32
        require(right, f"bits int32 {list(words)}", f"{bits.dtype} {list(bits.shape)}")
        bits = bits.contiguous()
    return indptr, indices, s_src, s_dst, s_edge, x, bits
