"""Dropout masks as bits, keyed by (seed, epoch, step, site, row id, column): the same in any execution mode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.dropout import DROPOUT_SITE, KEEP_DIGITS, keep_numerator
from joestar.kernels.gpu_hash import absorb, draw, key_state, row_state
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, check_rows, op, power_of_two, require

_SLOTS = 8
"""Edges of a destination that one program takes at a time."""


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


@triton.jit
def _edge_bits(
    out, a, b, rank, e, mask, WORDS: tl.constexpr, KEEP: tl.constexpr, FRACTION: tl.constexpr, WIDE: tl.constexpr
):
    """Stores the bits of edges ``e`` ``[ROWS, SLOTS]``, ``rank`` in rows whose states are ``a`` and ``b``."""
    word = tl.arange(0, WIDE)[None, None, :]
    a, b = absorb(a, b, rank.to(tl.uint32))
    bits = keep_bits(a[:, :, None], b[:, :, None], word, KEEP, FRACTION)
    tl.store(out + e[:, :, None] * WORDS + word, bits.to(tl.int32, bitcast=True), mask[:, :, None] & (word < WORDS))


@triton.jit(do_not_specialize=["n", "num_edges", "site"])
def _edge_dropout_bits(
    indptr, dsts, key, site, out, n, num_edges, WORDS: tl.constexpr, KEEP: tl.constexpr, FRACTION: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A program takes all edges of ``ROWS`` destinations, ``SLOTS`` of each at a time; then a share of the padding."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :].to(tl.int64)
    start, end = tl.load(indptr + i, i < n, 0), tl.load(indptr + i + 1, i < n, 0)
    a, b = key_state(key, site)
    row_a, row_b = row_state(a, b, tl.load(dsts + i, i < n, 0).to(tl.int64))
    rank = slot + tl.zeros([ROWS, SLOTS], tl.int64)
    while tl.max(end - start - rank) > 0:
        _edge_bits(out, row_a, row_b, rank, start + rank, start + rank < end, WORDS, KEEP, FRACTION, WIDE)
        rank += SLOTS
    row_a, row_b = row_state(a, b, (tl.load(dsts) + tl.zeros([ROWS, 1], dsts.dtype.element_ty)).to(tl.int64))
    first = tl.load(indptr + n) + tl.program_id(0).to(tl.int64) * (ROWS * SLOTS)
    while first < num_edges:
        e = first + tl.arange(0, ROWS)[:, None] * SLOTS + slot
        _edge_bits(out, row_a, row_b, e, e, e < num_edges, WORDS, KEEP, FRACTION, WIDE)
        first += tl.num_programs(0).to(tl.int64) * (ROWS * SLOTS)


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
    check_rows(ids.numel())
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
        slots = max(1, min(_SLOTS, settings["ROWS"]))
        settings["ROWS"] = max(1, settings["ROWS"] // slots)
        grid = (cdiv(n, settings["ROWS"]),)
        _edge_dropout_bits[grid](indptr, dsts, key, site + DROPOUT_SITE, out, n, num_edges, SLOTS=slots, **settings)
    return out if n else out.zero_()
