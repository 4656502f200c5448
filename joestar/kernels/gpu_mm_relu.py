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
from joestar.kernels.layout import keeps_head_weight, keeps_weight, power_of_two
from joestar.kernels.machine import in_tensor_cores

_CONFIGS = [
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 8},
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 2, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 3, "PER_CORE": 1, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 2, "PER_CORE": 2, "num_warps": 4},
]
"""``PER_CORE`` programs run on a multiprocessor at a time; rows of the next ``AHEAD - 1`` tiles are on their way."""
_WRITTEN = [*_CONFIGS, {"ROWS": 64, "AHEAD": 3, "PER_CORE": 3, "num_warps": 4}]
"""The same where more is written than read."""
_SHARES = {1: torch.int32, 2: torch.int16, 4: torch.int8}
"""What is in a word for each of so many heads: column ``c`` has bit ``c // W`` of word ``c % W`` of ``W``."""


@triton.jit
def _weight(
    weight, column, k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """The whole weight ``[DEPTH, BLOCK]``, zeros around it."""
    inside = (k < WIDTH)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(weight + k[:, None] * DOWN + column[None, :] * RIGHT, inside, 0)


@triton.jit
def _expanded(words, ROWS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Whether a bit is set, ``[ROWS, BITS * WORDS]`` in order of the columns, of words ``[ROWS, WORDS]``."""
    bit = tl.arange(0, BITS)[None, :, None]
    return tl.reshape((words.to(tl.int32)[:, None, :] >> bit) & 1, (ROWS, BITS * WORDS)) != 0


@triton.jit(do_not_specialize=["n", "tiles"])
def _mm_bias_relu(
    x, weight, bias, bits, out, kept, n, tiles, scale: tl.float64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """``out`` = relu(x @ weight + bias), where ``bits`` keep it times ``scale``; ``kept``: where it is not made 0.

    Of a head, which axis 1 of the grid counts: rows have those of all heads side by side, whose weights are ``APART``.
    Every word of a row has a share of each head's bits, ``32 / HEADS``: what ``bits`` and ``kept`` count.
    """
    if HEADS > 1:
        head = tl.program_id(1)
        x, weight, out, kept = x + head * WIDTH, weight + head * APART, out + head * COLUMNS, kept + head
        if bias is not None:
            bias += head * COLUMNS
        if bits is not None:
            bits += head
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
            words = tl.load(bits + (row * WORDS + word) * HEADS, i < n, 0)
            holds = holds & _expanded(words, ROWS, BITS, WORDS)
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
        value = tl.where(inside & _expanded(words, ROWS, BLOCK // WORDS, WORDS), value, 0)
        tl.store(out + row * COLUMNS + column[None, :], value.to(out.dtype.element_ty), inside)
        if sums is not None:
            added += value
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * COLUMNS + column, tl.sum(added, 0), column < COLUMNS)


@triton.jit(do_not_specialize=["n", "tiles"])
def _bias_relu_grad_mm(
    grad, kept, weight, out, sums, through, n, tiles, scale: tl.float64,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """``out`` = scale * grad where ``kept``, else 0; ``through`` = out @ weight; ``sums``: as above. Of a head."""
    head = tl.program_id(1)
    grad, kept, out = grad + head * WIDTH, kept + head, out + head * WIDTH
    weight, through = weight + head * APART, through + head * COLUMNS
    k, column, word = tl.arange(0, DEPTH), tl.arange(0, BLOCK), tl.arange(0, WORDS)[None, :]
    held = _weight(weight, column, k, WIDTH, COLUMNS, DOWN, RIGHT)
    added = tl.zeros([ROWS, DEPTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        i = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        row = i.to(tl.int64)
        inside = (i < n) & (k < WIDTH)[None, :]
        value = tl.load(grad + row * (HEADS * WIDTH) + k[None, :], inside, 0).to(tl.float32)
        words = tl.load(kept + (row * WORDS + word) * HEADS, i < n, 0)
        holds = inside & _expanded(words, ROWS, DEPTH // WORDS, WORDS)
        value = tl.where(holds, value * tl.full((), scale, tl.float32), 0)
        rows = value.to(out.dtype.element_ty)
        tl.store(out + row * (HEADS * WIDTH) + k[None, :], rows, inside)
        if sums is not None:
            added += value
        at = through + row * (HEADS * COLUMNS) + column[None, :]
        product = tl.dot(rows, held, input_precision="tf32")
        tl.store(at, product.to(through.dtype.element_ty), (i < n) & (column < COLUMNS)[None, :])
    if sums is not None:
        at = sums + tl.program_id(0).to(tl.int64) * (HEADS * WIDTH) + head * WIDTH + k
        tl.store(at, tl.sum(added, 0), k < WIDTH)


def fits(dtype: torch.dtype, width: int, columns: int) -> bool:
    """Whether programs keep a weight ``[F, D]``, and multiply in tensor cores."""
    return in_tensor_cores(dtype) and keeps_weight(dtype, width, columns)


def heads_fit(dtype: torch.dtype, heads: int, width: int, columns: int) -> bool:
    """The same for weights ``[H, D, F]``."""
    return in_tensor_cores(dtype) and keeps_head_weight(dtype, heads, width, columns)


def _shares(words: Tensor | None, heads: int) -> Tensor | None:
    """Words ``[n, W]`` in parts of so many bits as each of the heads has of one."""
    return None if words is None else words.view(_SHARES[heads])


def _settings(weight: Tensor) -> dict[str, object]:
    """Sizes of the kernels with a weight per head ``[H, F, D]``, but those of a launch."""
    heads, width, columns = weight.shape
    return {
        "WIDTH": width, "COLUMNS": columns, "HEADS": heads, "APART": weight.stride(0), "DOWN": weight.stride(1),
        "RIGHT": weight.stride(2), "WORDS": cdiv(heads * columns, 32), "DEPTH": max(16, power_of_two(width)),
        "BLOCK": max(16, power_of_two(columns)),
    }  # fmt: skip


def _grid(n: int, heads: int, config: tune.Config, device: torch.device) -> tuple[tuple[int, int], int, dict[str, int]]:
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


def _check_words(n: int, columns: int, words: Tensor | None) -> None:
    shape = (n, cdiv(columns, 32))
    right = words is None or (words.shape == shape and words.dtype == torch.int32)
    require(right, f"bits int32 {list(shape)}", None if words is None else f"{words.dtype} {list(words.shape)}")


def _check_heads(x: Tensor, weight: Tensor) -> None:
    check_values(x=x, weight=weight)
    right = x.dim() == 3 and weight.dim() == 3 and (x.shape[1:], x.dtype) == (weight.shape[::2], weight.dtype)
    came = f"{x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
    require(right, "rows [n, H, F] and weights [H, D, F] of one dtype", came)
    check_rows(x.shape[0])


def _with_epilogue(
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
    settings = _settings(weight)
    shares = _shares(bits, heads), out, _shares(kept, heads)

    def launch(config: tune.Config) -> None:
        grid, tiles, config = _grid(n, heads, config, x.device)
        _mm_bias_relu[grid](x, weight, bias, *shares, n, tiles, scale, **settings, **config)

    shape = (x.dtype, *settings.values(), bias is not None, bits is not None, tune.size_class(n))
    work = n * heads * (width + columns) * x.element_size()
    launch(tune.choose("mm_bias_relu", shape, _CONFIGS, launch, work, x.device))
    return out, kept


@on_device
def mm_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(relu(x @ weight + bias), dropped out and scaled by ``bits`` if there are; bits of what gradients reach)."""
    check_product(x, weight, bias)
    _check_words(x.shape[0], weight.shape[1], bits)
    if not fits(x.dtype, *weight.shape):
        return gpu_activation.bias_relu(x @ weight, bias, bits, scale)
    return _with_epilogue(x, weight.unsqueeze(0), bias, bits, scale)


@on_device
def head_linear_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, bits: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same of every head's product of rows ``[n, H, F]`` with its weight of ``[H, D, F]``: ``[n, H D]``."""
    _check_heads(x, weight)
    columns = weight.shape[0] * weight.shape[1]
    right = bias is None or (bias.shape == (columns,) and bias.dtype == x.dtype)
    require(right, f"a bias {x.dtype} [{columns}]", None if bias is None else f"{bias.dtype} {list(bias.shape)}")
    _check_words(x.shape[0], columns, bits)
    require(heads_fit(x.dtype, *x.shape[1:], weight.shape[1]), "weights that programs keep", list(weight.shape))
    return _with_epilogue(x, weight.transpose(1, 2), bias, bits, scale)


@on_device
def bias_relu_grad_head_linear(
    grad: Tensor, kept: Tensor, scale: float, biased: bool, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(Both results of ``bias_relu_grad``; the first's product with every head's weight of ``[H, F, D]``, ``[n, H, F]``).

    The sums run in the same order in every run.
    """
    check_values(grad=grad, weight=weight)
    (n, _), (heads, columns, width) = grad.shape, weight.shape
    _check_heads(grad.view(n, heads, width) if grad.shape[1] == heads * width else grad, weight)
    _check_words(n, heads * width, kept)
    require(heads_fit(grad.dtype, heads, columns, width), "weights that programs keep", list(weight.shape))
    grad, kept = grad.contiguous(), kept.contiguous()
    out, through, shares = torch.empty_like(grad), grad.new_empty((n, heads, columns)), _shares(kept, heads)
    if not n:
        return out, grad.new_zeros(heads * width if biased else 0), through
    settings = {**_settings(weight.transpose(1, 2)), "WORDS": cdiv(heads * width, 32)}

    def launch(config: tune.Config) -> Tensor:
        grid, tiles, config = _grid(n, heads, config, grad.device)
        sums = grad.new_empty((grid[0], heads * width), dtype=torch.float32) if biased else None
        _bias_relu_grad_mm[grid](grad, shares, weight, out, sums, through, n, tiles, scale, **settings, **config)
        return added_up(sums, grad.dtype) if biased else grad.new_empty(0)

    shape = (grad.dtype, *settings.values(), biased, tune.size_class(n))
    work = n * heads * (columns + 2 * width) * grad.element_size()
    chosen = tune.choose("bias_relu_grad_head_linear", shape, _WRITTEN, launch, work, grad.device)
    return out, launch(chosen), through


@on_device
def mm_bias_relu_grad(grad: Tensor, weight: Tensor, kept: Tensor, scale: float, biased: bool) -> tuple[Tensor, Tensor]:
    """(``scale * grad @ weight`` where ``kept``, else 0; its sums over the rows if ``biased``, else ``[0]``).

    The sums run in the same order in every run.
    """
    check_product(grad, weight)
    columns = weight.shape[1]
    _check_words(grad.shape[0], columns, kept)
    if not fits(grad.dtype, *weight.shape):
        return gpu_activation.bias_relu_grad(grad @ weight, kept, scale, biased)
    grad, kept, n = grad.contiguous(), kept.contiguous(), grad.shape[0]
    out = grad.new_empty((n, columns))
    if not n:
        return out, grad.new_zeros(columns if biased else 0)
    settings = {name: size for name, size in _settings(weight.unsqueeze(0)).items() if name not in ("HEADS", "APART")}

    def launch(config: tune.Config) -> Tensor:
        grid, tiles, config = _grid(n, 1, config, grad.device)
        sums = grad.new_empty((grid[0], columns), dtype=torch.float32) if biased else None
        _mm_bias_relu_grad[grid](grad, weight, kept, out, sums, n, tiles, scale, **settings, **config)
        return added_up(sums, grad.dtype) if biased else grad.new_empty(0)

    shape = (grad.dtype, *settings.values(), biased, tune.size_class(n))
    work = n * (grad.shape[1] + columns) * grad.element_size()
    return out, launch(tune.choose("mm_bias_relu_grad", shape, _CONFIGS, launch, work, grad.device))
