"""Bits of the entries of rows, 32 columns to a word: bit ``c // W`` of word ``c % W`` is column ``c``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv
from joestar.kernels.tune import Config


@triton.jit
def kept_bits(bits, row, column, mask, WORDS: tl.constexpr):
    """Whether dropout keeps the entries: neighbouring columns read neighbouring words."""
    word = tl.load(bits + row * WORDS + column % WORDS, mask, 0)
    return ((word >> (column // WORDS)) & 1) != 0


@triton.jit
def passes_relu(value):
    """Positive, or NaN, as in torch: a model that has diverged must not train on as if nothing were."""
    return (value > 0) | (value != value)


@triton.jit
def whole_words(part, WIDTH: tl.constexpr, WORDS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of part ``part`` of a row, ``[1, BLOCK]``: all those of ``WIDE`` words, in order of their bits."""
    lane = tl.arange(0, BLOCK)[None, :]
    if WORDS == WIDE:
        return lane
    else:
        word = part * WIDE + lane % WIDE
        return tl.where(word < WORDS, lane // WIDE * WORDS + word, WIDTH)


@triton.jit
def store_bits(
    out, row, holds, part, mask, WORDS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr = 1
):
    """A bit for every entry of ``holds`` ``[ROWS, BLOCK]``, or ``[ROWS, 1, BLOCK]`` where ``AXIS`` is 2.

    The columns are those of ``whole_words``. The words stay in the layout of the values, in which rows are read:
    nothing passes through shared memory.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    if AXIS == 2:
        lane = tl.arange(0, BLOCK)[None, None, :]
    bits = holds.to(tl.int32) << (lane // WIDE % 32)
    words = tl.zeros_like(bits)
    for w in tl.static_range(WIDE):
        words = tl.where(lane == w, tl.sum(tl.where(lane % WIDE == w, bits, 0), AXIS, keep_dims=True), words)
    word = part * WIDE + lane
    tl.store(out + row * WORDS + word, words, mask & (lane < WIDE) & (word < WORDS))


def rows_within_warps(configs: list[Config], row_bytes: int) -> list[Config]:
    """Settings that do not spread a row over warps, which would exchange its bits by way of shared memory."""
    return configs if row_bytes <= 512 else [config for config in configs if config["num_warps"] == 1]


def unknown_bits(x: Tensor) -> Tensor:
    """Room for a bit per entry of ``x`` ``[n, D]``: int32 ``[n, ceil(D / 32)]``."""
    return torch.empty((x.shape[0], cdiv(x.shape[1], 32)), dtype=torch.int32, device=x.device)
