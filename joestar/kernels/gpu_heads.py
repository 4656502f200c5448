"""Products per head on the GPU: with an epilogue and its gradient, or the heads' weights as one matrix.

The gradient of a product and its epilogue is one pass: programs keep a head's weight and the gradient of it, go through
tiles of rows, mask the rows of the gradient, multiply them with both, and store what the rows in front receive.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, check_rows, on_device, require
from joestar.kernels.gpu_mm_relu import check_words, expanded, grid_of, settings_of, with_epilogue
from joestar.kernels.gpu_tiles import check_values
from joestar.kernels.layout import keeps_head_weight
from joestar.kernels.machine import in_tensor_cores

_BLOCK = 1024
_GRAD_CONFIGS = [
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 8},
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 16},
    {"ROWS": 32, "AHEAD": 4, "PER_CORE": 2, "num_warps": 4},
    {"ROWS": 32, "AHEAD": 3, "PER_CORE": 2, "num_warps": 8, "maxnreg": 128},
]


@triton.jit
def _block_diagonal(
    weight, out, size, down, right, HEADS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // (HEADS * WIDTH), at % (HEADS * WIDTH)
    inside = (at < size) & (row // COLUMNS == column // WIDTH)
    source = row // COLUMNS * (COLUMNS * WIDTH) + row % COLUMNS * down + column % WIDTH * right
    tl.store(out + at, tl.load(weight + source, inside, 0), at < size)


@on_device
def block_diagonal(weight: Tensor) -> Tensor:
    """``[H C, H F]`` with the matrices of ``weight`` ``[H, C, F]`` on the diagonal and zeros elsewhere.

    ``weight`` may be transposed in its last two dimensions; every head's numbers must be together.
    """
    heads, columns, width = weight.shape
    out = weight.new_empty((heads * columns, heads * width))
    down, right = weight.stride()[1:]
    if weight.stride(0) != columns * width or {down, right} - {1, columns, width}:
        weight = weight.contiguous()
        down, right = width, 1
    if out.numel():
        _block_diagonal[(cdiv(out.numel(), _BLOCK),)](
            weight, out, out.numel(), down, right, HEADS=heads, COLUMNS=columns, WIDTH=width, BLOCK=_BLOCK
        )
    return out


@triton.jit(do_not_specialize=["n", "tiles"])
def _head_grad(
    grad, kept, x, weight, for_x, for_weight, sums, n, tiles, scale: tl.float64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """With ``rows`` = scale * grad where ``kept``, else 0: ``for_x`` = rows @ weight ``[WIDTH, COLUMNS]``.

    Of a head. ``for_weight`` ``[programs, H, WIDTH, COLUMNS]`` = rows^T @ x and ``sums`` ``[programs, H, WIDTH]``: of a
    program's rows.
    """
    head = tl.program_id(1)
    grad, x, for_x = grad + head * WIDTH, x + head * COLUMNS, for_x + head * COLUMNS
    k, column, word = tl.arange(0, DEPTH), tl.arange(0, BLOCK), tl.arange(0, WORDS)[None, :]
    there = (column < COLUMNS)[:, None] & (k < WIDTH)[None, :]
    turned = tl.load(weight + head * APART + column[:, None] * RIGHT + k[None, :] * DOWN, there, 0)
    SMALL: tl.constexpr = DEPTH < 64
    product, added = (
        tl.zeros([DEPTH, BLOCK] if SMALL else [BLOCK, DEPTH], tl.float32),
        tl.zeros([ROWS, DEPTH], tl.float32),
    )
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        every = tile * ROWS + tl.arange(0, ROWS)
        i, row = every[:, None], every.to(tl.int64)[:, None]
        inside = (i < n) & (k < WIDTH)[None, :]
        given = tl.load(grad + row * (HEADS * WIDTH) + k[None, :], inside, 0)
        words = tl.load(kept + row * WORDS + word, i < n, 0)
        read = tl.load(x + row * (HEADS * COLUMNS) + column[None, :], (i < n) & (column < COLUMNS)[None, :], 0)
        holds = inside & expanded(words >> (head * (32 // HEADS)), ROWS, DEPTH // WORDS, WORDS)
        value = tl.where(holds, given.to(tl.float32) * tl.full((), scale, tl.float32), 0)
        rows = value.to(grad.dtype.element_ty)
        # turned: the left operand of products of groups of four warps, of 64 rows, would stay in registers where it is
        # computed, which the next tile may overwrite (Triton's issue 9433)
        through = tl.dot(turned, tl.trans(rows), input_precision="tf32").to(for_x.dtype.element_ty)
        at = for_x + every.to(tl.int64)[None, :] * (HEADS * COLUMNS) + column[:, None]
        tl.store(at, through, (every < n)[None, :] & (column < COLUMNS)[:, None])
        if SMALL:
            product = tl.dot(tl.trans(rows), read, product, input_precision="tf32")
        else:
            product = tl.dot(tl.trans(read), rows, product, input_precision="tf32")
        if sums is not None:
            added += value
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    at = for_weight + place * (WIDTH * COLUMNS)
    if SMALL:
        tl.store(
            at + k[:, None] * COLUMNS + column[None, :], product, (k < WIDTH)[:, None] & (column < COLUMNS)[None, :]
        )
    else:
        tl.store(at + k[None, :] * COLUMNS + column[:, None], product, there)
    if sums is not None:
        tl.store(sums + place * WIDTH + k, tl.sum(added, 0), k < WIDTH)


def heads_fit(dtype: torch.dtype, heads: int, width: int, columns: int) -> bool:
    """Whether programs keep a head's weight of ``[H, C, F]``, and multiply in tensor cores."""
    return in_tensor_cores(dtype) and keeps_head_weight(dtype, heads, width, columns)


