"""Products with an epilogue on the GPU: bias, ReLU and dropout, or the mask of their gradient, while rows are held.

Programs keep the weight and go through tiles of rows: the rows of the next tiles are on their way while one is
multiplied, activated and stored. A bit of 32 columns each is expanded from, or added up to, a word per row in
registers. Such a product takes as long as the library's alone does, the two passes over its rows are saved. What does
not fit is the library's product, and a pass behind it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import gpu_activation, tune
from joestar.kernels.gpu_bits import passes_relu, unknown_bits
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, check_rows, multiprocessors, on_device, require
from joestar.kernels.gpu_tiles import check_values
from joestar.kernels.layout import SHARES, keeps_weight, power_of_two
from joestar.kernels.machine import in_tensor_cores

CONFIGS = [
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 8},
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 2, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 2, "PER_CORE": 2, "num_warps": 4},
]
"""``PER_CORE`` programs run on a multiprocessor at a time; rows of the next ``AHEAD - 1`` tiles are on their way."""


@triton.jit
def _weight(
    weight, column, k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """The whole weight ``[DEPTH, BLOCK]``, zeros around it."""
    inside = (k < WIDTH)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(weight + k[:, None] * DOWN + column[None, :] * RIGHT, inside, 0)


@triton.jit
def expanded(words, ROWS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Whether a bit is set, ``[ROWS, BITS * WORDS]`` in order of the columns, of words ``[ROWS, WORDS]``."""
    bit = tl.arange(0, BITS)[None, :, None]
    return tl.reshape((words[:, None, :] >> bit) & 1, (ROWS, BITS * WORDS)) != 0


