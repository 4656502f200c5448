"""``joestar::gather_attend_linear``: graph attention that reads a table in place, scores included (thesis 5.3.2).

Edge-map-reduce on the sampling side: where an attention layer is the first, its rows come from the feature table and
the scores of both ends are products of those rows with a vector per head, ``W^T a``. Neither rows nor scores per source
are stored, and the sources need no local numbers. The product of every head's sums and weights belongs to the op: what
the softmax takes off the gradients is then also known from its result, ``<grad, out>``, which is less to read than the
sums, and one pass over the rows is all that the backward pass needs.

On a CPU the op is composed of others, with all edges' rows in memory. On a GPU the backend's graphs have its two parts,
for the product to take an epilogue.
"""

import torch
from torch import Tensor

from joestar import kernels
from joestar.ops.registry import CSC, Padding, define, define_gradient, define_structural
from joestar.ops.shapes import wide_dtype

ops = torch.ops.joestar

_READS = f"{CSC}, Tensor dsts, Tensor table"
_VECTORS = "Tensor v_src, Tensor v_dst"
_DROPOUT = "float slope, Tensor? bits, float scale"
_EDGES = "Tensor? s_edge=None"


def _check(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, s_edge: Tensor | None
) -> None:
    fits = table.dim() == 2 and v_src.dim() == 2 and v_src.shape == v_dst.shape and v_src.shape[1] == table.shape[1]
    if not fits or dsts.shape[0] != indptr.shape[0] - 1:
        raise ValueError(
            "gather_attend: expected a table [N, F], vectors [H, F] and dsts [num_dst]; got "
            f"{list(table.shape)}, {list(v_src.shape)} and {list(v_dst.shape)}, {list(dsts.shape)} with "
            f"{indptr.shape[0] - 1} rows"
        )
    if s_edge is not None and s_edge.shape != (indices.shape[0], v_src.shape[0]):
        raise ValueError(
            f"gather_attend: expected scores of edges s_edge {[indices.shape[0], v_src.shape[0]]}, got "
            f"{list(s_edge.shape)}"
        )


def _edges(indptr: Tensor, indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers of the edges, which of them are valid ``[E, 1]``, their rows, 0 of the others: those may be NaN)."""
    number = torch.arange(indices.shape[0], device=indices.device)
    valid = (number < indptr[-1]).unsqueeze(-1)
    rows = torch.index_select(table, 0, indices).to(wide_dtype(table.dtype))
    return number.to(indices.dtype), valid, torch.where(valid, rows, 0)


def _factors(bits: Tensor | None, scale: float, like: Tensor) -> Tensor | float:
    """``scale`` ``[E, H]`` where dropout keeps a coefficient, else 0; 1 without dropout."""
    if bits is None:
        return 1.0
    head = torch.arange(like.shape[1], device=like.device)
    return ((bits[:, head % bits.shape[1]] >> (head // bits.shape[1]).to(torch.int32)) & 1).to(like.dtype) * scale


def gather_attend(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, slope: float,
    bits: Tensor | None, scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over ``table[indices]`` with scores of both ends' rows.

    Args:
        indptr: int64 ``[num_dst + 1]``; indices: rows of the table per edge, ``[E]``; dsts: those of destinations.
        table: ``[N, F]``. v_src, v_dst: ``[H, F]``; a score is the product of a row and such a vector.
        slope: of the leaky ReLU. bits: int32 ``[E, ceil(H / 32)]``, which coefficients dropout keeps; scale: their
            factor. s_edge: scores of the edges ``[E, H]``, added to those of both ends, or none.

    Returns:
        (``y`` ``[num_dst, H, F]`` in the table's dtype; the coefficients before dropout ``[E, H]``, at least float32,
        negative where the activation has the slope ``slope``, undefined behind the last edge).
    """
    _check(indptr, indices, dsts, table, v_src, v_dst, s_edge)
    with torch.autocast(table.device.type, enabled=False):
        edge, valid, rows = _edges(indptr, indices, table)
        own = torch.index_select(table, 0, dsts).to(rows.dtype)
        z = ops.sddmm(indptr, edge, rows @ v_src.to(rows.dtype).t(), own @ v_dst.to(rows.dtype).t(), "add")
        z = z if s_edge is None else z + torch.where(valid, s_edge.to(rows.dtype), 0)
        alpha = ops.edge_softmax(indptr, torch.nn.functional.leaky_relu(z, slope))
        kept = torch.where(valid, alpha * _factors(bits, scale, alpha), 0)
        y = ops.spmm(indptr, edge, rows.unsqueeze(1), kept, "sum")
    return y.to(table.dtype), torch.where(z > 0, alpha, -alpha)


