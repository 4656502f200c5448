"""Dropout masks as bits, keyed by (seed, epoch, step, site, row id, column): the same in any execution mode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.dropout import DROPOUT_SITE, KEEP_DIGITS, keep_numerator
from joestar.kernels.gpu_hash import absorb, draw, key_state, row_state
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, find_row, op, power_of_two, require


@triton.jit
def keep_bits(a, b, word, KEEP: tl.constexpr, FRACTION: tl.constexpr):
    """32 independent bits, each set with probability ``KEEP / 2**FRACTION``: Horner's scheme over the bits of KEEP."""
    bits = tl.zeros_like(draw(a, b, word))
    started: tl.constexpr = KEEP & -KEEP
    for i in tl.static_range(FRACTION):
        if (1 << i) >= started:
            random = draw(a, b, word * 32 + i)
            bits = (random | bits) if (KEEP >> i) & 1 else (random & bits)
    return bits


@triton.jit(do_not_specialize=["n", "site"])
def _dropout_bits(
    ids, key, site, out, n, WORDS: tl.constexpr, KEEP: tl.constexpr, FRACTION: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WIDE)[None, :]
    a, b = key_state(key, site)
    a, b = row_state(a, b, tl.load(ids + i, i < n, 0).to(tl.int64))
    bits = keep_bits(a[:, None], b[:, None], word, KEEP, FRACTION)
    mask = (i < n)[:, None] & (word < WORDS)
    tl.store(out + i.to(tl.int64)[:, None] * WORDS + word, bits.to(tl.int32, bitcast=True), mask)


@triton.jit(do_not_specialize=["n", "num_edges", "site"])
def _edge_dropout_bits(
    indptr, dsts, key, site, out, n, num_edges, STEPS: tl.constexpr, WORDS: tl.constexpr, KEEP: tl.constexpr,
    FRACTION: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = e < tl.load(indptr + n)
    row = tl.where(valid, find_row(indptr, n, tl.where(valid, e, 0), STEPS), 0)
    word = tl.arange(0, WIDE)[None, :]
    a, b = key_state(key, site)
    a, b = row_state(a, b, tl.load(dsts + row, row < n, 0).to(tl.int64))
    a, b = absorb(a, b, (e - tl.load(indptr + row)).to(tl.uint32))
    bits = keep_bits(a[:, None], b[:, None], word, KEEP, FRACTION)
    mask = (e < num_edges)[:, None] & (word < WORDS)
    tl.store(out + e[:, None] * WORDS + word, bits.to(tl.int32, bitcast=True), mask)


def _settings(p: float, columns: int) -> dict[str, int]:
    words = cdiv(columns, 32)
    wide = power_of_two(words)
    keep = keep_numerator(p)
    return {"WORDS": words, "KEEP": keep, "FRACTION": KEEP_DIGITS, "WIDE": wide, "ROWS": max(1, 256 // wide)}


@op
def dropout_bits(ids: Tensor, key: Tensor, site: int, p: float, columns: int) -> Tensor:
    """Which entries dropout keeps, int32 ``[n, ceil(columns / 32)]``: bit ``c // W`` of word ``c % W`` is column c.

    ``ids`` integer ``[n]`` say what the rows stand for; every entry is dropped with probability ``p``, to 2**-24.
    """
    check_ids(ids)
    settings = _settings(p, columns)
    out = torch.empty((ids.numel(), settings["WORDS"]), dtype=torch.int32, device=ids.device)
    if out.numel():
        grid = (cdiv(ids.numel(), settings["ROWS"]),)
        _dropout_bits[grid](ids, key, site + DROPOUT_SITE, out, ids.numel(), **settings)
    return out


@op
def edge_dropout_bits(
    indptr: Tensor, num_edges: int, dsts: Tensor, key: Tensor, site: int, p: float, columns: int
) -> Tensor:
    """``dropout_bits`` for edge values: an edge is (id of its destination, rank in the row). ``[num_edges, words]``.

    Entries past the last edge count as edges of row 0.
    """
    check_offsets(indptr)
    check_ids(dsts)
    require(indptr.numel() == dsts.numel() + 1, f"one id per row, {indptr.numel() - 1}", f"{dsts.numel()} ids")
    settings, n = _settings(p, columns), indptr.numel() - 1
    out = torch.empty((num_edges, settings["WORDS"]), dtype=torch.int32, device=indptr.device)
    if out.numel() and n:
        grid = (cdiv(num_edges, settings["ROWS"]),)
        _edge_dropout_bits[grid](
            indptr, dsts, key, site + DROPOUT_SITE, out, n, num_edges, STEPS=n.bit_length(), **settings
        )
    return out if n else out.zero_()
