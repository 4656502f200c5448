"""Graph attention on the GPU: a program per destination, all heads in registers; forward, one pass over its edges.

The forward pass stores no edge values. The backward pass stores two per edge and head, links every edge into a list
of its source, and each source adds up its own edges, in an order that changes between runs; under
``torch.use_deterministic_algorithms(True)`` in edge order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.determinism import is_deterministic
from joestar.kernels.gpu_edge_products import check_bits, check_edge_scores, edge_products, factor_of_edge
from joestar.kernels.gpu_grad import scatter_src_transposed, spmm_grad_x_transposed
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, fill_tail, op, power_of_two, require
from joestar.kernels.gpu_links import link_edges
from joestar.kernels.gpu_row_sums import row_sums
from joestar.kernels.gpu_shared import tile_settings
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    tile_columns,
    tile_configs,
    tile_rows,
)
from joestar.kernels.layout import NARROW, shares_rows, wide_dtype

_AHEAD, _TAIL = 4, 128


@triton.jit
def _scores(s_src, own, s_edge, source, e, used, head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """Sum of the scores of both ends and, unless ``None``, of edge ``e``, where they are ``used``."""
    z = tl.load(s_src + source * HEADS + head, used, 0).to(ACC) + own
    if s_edge is not None:
        z += tl.load(s_edge + e * HEADS + head, used, 0).to(ACC)
    return z


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
    indptr, indices, s_src, s_dst, s_edge, x, bits, y, top_out, total_out,
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
            z = _scores(s_src, own, s_edge, source, first + j, valid & (head < HEADS), head, HEADS, ACC)
            logit = tl.where(z > 0, z, z * tl.full([1, 1], SLOPE, ACC))
            logit = tl.where(valid, logit, float("-inf"))
            higher = tl.maximum(higher, logit, propagate_nan=tl.PropagateNan.ALL)
            logits = logits + (logit,)  # noqa: RUF005
            rows = rows + (_row_of_x(x, source, valid, head, column, HEADS, WIDTH, SHARED, ACC),)  # noqa: RUF005
        shrink = tl.exp(top - higher)
        total, sums = total * shrink, sums * shrink
        for j in tl.static_range(AHEAD):
            power = tl.exp(logits[j] - higher)
            total += power
            sums += rows[j] * (power * factor_of_edge(bits, first + j, first + j < end, head, SCALE, HEADS, ACC))
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
def _coefficients(
    indices, s_src, own, s_edge, bits, values, e, end, head, highest, inverse,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``[edges, heads]`` each: (coefficient, the same after dropout, its gradient, slope of the activation)."""
    at = tl.load(indices + e, e < end, 0).to(tl.int64)
    used = (e < end) & (head < HEADS)
    z = _scores(s_src, own, s_edge, at, e, used, head, HEADS, ACC)
    bend = tl.where(z > 0, tl.full([1, 1], 1, ACC), tl.full([1, 1], SLOPE, ACC))
    alpha = tl.where(used, tl.exp(z * bend - highest) * inverse, 0)
    applied = alpha * factor_of_edge(bits, e, e < end, head, SCALE, HEADS, ACC)
    return alpha, applied, tl.load(values + e * HEADS + head, used, 0).to(ACC), bend


@triton.jit
def _store_score_grads(values, coefs, alpha, applied, value, bend, delta, e, end, head, HEADS: tl.constexpr):
    """Stores the gradients of edges ``e``; their sum ``[1, heads]``."""
    used = (e < end) & (head < HEADS)
    for_z = (applied * value - alpha * delta) * bend
    tl.store(values + e * HEADS + head, for_z, used)
    if coefs is not None:
        tl.store(coefs + e * HEADS + head, applied, used)
    return tl.sum(tl.where(used, for_z, 0), 0, keep_dims=True)


