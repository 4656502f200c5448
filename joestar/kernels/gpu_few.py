"""Weighted samples of few edges of a row on the GPU: the best so far, not in order, are in the lanes of a warp.

A contender, one int64 (see ``gpu_weighted``), is two halves here, since a warp finds the smallest of 32-bit numbers in
one instruction. While the first of the newcomers is better than the last of the best, it takes the place of that.
"""

import triton
import triton.language as tl

from joestar.kernels.gpu_hash import draw, hashed, key_state, row_state
from joestar.kernels.gpu_launch import power_of_two
from joestar.kernels.gpu_race import race_key
from joestar.kernels.gpu_sampling import row_extent

LANES = 32
"""Most picks of a row."""
POSITION = tl.constexpr(30)
"""Bits for the position of an edge in its row; keys have 33."""
NONE = tl.constexpr(2**30)
"""Larger than any position."""
_LANES = tl.constexpr(LANES)
_LAST = tl.constexpr(2**31 - 1)
"""Upper half of what is no contender."""
_NEAR = tl.constexpr(4)
"""So many chunks of a row are ``CHUNK`` edges."""
_FAR = tl.constexpr(8)
"""So many times larger are the chunks behind them, which is what long rows need: many reads at a time."""


@triton.jit
def _halves(table, weight, ranks, start, degree, a, b, position):
    """Contenders at the positions of one row as (upper halves, int32: signed and ``_LAST`` for none; lower, uint32)."""
    mask = position < degree
    value = tl.load(weight + start + position, mask, 0)
    rank = position if ranks is None else tl.load(ranks + start + position, mask, 0)
    key, may_win = race_key(table, draw(a, b, rank), value, mask)
    upper = tl.where(may_win, (key >> (32 - POSITION)).to(tl.int32), _LAST)
    return upper, (key.to(tl.uint32) << POSITION) | position.to(tl.uint32)


@triton.jit
def _first_of(upper, lower):
    """The smallest contender."""
    top = tl.min(upper, 0)
    return top, tl.min(tl.where(upper == top, lower, 0xFFFFFFFF), 0)


@triton.jit
def _last_of(upper, lower):
    """The largest contender."""
    top = tl.max(upper, 0)
    return top, tl.max(tl.where(upper == top, lower, 0), 0)


@triton.jit
def _better(best_upper, best_lower, upper, lower):
    """The best with the newcomers that are better than their last ones in the places of those."""
    last_upper, last_lower = _last_of(best_upper, best_lower)
    top, bottom = _first_of(upper, lower)
    while (top < last_upper) | ((top == last_upper) & (top < _LAST) & (bottom < last_lower)):
        replaced = (best_upper == last_upper) & (best_lower == last_lower)
        best_upper, best_lower = tl.where(replaced, top, best_upper), tl.where(replaced, bottom, best_lower)
        upper = tl.where((upper == top) & (lower == bottom), _LAST, upper)
        last_upper, last_lower = _last_of(best_upper, best_lower)
        top, bottom = _first_of(upper, lower)
    return best_upper, best_lower


@triton.jit
def _of_lane(values, lane, number):
    """The entry of one lane, of 32 bits."""
    return tl.sum(tl.where(lane == number, values, 0), 0)


@triton.jit(do_not_specialize=["n", "site"])
def pick_few(
    indptr, weight, rows, count, key, site, node_ids, ranks, table, picks, counts, n,
    K: tl.constexpr, SLICED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Positions of the ``K`` best edges of every row, ascending, ``[n, K]``, and how many there are.

    A program takes ``ROWS`` <= ``_LANES`` rows, one after the other: what it knows of them is in a lane each.
    """
    lane = tl.arange(0, _LANES)
    mine = tl.program_id(0) * ROWS + lane
    starts, degrees, nodes = row_extent(indptr, rows, count, mine, tl.minimum(n, (tl.program_id(0) + 1) * ROWS), SLICED)
    a, b = key_state(key, site)
    a_rows, b_rows = row_state(a, b, hashed(node_ids, nodes))
    starts_upper, starts_lower = (starts >> 32).to(tl.int32), starts.to(tl.uint32)
    degrees = degrees.to(tl.int32)
    near = tl.arange(0, CHUNK)
    far = tl.arange(0, CHUNK * _FAR)
    found = tl.zeros([_LANES], tl.int32)
    for r in range(ROWS):
        i = tl.program_id(0) * ROWS + r
        degree = _of_lane(degrees, lane, r)
        start = _of_lane(starts_upper, lane, r).to(tl.int64) << 32 | _of_lane(starts_lower, lane, r).to(tl.int64)
        a, b = _of_lane(a_rows, lane, r), _of_lane(b_rows, lane, r)
        best_upper = tl.where(lane < K, _LAST, -_LAST)
        best_lower = lane.to(tl.uint32)
        upper, lower = _halves(table, weight, ranks, start, degree, a, b, near)
        most = tl.minimum(degree, K)
        j = tl.zeros((), tl.int32)
        while j < most:
            top, bottom = _first_of(upper, lower)
            taken = (lane == j) & (top < _LAST)
            best_upper, best_lower = tl.where(taken, top, best_upper), tl.where(taken, bottom, best_lower)
            upper = tl.where((upper == top) & (lower == bottom), _LAST, upper)
            j += 1
        first = tl.full((), CHUNK, tl.int32)
        while first < tl.minimum(degree, _NEAR * CHUNK):
            upper, lower = _halves(table, weight, ranks, start, degree, a, b, first + near)
            best_upper, best_lower = _better(best_upper, best_lower, upper, lower)
            first += CHUNK
        while first < degree:
            many_upper, many_lower = _halves(table, weight, ranks, start, degree, a, b, first + far)
            best_upper, best_lower = _better(best_upper, best_lower, many_upper, many_lower)
            first += CHUNK * _FAR
        chosen = (lane < K) & (best_upper < _LAST)
        position = tl.where(chosen, (best_lower & (NONE - 1)).to(tl.int32), NONE)
        place = tl.zeros([_LANES], tl.int32)
        while j > 0:
            j -= 1
            place += (_of_lane(position, lane, j) < position).to(tl.int32)
        tl.store(picks + i.to(tl.int64) * K + place, position, chosen)
        found = tl.where(lane == r, tl.sum(chosen.to(tl.int32), 0), found)
    tl.store(counts + mine, found.to(tl.int64), (lane < ROWS) & (mine < n))


def pick_few_settings(n: int) -> dict[str, int]:
    """Launch settings of ``pick_few`` for ``n`` rows: of few ones, the longest are waited for, and get more warps."""
    warps = 4 if n <= 4096 else 1
    return {"CHUNK": LANES * warps, "ROWS": min(8, max(1, power_of_two(n) // 16384)), "num_warps": warps}
