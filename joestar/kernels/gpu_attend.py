"""Graph attention on the GPU: a program per destination, all heads in registers; forward, one pass over its edges.

Edge values are never stored, but by the gradients under ``torch.use_deterministic_algorithms(True)``. Otherwise these
add up what reaches a source in any order (atomic additions, in float32 for 16-bit values).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_grad import scatter_src_transposed, spmm_grad_x_transposed
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, require
from joestar.kernels.gpu_shared import own_rows, tile_settings
from joestar.kernels.gpu_tiles import check_values, tile_columns
from joestar.kernels.layout import shares_rows

_AHEAD = 4


@triton.jit
def _scores(s_src, own, source, valid, head, SLOPE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """(sum of both ends' scores, logit) ``[heads, 1]`` of one edge."""
    z = tl.load(s_src + source * HEADS + head, valid & (head < HEADS), 0).to(ACC) + own
    return z, tl.where(z > 0, z, z * tl.full([1, 1], SLOPE, ACC))


@triton.jit
def _factor(bits, e, valid, head, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """``SCALE`` ``[heads, 1]`` where the coefficient of edge ``e`` is kept, else 0; 1 without dropout."""
    if bits is None:
        return tl.full(head.shape, 1, ACC)
    else:
        WORDS: tl.constexpr = (HEADS + 31) // 32
        word = tl.load(bits + e * WORDS + head % WORDS, valid & (head < HEADS), 0)
        return ((word >> (head // WORDS)) & 1).to(ACC) * tl.full([1, 1], SCALE, ACC)


@triton.jit
def _row_of_x(
    x, source, valid, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr, ACC: tl.constexpr
):
    """The row of a source: ``[heads, columns]``, or ``[1, columns]`` if the heads share it."""
    if SHARED:
        return tl.load(x + source * WIDTH + column, valid & (column < WIDTH), 0).to(ACC)
    else:
        mask = valid & (head < HEADS) & (column < WIDTH)
        return tl.load(x + (source * HEADS + head) * WIDTH + column, mask, 0).to(ACC)


@triton.jit
def _attend(
    indptr, indices, s_src, s_dst, x, bits, y, top_out, total_out,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum of exponentials and weighted sum of rows: ``AHEAD`` edges at a time."""
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    head, column = tl.arange(0, TALL)[:, None], tile_columns(tl.program_id(1), BLOCK)
    own = tl.load(s_dst + i * HEADS + head, (head < HEADS) & (start < end), 0).to(ACC)
    top = tl.full([TALL, 1], float("-inf"), ACC)
    total = tl.zeros([TALL, 1], ACC)
    sums = tl.zeros([TALL, BLOCK], ACC)
    first = start
    while first < end:
        logits, rows = (), ()
        higher = top
        for j in tl.static_range(AHEAD):
            valid = first + j < end
            source = tl.load(indices + first + j, valid, 0).to(tl.int64)
            _, logit = _scores(s_src, own, source, valid, head, SLOPE, HEADS, ACC)
            logit = tl.where(valid, logit, float("-inf"))
            higher = tl.maximum(higher, logit, propagate_nan=tl.PropagateNan.ALL)
            logits = logits + (logit,)  # noqa: RUF005
            rows = rows + (_row_of_x(x, source, valid, head, column, HEADS, WIDTH, SHARED, ACC),)  # noqa: RUF005
        shrink = tl.exp(top - higher)
        total, sums = total * shrink, sums * shrink
        for j in tl.static_range(AHEAD):
            power = tl.exp(logits[j] - higher)
            total += power
            sums += rows[j] * (power * _factor(bits, first + j, first + j < end, head, SCALE, HEADS, ACC))
        top = higher
        first += AHEAD
    top = tl.where(total > 0, top, 0)
    y_row = sums / tl.where(total > 0, total, 1)
    mask = (head < HEADS) & (column < WIDTH)
    tl.store(y + (i * HEADS + head) * WIDTH + column, y_row.to(y.dtype.element_ty), mask)
    if tl.program_id(1) == 0:
        tl.store(top_out + i * HEADS + head, top, head < HEADS)
        tl.store(total_out + i * HEADS + head, total, head < HEADS)


@triton.jit
def _attend_grad(
    indptr, indices, s_src, s_dst, x, bits, top, total, grad, grad_src, grad_dst, grad_x,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, SHARED: tl.constexpr, STORED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores, and of the rows unless ``grad_x`` is ``None``, by atomic additions.

    The first loop adds up what a softmax takes off every logit's gradient; its rows are near when the second comes.

    ``STORED``: ``grad_src`` and ``grad_x`` are instead values of edges ``[E, H]``: the gradient of the score, and the
    coefficient that the gradient of the row is multiplied by.
    """
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    head, column = tl.arange(0, TALL)[:, None], tile_columns(0, BLOCK)
    used = (head < HEADS) & (start < end)
    own = tl.load(s_dst + i * HEADS + head, used, 0).to(ACC)
    highest = tl.load(top + i * HEADS + head, used, 0).to(ACC)
    inverse = 1 / tl.load(total + i * HEADS + head, used, 1).to(ACC)
    g = own_rows(grad, i, end - start, head, column, False, HEADS, WIDTH, ACC)
    delta = tl.zeros([TALL, 1], ACC)
    first = start
    while first < end:
        for j in tl.static_range(AHEAD):
            valid = first + j < end
            source = tl.load(indices + first + j, valid, 0).to(tl.int64)
            _, logit = _scores(s_src, own, source, valid, head, SLOPE, HEADS, ACC)
            logit = tl.where(valid, logit, float("-inf"))
            applied = tl.exp(logit - highest) * _factor(bits, first + j, valid, head, SCALE, HEADS, ACC)
            row = _row_of_x(x, source, valid, head, column, HEADS, WIDTH, SHARED, ACC)
            delta += applied * tl.sum(g * row, 1, keep_dims=True)
        first += AHEAD
    delta *= inverse
    sum_dst = tl.zeros([TALL, 1], ACC)
    e = start
    while e < end:
        source = tl.load(indices + e).to(tl.int64)
        z, logit = _scores(s_src, own, source, e < end, head, SLOPE, HEADS, ACC)
        alpha = tl.exp(logit - highest) * inverse
        kept = _factor(bits, e, e < end, head, SCALE, HEADS, ACC)
        row = _row_of_x(x, source, e < end, head, column, HEADS, WIDTH, SHARED, ACC)
        for_logit = alpha * (kept * tl.sum(g * row, 1, keep_dims=True) - delta)
        for_z = tl.where(head < HEADS, tl.where(z > 0, for_logit, for_logit * tl.full([1, 1], SLOPE, ACC)), 0)
        sum_dst += for_z
        if STORED:
            tl.store(grad_src + e * HEADS + head, for_z, head < HEADS)
            if grad_x is not None:
                tl.store(grad_x + e * HEADS + head, alpha * kept, head < HEADS)
        else:
            tl.atomic_add(grad_src + source * HEADS + head, for_z, head < HEADS, sem="relaxed")
            if grad_x is not None:
                message = g * (alpha * kept)
                if SHARED:
                    message = tl.sum(message, 0, keep_dims=True)
                    tl.atomic_add(grad_x + source * WIDTH + column, message, column < WIDTH, sem="relaxed")
                else:
                    mask = (head < HEADS) & (column < WIDTH)
                    tl.atomic_add(grad_x + (source * HEADS + head) * WIDTH + column, message, mask, sem="relaxed")
        e += 1
    tl.store(grad_dst + i * HEADS + head, sum_dst.to(grad_dst.dtype.element_ty), head < HEADS)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _check(indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, bits: Tensor | None) -> None:
    check_offsets(indptr)
    check_ids(indices)
    check_values(s_src=s_src, s_dst=s_dst, x=x)
    one = s_src.dtype == s_dst.dtype == x.dtype
    require(one, "scores and rows of one dtype", f"{s_src.dtype}, {s_dst.dtype} and {x.dtype}")
    heads = s_dst.shape[1] if s_dst.dim() == 2 else -1
    fits = x.dim() == 3 and s_src.shape == (x.shape[0], heads) and x.shape[1] in (1, heads)
    expected = "scores [N, H] and [num_dst, H] with rows [N, H, F] or [N, 1, F]"
    require(fits, expected, f"{list(s_src.shape)}, {list(s_dst.shape)} and {list(x.shape)}")
    rows = indptr.numel() - 1
    require(s_dst.shape[0] == rows, f"s_dst with one row for each of {rows}", list(s_dst.shape))
    if bits is not None:
        words = (indices.numel(), cdiv(heads, 32))
        right = bits.shape == words and bits.dtype == torch.int32
        require(right, f"bits int32 {list(words)}", f"{bits.dtype} {list(bits.shape)}")


@op
def attend(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, slope: float, bits: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Softmax over in-edges of ``leaky_relu(s_src[source] + s_dst[row])``, dropout, weighted sum of source rows.

    ``s_src`` ``[N, H]``, ``s_dst`` ``[num_dst, H]``, ``x`` ``[N, H, F]`` or ``[N, 1, F]``; see ``reference.attend``.
    """
    _check(indptr, indices, s_src, s_dst, x, bits)
    n, heads, width = *s_dst.shape, x.shape[2]
    y = x.new_empty((n, heads, width))
    top, total = (x.new_empty((n, heads), dtype=_wide(x.dtype)) for _ in range(2))
    if n and heads:
        settings = tile_settings(heads, max(1, width), False, x)
        _attend[(n, cdiv(max(1, width), settings["BLOCK"]))](
            indptr, indices, s_src, s_dst, x, bits, y, top, total,
            SLOPE=slope, SCALE=scale, SHARED=shares_rows(x, s_dst), HEADS=heads, WIDTH=width, AHEAD=_AHEAD, **settings,
        )  # fmt: skip
    return y, top, total


@op
def attend_grad(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, top: Tensor, total: Tensor, grad: Tensor,
    slope: float, bits: Tensor | None, scale: float, needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``attend`` for ``s_src``, ``s_dst`` and, if ``needs_x``, ``x`` (else empty)."""
    _check(indptr, indices, s_src, s_dst, x, bits)
    n, heads, width = *s_dst.shape, x.shape[2]
    require(grad.shape == (n, heads, width), f"grad {[n, heads, width]}", list(grad.shape))
    require(top.shape == s_dst.shape and total.shape == s_dst.shape, f"top and total {list(s_dst.shape)}",
            f"{list(top.shape)} and {list(total.shape)}")  # fmt: skip
    stored, shared, wide = torch.are_deterministic_algorithms_enabled(), shares_rows(x, s_dst), _wide(x.dtype)
    edges = (indices.numel(), heads)
    for_src = torch.zeros(edges if stored else s_src.shape, dtype=wide, device=x.device)
    for_x = torch.zeros(edges if stored else x.shape, dtype=wide, device=x.device) if needs_x else None
    grad_dst = s_dst.new_empty(s_dst.shape)
    if n and heads:
        _attend_grad[(n,)](
            indptr, indices, s_src, s_dst, x, bits, top, total, grad, for_src, grad_dst, for_x,
            SLOPE=slope, SCALE=scale, SHARED=shared, STORED=stored, HEADS=heads, WIDTH=width, AHEAD=_AHEAD,
            **tile_settings(heads, max(1, width), True, x),
        )  # fmt: skip
    if stored:
        for_x = spmm_grad_x_transposed(indptr, indices, grad, for_x, x.shape[0], "sum", shared) if needs_x else None
        for_src = scatter_src_transposed(indptr, indices, for_src, x.shape[0])
    return for_src.to(x.dtype), grad_dst, for_x.to(x.dtype) if needs_x else x.new_empty(0)