def _check(x: Tensor, weight: Tensor) -> None:
    check_values(x=x, weight=weight)
    right = x.dim() == 3 and weight.dim() == 3 and (x.shape[1:], x.dtype) == (weight.shape[::2], weight.dtype)
    came = f"{x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
    require(right, "rows [n, H, F] and weights [H, C, F] of one dtype", came)
    check_rows(x.shape[0])
    heads, columns, width = weight.shape
    require(heads_fit(x.dtype, heads, width, columns), "weights that programs keep", list(weight.shape))


@on_device
def head_linear_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``joestar::head_linear_bias_relu``; for weights ``[H, C, F]`` that programs keep."""
    _check(x, weight)
    columns = weight.shape[0] * weight.shape[1]
    right = bias is None or (bias.shape == (columns,) and bias.dtype == x.dtype)
    require(right, f"a bias {x.dtype} [{columns}]", None if bias is None else f"{bias.dtype} {list(bias.shape)}")
    check_words(x.shape[0], columns, bits)
    return with_epilogue(x, weight.transpose(1, 2), bias, bits, scale)


@on_device
def head_linear_bias_relu_grad(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``joestar::head_linear_bias_relu_grad``; for weights ``[H, C, F]`` that programs keep.

    The sums run in the same order in every run.
    """
    _check(x, weight)
    (heads, columns, width), n = weight.shape, x.shape[0]
    right = grad.shape == (n, heads * columns) and grad.dtype == x.dtype
    require(right, f"gradients {x.dtype} {[n, heads * columns]}", f"{grad.dtype} {list(grad.shape)}")
    check_words(n, heads * columns, kept)
    grad, kept, x = grad.contiguous(), kept.contiguous(), x.contiguous()
    if not n:
        return torch.empty_like(x), torch.zeros_like(weight), grad.new_zeros(heads * columns if biased else 0)
    for_x, found = torch.empty_like(x), []
    settings = {**settings_of(weight), "WORDS": kept.shape[1]}

    def launch(config: tune.Config) -> None:
        grid, tiles, config = grid_of(n, heads, config, grad.device)
        parts = grad.new_empty((grid[0], heads, columns, width), dtype=torch.float32)
        sums = grad.new_empty((grid[0], heads * columns), dtype=torch.float32) if biased else None
        _head_grad[grid](grad, kept, x, weight, for_x, parts, sums, n, tiles, scale, **settings, **config)
        for_bias = added_up(sums, grad.dtype) if biased else grad.new_empty(0)
        found[:] = added_up(parts, grad.dtype), for_bias

    shape = (grad.dtype, *settings.values(), biased, tune.size_class(n))
    work = n * heads * (columns + 2 * width) * grad.element_size()
    launch(tune.choose("head_linear_bias_relu_grad", shape, _GRAD_CONFIGS, launch, work, grad.device))
    return for_x, *found