def gather_attend_grad(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, alpha: Tensor, grad: Tensor, out: Tensor,
    out_grad: Tensor, slope: float, bits: Tensor | None, scale: float, of_edges: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Gradients of ``v_src`` and ``v_dst``, ``[2, H, F]``; that of ``s_edge`` ``[E, H]``), at least float32.

    The latter is 0 behind the last edge, and empty ``[0]`` unless asked for by ``of_edges``.

    ``grad``: that of ``y``. ``out``, ``out_grad`` ``[num_dst, H, C]``: any linear function of every head's ``y`` and
    its gradient, or ``y`` and ``grad`` themselves; their products are those of ``y`` and ``grad``.
    """
    with torch.autocast(table.device.type, enabled=False):
        edge, valid, rows = _edges(indptr, indices, table)
        through = ops.spmm_grad_weight(indptr, edge, rows.unsqueeze(1), grad.to(rows.dtype), alpha, "sum")
        deltas = (out.to(rows.dtype) * out_grad.to(rows.dtype)).sum(-1)
        off = torch.index_select(deltas, 0, ops.edge_dst(indptr, indices.shape[0], indices)) if deltas.numel() else 0
        for_z = alpha.abs() * (through * _factors(bits, scale, alpha) - off)
        for_z = torch.where(valid, torch.where(alpha > 0, for_z, for_z * slope), 0)
        own = torch.index_select(table, 0, dsts).to(rows.dtype)
        of_vectors = torch.stack((for_z.t() @ rows, ops.scatter_dst(indptr, for_z).t() @ own))
        return of_vectors, for_z if of_edges else for_z.new_empty(0)


def gather_attend_linear(
    indptr: Tensor, indices: Tensor, dsts: Tensor, table: Tensor, v_src: Tensor, v_dst: Tensor, weight: Tensor,
    slope: float, bits: Tensor | None, scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(``weight[h] @ y[i, h]`` ``[num_dst, H, C]``, ``y``, coefficients) with ``weight`` ``[H, C, F]``."""
    _check(indptr, indices, dsts, table, v_src, v_dst, s_edge)
    with torch.autocast(table.device.type, enabled=False):
        y, alpha = ops.gather_attend(indptr, indices, dsts, table, v_src, v_dst, slope, bits, scale, s_edge)
        return ops.head_linear(y, weight.to(y.dtype)), y, alpha


def _fake(indptr, indices, dsts, table, v_src, v_dst, slope, bits, scale, s_edge=None):
    alpha = table.new_empty((indices.shape[0], v_src.shape[0]), dtype=wide_dtype(table.dtype))
    return table.new_empty((dsts.shape[0], v_src.shape[0], table.shape[1])), alpha


def _grad_fake(indptr, indices, dsts, table, alpha, grad, out, out_grad, slope, bits, scale, of_edges=False):
    return alpha.new_empty((2, grad.shape[1], grad.shape[2])), alpha.new_empty(alpha.shape if of_edges else (0,))


def _linear_fake(indptr, indices, dsts, table, v_src, v_dst, weight, slope, bits, scale, s_edge=None):
    heads, columns, width = weight.shape
    rows = dsts.shape[0], heads
    alpha = table.new_empty((indices.shape[0], heads), dtype=wide_dtype(table.dtype))
    return table.new_empty((*rows, columns)), table.new_empty((*rows, width)), alpha


def _in_one_pass(indptr: Tensor, indices: Tensor, table: Tensor, heads: int) -> bool:
    """Whether the gradient's kernel takes its rows in one pass, where products of ``out`` and ``out_grad`` are unread.

    On a GPU, for sizes that are known.
    """
    fits = kernels.find("gpu_warp_rows.fits") if table.device.type == "cuda" else None
    sizes = indptr.shape[0] - 1, indices.shape[0]
    return fits is not None and all(isinstance(size, int) for size in sizes) and fits(*sizes, table, heads)


def _setup(ctx, inputs, output):
    indptr, indices, dsts, table, v_src, v_dst, weight, ctx.slope, bits, ctx.scale, s_edge = inputs
    if ctx.needs_input_grad[3]:
        raise RuntimeError("gather_attend has no gradient for its table; gather with index_select, then use attend")
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = v_src.dtype, v_dst.dtype, weight.dtype, None if s_edge is None else s_edge.dtype
    out, *rest = output
    out = None if _in_one_pass(indptr, indices, table, v_src.shape[0]) else out
    ctx.save_for_backward(indptr, indices, dsts, table, weight, bits, *rest, out)


def _backward(ctx, grad, *of_saved):
    indptr, indices, dsts, table, weight, bits, y, alpha, out = ctx.saved_tensors
    grad = grad.contiguous()
    for_y = ops.head_linear(grad, weight.to(y.dtype).transpose(1, 2))
    *dtypes, of_edge = ctx.dtypes
    of_edges = of_edge is not None and ctx.needs_input_grad[10]
    both, for_edge = ops.gather_attend_grad(
        indptr, indices, dsts, table, alpha, for_y, *((y, for_y) if out is None else (out, grad)), ctx.slope, bits,
        ctx.scale, of_edges,
    )  # fmt: skip
    grads = both[0], both[1], ops.head_linear_weight_grad(y, grad)
    grads = [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
    return *[None] * 4, *grads, None, None, None, for_edge.to(of_edge) if of_edges else None


define_structural(
    f"gather_attend({_READS}, {_VECTORS}, {_DROPOUT}, {_EDGES}) -> (Tensor, Tensor)", gather_attend, fake=_fake,
    cuda="gpu_gather_attend",
)  # fmt: skip
define_gradient(
    f"gather_attend_grad({_READS}, Tensor alpha, Tensor grad, Tensor out, Tensor out_grad, {_DROPOUT},"
    " bool of_edges=False) -> (Tensor, Tensor)", gather_attend_grad, fake=_grad_fake, cuda="gpu_gather_attend",
)  # fmt: skip
define(
    f"gather_attend_linear({_READS}, {_VECTORS}, Tensor weight, {_DROPOUT}, {_EDGES}) -> (Tensor, Tensor, Tensor)",
    gather_attend_linear, fake=_linear_fake, gradient=(_setup, _backward), padding=Padding.SAFE, dissolved=("cuda",),
)  # fmt: skip
