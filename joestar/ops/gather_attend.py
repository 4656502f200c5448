"""``joestar::gather_attend``: graph attention that reads a table in place, scores included (thesis 5.3.2).

Edge-map-reduce on the sampling side: where an attention layer is the first, its rows come from the feature table and
the scores of both ends are products of those rows with a vector per head, ``W^T a``. One kernel reads the row of an
edge once for score and sum; neither rows nor scores per source are stored, and the sources need no local numbers. The
backward pass reads the rows again.

On a CPU the op is composed of others, a block of edges' rows at a time in memory.
"""

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from joestar.kernels import gpu_kernels
from joestar.ops.library import LIBRARY

ops = torch.ops.joestar

_CSC = "Tensor indptr, Tensor indices, Tensor dsts, Tensor table"
_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(
    f"gather_attend({_CSC}, Tensor v_src, Tensor v_dst, float slope, Tensor? bits, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    f"gather_attend_grad({_CSC}, Tensor s_src, Tensor s_dst, Tensor top, Tensor total, Tensor grad, float slope,"
    " Tensor? bits, float scale) -> Tensor",
    tags=_TAGS,
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(indptr: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor) -> None:
    fits = table.dim() == 2 and v_src.dim() == 2 and v_src.shape == v_dst.shape and v_src.shape[1] == table.shape[1]
    if not fits or dsts.shape[0] != indptr.shape[0] - 1:
        raise ValueError(
            "gather_attend: expected a table [N, F], vectors [H, F] and dsts [num_dst]; got "
            f"{list(table.shape)}, {list(v_src.shape)} and {list(v_dst.shape)}, {list(dsts.shape)} with "
            f"{indptr.shape[0] - 1} rows"
        )


def _composed(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, slope: float,
    bits: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention over ``table[indices]`` with scores of both ends' rows.

    Args:
        indptr: int64 ``[num_dst + 1]``; indices: rows of the table per edge, ``[E]``; dsts: those of destinations.
        table: ``[N, F]``. v_src, v_dst: ``[H, F]``; a score is the product of a row and such a vector.
        slope: of the leaky ReLU. bits: int32 ``[E, ceil(H / 32)]``, which coefficients dropout keeps; scale: their
            factor.

    Returns:
        (``y`` ``[num_dst, H, F]`` in the table's dtype; scores of the edges' sources ``[E, H]`` and of destinations
        ``[num_dst, H]``; per row and head the largest logit and the sum of exponentials ``[num_dst, H]``), at least
        float32.
    """
    _check(indptr, dsts, table, v_src, v_dst)
    wide = _wide(table.dtype)
    with torch.autocast(table.device.type, enabled=False):
        rows = torch.index_select(table, 0, indices).to(wide)
        s_src = rows @ v_src.to(wide).t()
        s_dst = torch.index_select(table, 0, dsts).to(wide) @ v_dst.to(wide).t()
        edge = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
        y, top, total = ops.attend(indptr, edge, s_src, s_dst, rows.unsqueeze(1), slope, bits, scale)
    return y.to(table.dtype), s_src, s_dst, top, total


def _composed_grad(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, s_src: Tensor, s_dst: Tensor, top: Tensor,
    total: Tensor, grad: Tensor, slope: float, bits: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Gradients of ``v_src`` and ``v_dst``, ``[2, H, F]``, at least float32."""
    wide = s_src.dtype
    with torch.autocast(table.device.type, enabled=False):
        rows = torch.index_select(table, 0, indices).to(wide)
        edge = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
        for_src, for_dst, _ = ops.attend_grad(
            indptr, edge, s_src, s_dst, rows.unsqueeze(1), top, total, grad.to(wide), slope, bits, scale, False
        )
        own = torch.index_select(table, 0, dsts).to(wide)
        valid = (torch.arange(indices.shape[0], device=indices.device) < indptr[-1]).unsqueeze(-1)
        for_src = torch.where(valid, for_src, torch.zeros_like(for_src))
        return torch.stack((for_src.t() @ rows, for_dst.t() @ own))


def _on_gpu(name: str, composed):
    kernel = getattr(gpu_kernels(), name, None)
    if kernel is None:
        return composed
    if name == "gather_attend":

        def run(indptr, indices, dsts, table, v_src, v_dst, *rest):
            _check(indptr, dsts, table, v_src, v_dst)
            return kernel(indptr, indices, dsts, table, v_src, v_dst, *rest)

        return run
    return kernel


LIBRARY.impl("gather_attend", _composed, "CPU")
LIBRARY.impl("gather_attend", _on_gpu("gather_attend", _composed), "CUDA")
LIBRARY.impl("gather_attend_grad", _composed_grad, "CPU")
LIBRARY.impl("gather_attend_grad", _on_gpu("gather_attend_grad", _composed_grad), "CUDA")


@register_fake("joestar::gather_attend")
def _(indptr, indices, dsts, table, v_src, v_dst, slope, bits, scale):
    rows, wide = (dsts.shape[0], v_src.shape[0]), _wide(table.dtype)
    scores = table.new_empty((indices.shape[0], v_src.shape[0]), dtype=wide)
    per_row = (table.new_empty(rows, dtype=wide) for _ in range(3))
    return table.new_empty((*rows, table.shape[1])), scores, *per_row


@register_fake("joestar::gather_attend_grad")
def _(indptr, indices, dsts, table, s_src, s_dst, top, total, grad, slope, bits, scale):
    return s_src.new_empty((2, grad.shape[1], grad.shape[2]))


def _setup(ctx, inputs, output):
    indptr, indices, dsts, table, v_src, v_dst, ctx.slope, bits, ctx.scale = inputs
    if ctx.needs_input_grad[3]:
        raise RuntimeError("gather_attend has no gradient for its table; gather with index_select, then use attend")
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = v_src.dtype, v_dst.dtype
    ctx.save_for_backward(indptr, indices, dsts, table, *output[1:], bits)


def _backward(ctx, grad, *of_saved):
    *saved, bits = ctx.saved_tensors
    both = ops.gather_attend_grad(*saved, grad.contiguous(), ctx.slope, bits, ctx.scale)
    for_src, for_dst = (both[i].to(dtype) for i, dtype in enumerate(ctx.dtypes))
    return None, None, None, None, for_src, for_dst, None, None, None


register_autograd("joestar::gather_attend", _backward, setup_context=_setup)
