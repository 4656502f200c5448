"""Dropout masks as bits, keyed by (seed, epoch, step, site, row id, column): the same in any execution mode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.dropout import DROPOUT_SITE, KEEP_DIGITS, keep_numerator
from joestar.kernels.gpu_hash import absorb, draw, key_state, row_state
from joestar.kernels.gpu_launch import cdiv, check_ids, check_offsets, op, power_of_two, require

_DSTS = 16
"""Destinations whose edges one program takes."""


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
    indptr, dsts, a, b, out, e, row, mask, WORDS: tl.constexpr, KEEP: tl.constexpr, FRACTION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Stores the bits of edges ``e`` ``[edges, 1]`` of rows ``row``."""
    word = tl.arange(0, WIDE)[None, :]
    a, b = row_state(a, b, tl.load(dsts + row, mask, 0).to(tl.int64))
    a, b = absorb(a, b, (e - tl.load(indptr + row, mask, 0)).to(tl.uint32))
    bits = keep_bits(a, b, word, KEEP, FRACTION)
    tl.store(out + e * WORDS + word, bits.to(tl.int32, bitcast=True), mask & (word < WORDS))


@triton.jit(do_not_specialize=["n", "num_edges", "site"])
def _edge_dropout_bits(
    indptr, dsts, key, site, out, n, num_edges, WORDS: tl.constexpr, KEEP: tl.constexpr, FRACTION: tl.constexpr,
    WIDE: tl.constexpr, DSTS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """A program takes all edges of ``DSTS`` destinations, ``EDGES`` at a time; then a share of what is past them."""
    i = tl.program_id(0).to(tl.int64) * DSTS
    ends = tl.load(indptr + tl.minimum(i + 1 + tl.arange(0, DSTS), n))[None, :]
    first, last = tl.load(indptr + i), tl.load(indptr + tl.minimum(i + DSTS, n))
    a, b = key_state(key, site)
    edge = tl.arange(0, EDGES)[:, None]
    while first < last:
        e = first + edge
        row = i + tl.sum((e >= ends).to(tl.int64), 1, keep_dims=True)
        _edge_bits(indptr, dsts, a, b, out, e, row, e < last, WORDS, KEEP, FRACTION, WIDE)
        first += EDGES
    first = tl.load(indptr + n) + tl.program_id(0).to(tl.int64) * EDGES
    while first < num_edges:
        e = first + edge
        _edge_bits(indptr, dsts, a, b, out, e, tl.zeros_like(e), e < num_edges, WORDS, KEEP, FRACTION, WIDE)
        first += tl.num_programs(0).to(tl.int64) * EDGES


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
        settings["EDGES"] = max(1, settings.pop("ROWS") // 2)
        _edge_dropout_bits[(cdiv(n, _DSTS),)](
            indptr, dsts, key, site + DROPOUT_SITE, out, n, num_edges, DSTS=_DSTS, **settings
        )
    return out if n else out.zero_()
