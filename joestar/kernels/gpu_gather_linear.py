"""Products of gathered rows on the GPU: their loads gather, so the rows are never stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_launch import cdiv, check_ids, check_rows, multiprocessors, op, power_of_two
from joestar.kernels.gpu_tiles import accumulator, check_values
from joestar.kernels.machine import products_in_tf32

_CONFIGS = [
    {"ROWS": 128, "DEPTH": 32, "num_warps": 8, "num_stages": 3},
    {"ROWS": 128, "DEPTH": 32, "num_warps": 4, "num_stages": 3},
    {"ROWS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 4},
    {"ROWS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 2},
    {"ROWS": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 2},
]
_KEPT = [
    {"ROWS": 64, "AHEAD": 5, "PER_CORE": 1, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 5, "PER_CORE": 2, "num_warps": 4},
    {"ROWS": 64, "AHEAD": 5, "PER_CORE": 1, "num_warps": 8},
]
"""Settings of programs that keep a weight, behind the others; ``PER_CORE`` run on a multiprocessor at a time."""
_MIXED = [
    {"ROWS": 32, "DEPTH": 32, "num_warps": 4, "num_stages": 3},
    {"ROWS": 32, "DEPTH": 32, "num_warps": 2, "num_stages": 3},
    {"ROWS": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 2},
]
"""Of rows whose dtype is not the weights'. Converted rows are operands in registers, and on a Hopper products of groups
of four warps and 64 rows read those after the instruction: Triton 3.6 lets the next tile overwrite them (its issue
9433; now and then 16 rows of a result were wrong). Products of smaller tiles are instructions that wait."""
_KEPT_BYTES = 512
"""Longest row of a weight that is kept: 128 of them are 64 KB of the 227 that a multiprocessor of an H200 shares."""


@triton.jit
def one_of(pointers, place, COUNT: tl.constexpr):
    """The pointer at a place of a tuple, the first for one behind it."""
    found = pointers[0]
    for p in tl.static_range(1, COUNT):
        found = tl.where(place == p, pointers[p], found)
    return found


@triton.jit(do_not_specialize=["n"])
def _gather_linear(
    table, ids, weights, biases, outs, n,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRODUCTS: tl.constexpr, BIASES: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``outs[p][i] = table[ids[i]] @ weights[p].T + biases[p]``: a tile of rows, and of one product, per program.

    The row of id ``NO_ROW`` is 0.

    Programs of the same rows follow one another: all but the first find these in the second-level cache.
    """
    part, tile = tl.program_id(0) % (PRODUCTS * PARTS), tl.program_id(0) // (PRODUCTS * PARTS)
    product = part // PARTS
    weight, out = one_of(weights, product, PRODUCTS), one_of(outs, product, PRODUCTS)
    i = tile * ROWS + tl.arange(0, ROWS)
    column = (part % PARTS) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + i, i < n, -1).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], ACC)
    for first in range(0, WIDTH, DEPTH):
        k = first + tl.arange(0, DEPTH)
        rows = tl.load(table + source[:, None] * WIDTH + k[None, :], (source >= 0)[:, None] & (k < WIDTH)[None, :], 0)
        inside = (column < COLUMNS)[None, :] & (k < WIDTH)[:, None]
        block = tl.load(weight + column[None, :] * WIDTH + k[:, None], inside, 0)
        total = tl.dot(rows.to(block.dtype), block, total, input_precision=PRECISION, out_dtype=ACC)
    if BIASES > 0:
        bias = one_of(biases, product, BIASES)
        total += tl.load(bias + column, (column < COLUMNS) & (product < BIASES), 0).to(ACC)[None, :]
    at = out + i.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), (i < n)[:, None] & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["n", "tiles"])