@triton.jit(do_not_specialize=["n", "tiles"])
def _mm_bias_relu(
    x, weight, bias, bits, out, kept, n, tiles, scale: tl.float64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """``out`` = relu(x @ weight + bias), where ``bits`` keep it times ``scale``; ``kept``: where it is not made 0.

    Of a head, which axis 1 of the grid counts: rows have those of all heads side by side, whose weights are ``APART``.
    Every word of a row has a share of each head's bits, ``32 / HEADS``: what ``kept`` counts.
    """
    head = tl.program_id(1) if HEADS > 1 else 0
    if HEADS > 1:
        x, weight, out, kept = x + head * WIDTH, weight + head * APART, out + head * COLUMNS, kept + head
        if bias is not None:
            bias += head * COLUMNS
    k, column, word = tl.arange(0, DEPTH), tl.arange(0, BLOCK), tl.arange(0, WORDS)[None, :]
    held = _weight(weight, column, k, WIDTH, COLUMNS, DOWN, RIGHT)
    BITS: tl.constexpr = BLOCK // WORDS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        i = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        row = i.to(tl.int64)
        rows = tl.load(x + row * (HEADS * WIDTH) + k[None, :], (i < n) & (k < WIDTH)[None, :], 0)
        value = tl.dot(rows, held, input_precision="tf32")
        if bias is not None:
            value += tl.load(bias + column, column < COLUMNS, 0).to(tl.float32)[None, :]
        inside = (i < n) & (column < COLUMNS)[None, :]
        holds = passes_relu(value) & inside
        if bits is not None:
            words = tl.load(bits + row * WORDS + word, i < n, 0)
            holds = holds & expanded(words >> (head * (32 // HEADS)), ROWS, BITS, WORDS)
            value *= tl.full((), scale, tl.float32)
        at = out + row * (HEADS * COLUMNS) + column[None, :]
        tl.store(at, tl.where(holds, value, 0).to(out.dtype.element_ty), inside)
        each = tl.reshape(holds.to(tl.int32), (ROWS, BITS, WORDS)) << tl.arange(0, BITS)[None, :, None]
        tl.store(kept + (row * WORDS + word) * HEADS, tl.sum(each, 1).to(kept.dtype.element_ty), i < n)


@triton.jit(do_not_specialize=["n", "tiles"])
def _mm_bias_relu_grad(
    grad, weight, kept, out, sums, n, tiles, scale: tl.float64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, WORDS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """``out`` = scale * grad @ weight where ``kept``, else 0; ``sums`` ``[programs, COLUMNS]``: of a program's rows."""
    k, column, word = tl.arange(0, DEPTH), tl.arange(0, BLOCK), tl.arange(0, WORDS)[None, :]
    held = _weight(weight, column, k, WIDTH, COLUMNS, DOWN, RIGHT)
    added = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        i = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        row = i.to(tl.int64)
        rows = tl.load(grad + row * WIDTH + k[None, :], (i < n) & (k < WIDTH)[None, :], 0)
        words = tl.load(kept + row * WORDS + word, i < n, 0)
        value = tl.dot(rows, held, input_precision="tf32") * tl.full((), scale, tl.float32)
        inside = (i < n) & (column < COLUMNS)[None, :]
        value = tl.where(inside & expanded(words, ROWS, BLOCK // WORDS, WORDS), value, 0)
        tl.store(out + row * COLUMNS + column[None, :], value.to(out.dtype.element_ty), inside)
        if sums is not None:
            added += value
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * COLUMNS + column, tl.sum(added, 0), column < COLUMNS)


def fits(dtype: torch.dtype, width: int, columns: int) -> bool:
    """Whether programs keep a weight ``[F, D]``, and multiply in tensor cores."""
    return in_tensor_cores(dtype) and keeps_weight(dtype, width, columns)


def settings_of(weight: Tensor) -> dict[str, object]:
    """Sizes of the kernels with a weight per head ``[H, F, D]``, but those of a launch."""
    heads, width, columns = weight.shape
    return {
        "WIDTH": width, "COLUMNS": columns, "HEADS": heads, "APART": weight.stride(0), "DOWN": weight.stride(1),
        "RIGHT": weight.stride(2), "WORDS": cdiv(heads * columns, 32), "DEPTH": max(16, power_of_two(width)),
        "BLOCK": max(16, power_of_two(columns)),
    }  # fmt: skip


def grid_of(
    n: int, heads: int, config: tune.Config, device: torch.device
) -> tuple[tuple[int, int], int, dict[str, int]]:
    """((programs, heads), tiles, settings of a launch)."""
    tiles = cdiv(n, config["ROWS"])
    rest = {name: value for name, value in config.items() if name != "PER_CORE"}
    programs = max(1, config["PER_CORE"] * multiprocessors(device) // heads)
    return (min(tiles, programs), heads), tiles, rest


def check_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Raises ``ValueError`` unless rows ``[n, F]``, a weight ``[F, D]`` and a bias ``[D]``, if any, fit one another."""
    check_values(x=x, weight=weight)
    right = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[0] and x.dtype == weight.dtype
    came = f"{x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
    require(right, "rows [n, F] and a weight [F, D] of one dtype", came)
    check_rows(x.shape[0])
    columns = weight.shape[1]
    right = bias is None or (bias.shape == (columns,) and bias.dtype == x.dtype)
    require(right, f"a bias {x.dtype} [{columns}]", None if bias is None else f"{bias.dtype} {list(bias.shape)}")


def check_words(n: int, columns: int, words: Tensor | None) -> None:
    shape = (n, cdiv(columns, 32))
    right = words is None or (words.shape == shape and words.dtype == torch.int32)
    require(right, f"bits int32 {list(shape)}", None if words is None else f"{words.dtype} {list(words.shape)}")


def with_epilogue(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``mm_bias_relu`` of rows ``[n, H F]`` with weights ``[H, F, D]``: ``[n, H D]``."""
    (heads, width, columns), n = weight.shape, x.shape[0]
    x = x.contiguous()
    bias, bits = (None if part is None else part.contiguous() for part in (bias, bits))
    out = x.new_empty((n, heads * columns))
    kept = unknown_bits(out)
    if not out.numel():
        return out, kept
    settings = settings_of(weight)
    shares = kept.view(SHARES[heads])

    def launch(config: tune.Config) -> None:
        grid, tiles, config = grid_of(n, heads, config, x.device)
        _mm_bias_relu[grid](x, weight, bias, bits, out, shares, n, tiles, scale, **settings, **config)

    shape = (x.dtype, *settings.values(), bias is not None, bits is not None, tune.size_class(n))
    work = n * heads * (width + columns) * x.element_size()
    launch(tune.choose("mm_bias_relu", shape, CONFIGS, launch, work, x.device))
    return out, kept


@on_device
def mm_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(relu(x @ weight + bias), dropped out and scaled by ``bits`` if there are; bits of what gradients reach)."""
    check_product(x, weight, bias)
    check_words(x.shape[0], weight.shape[1], bits)
    if not fits(x.dtype, *weight.shape):
        return gpu_activation.bias_relu(x @ weight, bias, bits, scale)
    return with_epilogue(x, weight.unsqueeze(0), bias, bits, scale)


@on_device
def mm_bias_relu_grad(grad: Tensor, weight: Tensor, kept: Tensor, scale: float, biased: bool) -> tuple[Tensor, Tensor]:
    """(``scale * grad @ weight`` where ``kept``, else 0; its sums over the rows if ``biased``, else ``[0]``).

    The sums run in the same order in every run.
    """
    check_product(grad, weight)
    columns = weight.shape[1]
    check_words(grad.shape[0], columns, kept)
    if not fits(grad.dtype, *weight.shape):
        return gpu_activation.bias_relu_grad(grad @ weight, kept, scale, biased)
    grad, kept, n = grad.contiguous(), kept.contiguous(), grad.shape[0]
    out = grad.new_empty((n, columns))
    if not n:
        return out, grad.new_zeros(columns if biased else 0)
    settings = {name: size for name, size in settings_of(weight.unsqueeze(0)).items() if name not in ("HEADS", "APART")}

    def launch(config: tune.Config) -> Tensor:
        grid, tiles, config = grid_of(n, 1, config, grad.device)
        sums = grad.new_empty((grid[0], columns), dtype=torch.float32) if biased else None
        _mm_bias_relu_grad[grid](grad, weight, kept, out, sums, n, tiles, scale, **settings, **config)
        return added_up(sums, grad.dtype) if biased else grad.new_empty(0)

    shape = (grad.dtype, *settings.values(), biased, tune.size_class(n))
    work = n * (grad.shape[1] + columns) * grad.element_size()
    return out, launch(tune.choose("mm_bias_relu_grad", shape, CONFIGS, launch, work, grad.device))
