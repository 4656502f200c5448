"""Bias, ReLU and dropout of rows in one pass on the GPU; the gradient reads a bit per entry and adds up the bias's."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_bits import kept_bits, passes_relu, rows_within_warps, store_bits, unknown_bits, whole_words
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, check_rows, op, require
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    tile_columns,
    tile_configs,
    tile_rows,
)

_RESIDENT = 132 * 48
"""Warps that add up the gradient of a bias: 48 for each multiprocessor of an H200."""


@triton.jit(do_not_specialize=["n"])
def _bias_relu(
    x, addend, bias, bits, out, kept, n, scale: tl.float64,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``out`` = relu(x + addend + bias), where ``bits`` keep it times ``scale``; ``kept``: where it is not made 0."""
    i, part = tile_rows(ROWS).to(tl.int64), tl.program_id(1)
    column = whole_words(part, WIDTH, WORDS, WIDE, BLOCK)
    mask = (i < n) & (column < WIDTH)
    at = i * WIDTH + column
    value = tl.load(x + at, mask, 0).to(ACC)
    if addend is not None:
        value += tl.load(addend + at, mask, 0).to(ACC)
    if bias is not None:
        value += tl.load(bias + column, column < WIDTH, 0).to(ACC)
    holds = passes_relu(value)
    if bits is not None:
        holds = holds & kept_bits(bits, i, column, mask, WORDS)
        value *= tl.full((), scale, ACC)
    tl.store(out + at, tl.where(holds, value, 0).to(out.dtype.element_ty), mask)
    store_bits(kept, i, holds & mask, part, i < n, WORDS, WIDE, BLOCK)


@triton.jit
def _masked_tile(
    i, column, grad, more, counts, kept, out, n, scale, WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr
):
    """Stores ``scale * grad`` where ``kept``, else 0, for rows ``i`` ``[ROWS, 1]``, and returns it, not rounded.

    ``more`` belongs to ``grad``: parts for the first ``counts`` rows.
    """
    mask = (i < n) & (column < WIDTH)
    at = i.to(tl.int64) * WIDTH + column
    value = tl.load(grad + at, mask, 0).to(ACC)
    for k in tl.static_range(len(more)):
        value += tl.load(more[k] + at, mask & (i < counts[k]), 0).to(ACC)
    value *= tl.full((), scale, ACC)
    value = tl.where(kept_bits(kept, i.to(tl.int64), column, mask, WORDS), value, 0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask)
    return value


@triton.jit(do_not_specialize=["n"])
def _bias_relu_grad(
    grad, more, counts, kept, out, sums, n, scale: tl.float64,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With ``sums`` ``[programs, WIDTH]`` a program takes every so many tiles, and adds up its rows."""
    column = tile_columns(tl.program_id(1), BLOCK)
    if sums is None:
        _masked_tile(tile_rows(ROWS), column, grad, more, counts, kept, out, n, scale, WIDTH, WORDS, ACC)
    else:
        added = tl.zeros([ROWS, BLOCK], ACC)
        first = tl.program_id(0) * ROWS
        while first < n:
            i = first + tl.arange(0, ROWS)[:, None]
            added += _masked_tile(i, column, grad, more, counts, kept, out, n, scale, WIDTH, WORDS, ACC)
            first += tl.num_programs(0) * ROWS
        at = sums + tl.program_id(0).to(tl.int64) * WIDTH + column
        tl.store(at, tl.sum(added, 0, keep_dims=True), column < WIDTH)


@op
def bias_relu(
    x: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(relu(x + addend + bias), dropped out and scaled by ``bits`` if there are; bits of what gradients reach)."""
    check_values(x=x, bias=bias, addend=addend)
    require(x.dim() == 2, "x [n, D]", list(x.shape))
    n, width = x.shape
    check_rows(n)
    words, block = cdiv(width, 32), column_block(width)
    right = bias is None or (bias.shape == (width,) and bias.dtype == x.dtype)
    require(right, f"a bias {x.dtype} [{width}]", None if bias is None else f"{bias.dtype} {list(bias.shape)}")
    right = bits is None or (bits.shape == (n, words) and bits.dtype == torch.int32)
    require(right, f"bits int32 {[n, words]}", None if bits is None else f"{bits.dtype} {list(bits.shape)}")
    right = addend is None or (addend.shape == x.shape and addend.dtype == x.dtype)
    came = None if addend is None else f"{addend.dtype} {list(addend.shape)}"
    require(right, f"an addend {x.dtype} {list(x.shape)}", came)
    out, kept = torch.empty_like(x), unknown_bits(x)
    if not out.numel():
        return out, kept

    def launch(config: tune.Config) -> None:
        _bias_relu[(cdiv(n, config["ROWS"]), cdiv(width, block))](
            x, addend, bias, bits, out, kept, n, scale,
            WIDTH=width, WORDS=words, WIDE=words if width <= block else block // 32, ACC=accumulator(x), BLOCK=block,
            **config,
        )  # fmt: skip

    shape = (x.dtype, width, bias is not None, bits is not None, addend is not None, tune.size_class(n))
    configs = rows_within_warps(tile_configs(width, x.element_size()), block * x.element_size())
    launch(tune.choose("bias_relu", shape, configs, launch, 2 * x.numel() * x.element_size(), x.device))
    return out, kept


@op
def bias_relu_grad(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, more: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_relu`` for ``x`` and, if ``biased``, for the bias ``[D]``, else ``[0]``.

    ``more``: see ``joestar.ops.dense.bias_relu``. The sums run in the same order in every run.
    """
    check_values(grad=grad)
    require(grad.dim() == 2, "grad [n, D]", list(grad.shape))
    n, width = grad.shape
    check_rows(n)
    words, block = cdiv(width, 32), column_block(width)
    require(kept.shape == (n, words), f"bits {[n, words]}", list(kept.shape))
    more = tuple(more or ())
    for part in more:
        right = part.dtype == grad.dtype and part.dim() == 2 and part.shape[1] == width and part.shape[0] <= n
        require(right, f"first rows of {grad.dtype} {[n, width]}", f"{part.dtype} {list(part.shape)}")
    counts = tuple(part.shape[0] for part in more)
    out = torch.empty_like(grad)
    if not out.numel():
        return out, grad.new_zeros(width if biased else 0)
    precision = torch.float64 if grad.dtype == torch.float64 else torch.float32

    def launch(config: tune.Config) -> Tensor:
        programs = cdiv(n, config["ROWS"])
        if biased:
            programs = min(programs, _RESIDENT // config["num_warps"])
        sums = grad.new_empty((programs, width), dtype=precision) if biased else None
        _bias_relu_grad[(programs, cdiv(width, block))](
            grad, more, counts, kept, out, sums, n, scale,
            WIDTH=width, WORDS=words, ACC=accumulator(grad), BLOCK=block, **config,
        )  # fmt: skip
        return added_up(sums, grad.dtype) if biased else grad.new_empty(0)

    shape = (grad.dtype, width, biased, len(more), tune.size_class(n))
    configs = tile_configs(width, grad.element_size())
    work = 2 * grad.numel() * grad.element_size()
    return out, launch(tune.choose("bias_relu_grad", shape, configs, launch, work, grad.device))