@triton.jit(do_not_specialize=["num_edges"])
def _softmax_grad(
    indptr, indices, s_src, s_dst, s_edge, bits, top, total, values, coefs, grad_dst, num_edges,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr,
    EDGES: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Turns ``values`` ``[E, H]``, the coefficients' gradients, into those of the edges' sums of scores; ``grad_dst``.

    ``coefs``, unless ``None``: what the gradients of rows are multiplied by. A destination's first ``EDGES`` edges stay
    in registers, further ones are computed twice. With ``s_edge``, whose gradient they are, ``values`` become 0 behind
    the last of the ``num_edges``.
    """
    i = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    edge, head = tl.arange(0, EDGES)[:, None], tl.arange(0, TALL)[None, :]
    used = (start < end) & (head < HEADS)
    own = tl.load(s_dst + i * HEADS + head, used, 0).to(ACC)
    highest = tl.load(top + i * HEADS + head, used, 0).to(ACC)
    inverse = 1 / tl.load(total + i * HEADS + head, used, 1).to(ACC)
    e = start + edge
    alpha, applied, value, bend = _coefficients(
        indices, s_src, own, s_edge, bits, values, e, end, head, highest, inverse, SLOPE, SCALE, HEADS, ACC
    )
    delta = tl.sum(applied * value, 0, keep_dims=True)
    first = start + EDGES
    while first < end:
        _, more, of_more, _ = _coefficients(
            indices, s_src, own, s_edge, bits, values, first + edge, end, head, highest, inverse,
            SLOPE, SCALE, HEADS, ACC,
        )  # fmt: skip
        delta += tl.sum(more * of_more, 0, keep_dims=True)
        first += EDGES
    total_z = _store_score_grads(values, coefs, alpha, applied, value, bend, delta, e, end, head, HEADS)
    first = start + EDGES
    while first < end:
        e = first + edge
        alpha, applied, value, bend = _coefficients(
            indices, s_src, own, s_edge, bits, values, e, end, head, highest, inverse, SLOPE, SCALE, HEADS, ACC
        )
        total_z += _store_score_grads(values, coefs, alpha, applied, value, bend, delta, e, end, head, HEADS)
        first += EDGES
    tl.store(grad_dst + i * HEADS + head, total_z.to(grad_dst.dtype.element_ty), head < HEADS)
    if s_edge is not None:
        last = tl.load(indptr + tl.num_programs(0))
        fill_tail(values, last * HEADS, num_edges.to(tl.int64) * HEADS, 0, TAIL)


@triton.jit(do_not_specialize=["num_src", "num_dst"])
def _attend_grad_src(
    heads, links, coefs, for_z, grad, v_src, v_dst, grad_dst, grad_src, grad_x, num_src, num_dst,
    SHARED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, TALL: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of sources' scores and, unless ``grad_x`` is ``None``, of their rows, over the lists of their edges.

    With ``v_src`` and ``v_dst`` ``[H, F]`` those of shared rows have their parts through both scores.
    """
    s = tile_rows(ROWS)
    head, column = tl.arange(0, TALL)[None, :], tile_columns(tl.program_id(1), BLOCK)
    size: tl.constexpr = WIDTH if SHARED else HEADS * WIDTH
    per_head: tl.constexpr = WIDTH if WIDTH > 0 else 1
    inside = column < size
    for_src = tl.zeros([ROWS, TALL], ACC)
    for_x = tl.zeros([ROWS, BLOCK], ACC)
    e = tl.load(heads + s, s < num_src, -1).to(tl.int64)
    while tl.max(e) >= 0:
        link = tl.load(links + e, e >= 0, -1)
        row = link & 0xFFFFFFFF
        valid = (e >= 0) & (head < HEADS)
        for_src += tl.load(for_z + e * HEADS + head, valid, 0)
        if grad_x is not None:
            if SHARED:
                for h in tl.static_range(HEADS):
                    g = tl.load(grad + (row * HEADS + h) * WIDTH + column, (e >= 0) & inside, 0).to(ACC)
                    for_x += g * tl.load(coefs + e * HEADS + h, e >= 0, 0)
            else:
                g = tl.load(grad + row * size + column, (e >= 0) & inside, 0).to(ACC)
                for_x += g * tl.load(coefs + e * HEADS + column // per_head, (e >= 0) & inside, 0)
        e = link >> 32
    mask = s < num_src
    s = s.to(tl.int64)
    if v_src is not None:
        for h in tl.static_range(HEADS):
            by_src = tl.load(v_src + h * WIDTH + column, inside, 0).to(ACC)
            by_dst = tl.load(v_dst + h * WIDTH + column, inside, 0).to(ACC)
            own = tl.load(grad_dst + s * HEADS + h, s < num_dst, 0).to(ACC)
            for_x += tl.sum(tl.where(head == h, for_src, 0), 1, keep_dims=True) * by_src + own * by_dst
    if tl.program_id(1) == 0:
        tl.store(grad_src + s * HEADS + head, for_src.to(grad_src.dtype.element_ty), mask & (head < HEADS))
    if grad_x is not None:
        tl.store(grad_x + s * size + column, for_x.to(grad_x.dtype.element_ty), mask & inside)


def _coefficient_grads(
    indptr: Tensor, indices: Tensor, scores: tuple, x: Tensor, top: Tensor, total: Tensor, grad: Tensor, slope: float,
    bits: Tensor | None, scale: float, coefs: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(gradients of the edges' sums of scores ``[E, H]``; of destinations' scores).

    ``scores``: of sources, destinations and, or ``None``, edges; without the latter the first result is unwritten
    behind the last edge. ``coefs`` ``[E, H]`` receives what gradients of rows are multiplied by.
    """
    (n, heads), acc = top.shape, accumulator(x)
    values = torch.empty((indices.numel(), heads), dtype=top.dtype, device=x.device)
    grad_dst = torch.empty_like(scores[1])
    edge_products(indptr, indices, x, grad, values)
    tall, mean = power_of_two(heads), cdiv(indices.numel(), n)
    block = max(1, min(8 if mean <= 8 else 16 if mean <= 16 else 32, 1024 // tall))
    _softmax_grad[(n,)](
        indptr, indices, *scores, bits, top, total, values, coefs, grad_dst,
        None if scores[2] is None else indices.numel(),
        SLOPE=slope, SCALE=scale, HEADS=heads, ACC=acc, TALL=tall, EDGES=block, TAIL=_TAIL,
        num_warps=max(1, min(4, tall * block // 128)),
    )  # fmt: skip
    return values, grad_dst


def _check(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, s_edge: Tensor | None, x: Tensor,
    bits: Tensor | None,
) -> None:  # fmt: skip
    check_offsets(indptr)
    check_ids(indices)
    check_values(s_src=s_src, s_dst=s_dst, x=x)
    one = s_src.dtype == s_dst.dtype and s_src.dtype in (x.dtype, wide_dtype(x.dtype))
    require(one, "scores of the rows' dtype, or float32", f"{s_src.dtype}, {s_dst.dtype} and {x.dtype}")
    heads = s_dst.shape[1] if s_dst.dim() == 2 else -1
    fits = x.dim() == 3 and s_src.shape == (x.shape[0], heads) and x.shape[1] in (1, heads)
    expected = "scores [N, H] and [num_dst, H] with rows [N, H, F] or [N, 1, F]"
    require(fits, expected, f"{list(s_src.shape)}, {list(s_dst.shape)} and {list(x.shape)}")
    rows = indptr.numel() - 1
    require(s_dst.shape[0] == rows, f"s_dst with one row for each of {rows}", list(s_dst.shape))
    check_bits(bits, indices.numel(), heads)
    if s_edge is not None:
        check_edge_scores(s_edge, indices.numel(), heads, s_src.dtype)


@op
def attend(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, slope: float, bits: Tensor | None,
    scale: float, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Softmax over in-edges of ``leaky_relu(s_src[source] + s_dst[row] + s_edge)``, dropout, sum of source rows.

    ``s_src`` ``[N, H]``, ``s_dst`` ``[num_dst, H]``, ``s_edge`` ``[E, H]`` or none, ``x`` ``[N, H, F]`` or
    ``[N, 1, F]``; see ``reference.attend``.
    """
    _check(indptr, indices, s_src, s_dst, s_edge, x, bits)
    n, heads, width = *s_dst.shape, x.shape[2]
    y = x.new_empty((n, heads, width))
    top, total = (x.new_empty((n, heads), dtype=wide_dtype(x.dtype)) for _ in range(2))
    if n and heads:
        settings = tile_settings(heads, max(1, width), x)
        _attend[(n, cdiv(max(1, width), settings["BLOCK"]))](
            indptr, indices, s_src, s_dst, s_edge, x, bits, y, top, total,
            SLOPE=slope, SCALE=scale, SHARED=shares_rows(x, s_dst), HEADS=heads, WIDTH=width, AHEAD=_AHEAD, **settings,
        )  # fmt: skip
    return y, top, total


@op
def attend_grad(
    indptr: Tensor, indices: Tensor, s_src: Tensor, s_dst: Tensor, x: Tensor, top: Tensor, total: Tensor, grad: Tensor,
    slope: float, bits: Tensor | None, scale: float, needs_x: bool, s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``attend`` for ``s_src``, ``s_dst``, ``x`` if ``needs_x`` and ``s_edge`` if given (else empty)."""
    scores = s_src, s_dst, s_edge
    return _gradients(indptr, indices, scores, x, None, None, top, total, grad, slope, bits, scale, needs_x)


@op
def attend_own_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, v_src: Tensor, v_dst: Tensor, s_src: Tensor, s_dst: Tensor,
    top: Tensor, total: Tensor, grad: Tensor, slope: float, bits: Tensor | None, scale: float,
    s_edge: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of rows ``[N, F]``, of both vectors whose products with them the scores are, and of ``s_edge``."""
    check_values(v_src=v_src, v_dst=v_dst)
    scores, by = (s_src, s_dst, s_edge), (v_src, v_dst)
    for_src, for_dst, for_x, for_edge = _gradients(
        indptr, indices, scores, x.unsqueeze(1), *by, top, total, grad, slope, bits, scale, True
    )
    if for_src.shape[1] <= NARROW // 2:
        vectors = row_sums(x, None, for_src, others=for_dst)
    else:
        vectors = torch.stack((for_src.t() @ x, for_dst.t() @ x[: for_dst.shape[0]]))
    return for_x.squeeze(1), vectors, for_edge


def _gradients(indptr, indices, scores, x, v_src, v_dst, top, total, grad, slope, bits, scale, needs_x):
    _check(indptr, indices, *scores, x, bits)
    s_src, s_dst, s_edge = scores
    n, heads, width = *s_dst.shape, x.shape[2]
    require(grad.shape == (n, heads, width), f"grad {[n, heads, width]}", list(grad.shape))
    require(top.shape == s_dst.shape and total.shape == s_dst.shape, f"top and total {list(s_dst.shape)}",
            f"{list(top.shape)} and {list(total.shape)}")  # fmt: skip
    shared, edges, device = shares_rows(x, s_dst) or v_src is not None, indices.numel(), x.device
    nothing = x.new_empty(0)
    if not (n and heads):
        for_edge = s_src.new_empty(0) if s_edge is None else torch.zeros_like(s_edge)
        return torch.zeros_like(s_src), torch.empty_like(s_dst), torch.zeros_like(x) if needs_x else nothing, for_edge
    coefs = torch.empty((edges, heads), dtype=wide_dtype(x.dtype), device=device) if needs_x else None
    for_z, grad_dst = _coefficient_grads(indptr, indices, scores, x, top, total, grad, slope, bits, scale, coefs)
    for_edge = s_src.new_empty(0) if s_edge is None else for_z.to(s_edge.dtype)
    if is_deterministic():
        for_x = spmm_grad_x_transposed(indptr, indices, grad, coefs, x.shape[0], "sum", shared) if needs_x else None
        for_src = scatter_src_transposed(indptr, indices, for_z, x.shape[0]).to(s_src.dtype)
        return for_src, grad_dst, for_x.to(x.dtype) if needs_x else nothing, for_edge
    grad_src, grad_x = torch.empty_like(s_src), torch.empty_like(x) if needs_x else None
    if not x.shape[0]:
        return grad_src, grad_dst, grad_x if needs_x else nothing, for_edge
    first, links = link_edges(indptr, indices, x.shape[0])
    size = max(1, width if shared else heads * width)

    def launch_src(config: tune.Config) -> None:
        block = column_block(size)
        _attend_grad_src[(cdiv(x.shape[0], config["ROWS"]), cdiv(size, block) if needs_x else 1)](
            first, links, coefs, for_z, grad, v_src, v_dst, grad_dst, grad_src, grad_x, x.shape[0], n,
            SHARED=shared, HEADS=heads, WIDTH=width, ACC=accumulator(x), TALL=power_of_two(heads),
            BLOCK=block, **config,
        )  # fmt: skip

    sizes = tune.size_class(x.shape[0]), tune.size_class(edges)
    shape = (x.dtype, heads, width, shared, needs_x, v_src is not None, *sizes)
    work = (x.shape[0] + edges) * size * x.element_size()
    launch_src(tune.choose("attend_grad_src", shape, tile_configs(size, x.element_size()), launch_src, work, device))
    return grad_src, grad_dst, grad_x if needs_x else nothing, for_edge