def _gather_linear_kept(
    table, ids, weights, biases, outs, n, tiles,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRODUCTS: tl.constexpr, BIASES: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The same by programs that keep their part of a weight, ``DEPTH`` columns, and go through tiles of rows.

    The rows of the next tile are on their way while one is multiplied and stored: of five stages (``AHEAD``) ids take
    two, rows two, the product one.
    """
    part, step = tl.program_id(0) % (PRODUCTS * PARTS), tl.num_programs(0) // (PRODUCTS * PARTS)
    product = part // PARTS
    weight, out = one_of(weights, product, PRODUCTS), one_of(outs, product, PRODUCTS)
    column, k = (part % PARTS) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    kept = tl.load(weight + column[None, :] * WIDTH + k[:, None], (column < COLUMNS)[None, :] & (k < WIDTH)[:, None], 0)
    added = tl.zeros([BLOCK], ACC)
    if BIASES > 0:
        bias = one_of(biases, product, BIASES)
        added = tl.load(bias + column, (column < COLUMNS) & (product < BIASES), 0).to(ACC)
    for tile in tl.range(tl.program_id(0) // (PRODUCTS * PARTS), tiles, step, num_stages=AHEAD):
        i = tile * ROWS + tl.arange(0, ROWS)
        source = tl.load(ids + i, i < n, -1).to(tl.int64)
        rows = tl.load(table + source[:, None] * WIDTH + k[None, :], (source >= 0)[:, None] & (k < WIDTH)[None, :], 0)
        total = tl.dot(rows.to(kept.dtype), kept, input_precision=PRECISION, out_dtype=ACC) + added[None, :]
        at = out + i.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), (i < n)[:, None] & (column < COLUMNS)[None, :])


@op
def gather_linears(table: Tensor, ids: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """``[n, C]`` each, in the weights' dtype; float32 products in TF32 where PyTorch's own are allowed to."""
    check_ids(ids)
    parts = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    check_values(table=table, **parts, **{f"biases[{i}]": bias for i, bias in enumerate(biases)})
    first, n, (columns, width) = weights[0], ids.numel(), weights[0].shape
    check_rows(n)
    outs = [first.new_empty((n, columns)) for _ in weights]
    if not outs[0].numel():
        return outs
    precision = "tf32" if first.dtype != torch.float32 or products_in_tf32() else "ieee"
    block = min(128, max(16, power_of_two(columns)))
    blocks = cdiv(columns, block)

    settings = {
        "WIDTH": width, "COLUMNS": columns, "PRODUCTS": len(weights), "BIASES": len(biases), "PARTS": blocks,
        "PRECISION": precision, "ACC": accumulator(table, first), "BLOCK": block,
    }  # fmt: skip
    every = (table, ids, tuple(weights), tuple(biases), tuple(outs), n)

    def launch(config: tune.Config) -> None:
        tiles, parts = cdiv(n, config["ROWS"]), len(weights) * blocks
        if "AHEAD" in config:
            programs = min(tiles, max(1, config["PER_CORE"] * multiprocessors(table.device) // parts))
            config = {name: value for name, value in config.items() if name != "PER_CORE"}
            _gather_linear_kept[(programs * parts,)](*every, tiles, DEPTH=power_of_two(width), **settings, **config)
        else:
            _gather_linear[(tiles * parts,)](*every, **settings, **config)

    shape = (table.dtype, first.dtype, width, columns, len(weights), precision, len(biases), tune.size_class(n))
    work = n * (width * table.element_size() + len(weights) * columns * first.element_size())
    fits = precision == "tf32" and width >= 16 and power_of_two(width) * first.element_size() <= _KEPT_BYTES
    configs = candidates(table.dtype == first.dtype, fits)
    launch(tune.choose("gather_linear", shape, configs, launch, work, first.device))
    return outs


def candidates(alike: bool, fits: bool) -> list[tune.Config]:
    """Launch settings, of rows and weights of one dtype or of two; ``fits``: a weight can be kept."""
    if not alike:
        return _MIXED
    return _CONFIGS + _KEPT if fits else _CONFIGS


@op
def gather_linear(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[n, C]``, as ``gather_linears``."""
    return gather_linears(table, ids, [weight], [] if bias is None else [bias])[0]
