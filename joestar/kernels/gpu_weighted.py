"""Weighted and collective sampling by exponential races, and rows of a slice, on the GPU: bit for bit the reference.

A contender is one int64: its race key above the position that settles ties, so that the smallest win. A row keeps its
best in registers, sorted, and looks at a chunk of edges at a time; few picks have a kernel of their own (``gpu_few``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_compact import claim, claimed, claims, clear_claims, clearing_programs
from joestar.kernels.gpu_few import LANES, NONE, POSITION, pick_few, pick_few_settings
from joestar.kernels.gpu_hash import absorb, draw, hashed, key_state, row_state
from joestar.kernels.gpu_launch import (
    cdiv,
    check_ids,
    check_key,
    check_node_ids,
    check_offsets,
    check_ranks,
    check_weights,
    fill_tail,
    op,
    power_of_two,
    require,
    warps_for,
)
from joestar.kernels.gpu_race import NEVER, race_key, race_table
from joestar.kernels.gpu_sampling import row_extent

_INTEGERS = ["n", "site", "num_edges", "size"]
_CHUNK = 32
_NODE = tl.constexpr(31)
"""Bits for the id of a node."""
_LOW = tl.constexpr(2**31 - 1)
"""Those bits."""


@triton.jit
def _contenders(table, weight, ranks, start, degree, a, b, position):
    """Keys of the edges at the positions ``[rows, chunk]`` of rows with these states; ``NEVER`` past the end."""
    mask = position < degree[:, None]
    value = tl.load(weight + start[:, None] + position, mask, 0)
    rank = position if ranks is None else tl.load(ranks + start[:, None] + position, mask, 0)
    key, may_win = race_key(table, draw(a[:, None], b[:, None], rank), value, mask)
    return tl.where(may_win, (key << POSITION) + position, NEVER)


@triton.jit(do_not_specialize=_INTEGERS)
def _pick_best(
    indptr, weight, rows, count, key, site, node_ids, ranks, table, picks, counts, n,
    K: tl.constexpr, WIDE: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Positions of the ``K`` best edges of every row, ascending, ``[n, K]``, and how many there are."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, degree, node = row_extent(indptr, rows, count, i, n, SLICED)
    a, b = key_state(key, site)
    a, b = row_state(a, b, hashed(node_ids, node))
    column = tl.arange(0, WIDE)[None, :]
    best = tl.full([ROWS, WIDE], NEVER, tl.int64)
    longest = tl.max(degree, 0)
    first = tl.zeros((), tl.int64)
    while first < longest:
        fresh = _contenders(table, weight, ranks, start, degree, a, b, first + column)
        if tl.sum((fresh < tl.max(best, 1)[:, None]).to(tl.int32)) > 0:
            best = tl.sort(tl.minimum(best, tl.sort(fresh, descending=True)))
        first += WIDE
    chosen = (column < K) & (best < NEVER)
    ordered = tl.sort(tl.where(chosen, best & (NONE - 1), NONE).to(tl.int32))
    tl.store(picks + i.to(tl.int64)[:, None] * K + column, ordered, (i < n)[:, None] & (column < K))
    tl.store(counts + i, tl.sum(chosen.to(tl.int64), 1), i < n)


@triton.jit(do_not_specialize=_INTEGERS)
def _pick_repeatedly(
    indptr, weight, rows, count, key, site, node_ids, ranks, table, picks, counts, n,
    K: tl.constexpr, WIDE: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Winners of ``K`` races among the edges of every row, in order; rows without a weight above 0 have none."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, degree, node = row_extent(indptr, rows, count, i, n, SLICED)
    a, b = key_state(key, site)
    a, b = row_state(a, b, hashed(node_ids, node))
    column = tl.arange(0, WIDE)[None, :]
    longest = tl.max(degree, 0)
    found = tl.zeros([ROWS], tl.int64)
    for j in range(K):
        a_j, b_j = absorb(a, b, tl.full((), 0, tl.uint32) + tl.cast(j, tl.uint32))
        best = tl.full([ROWS], NEVER, tl.int64)
        first = tl.zeros((), tl.int64)
        while first < longest:
            fresh = _contenders(table, weight, ranks, start, degree, a_j, b_j, first + column)
            best = tl.minimum(best, tl.min(fresh, 1))
            first += WIDE
        tl.store(picks + i.to(tl.int64) * K + j, (best & (NONE - 1)).to(tl.int32), i < n)
        found += (best < NEVER).to(tl.int64)
    tl.store(counts + i, found, i < n)


@triton.jit(do_not_specialize=_INTEGERS)
def _count_positive(
    indptr, weight, rows, count, table, counts, n, WIDE: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, degree, node = row_extent(indptr, rows, count, i, n, SLICED)
    state = node.to(tl.uint32)
    longest = tl.max(degree, 0)
    first = tl.zeros((), tl.int64)
    found = tl.zeros([ROWS], tl.int64)
    while first < longest:
        column = first + tl.arange(0, WIDE)[None, :]
        fresh = _contenders(table, weight, None, start, degree, state, state, column)
        found += tl.sum((fresh < NEVER).to(tl.int64), 1)
        first += WIDE
    tl.store(counts + i, found, i < n)


@triton.jit(do_not_specialize=_INTEGERS)
def _write_picks(
    indptr, weight, rows, count, table, picks, ends, sub_indptr, out, total, n, num_edges,
    K: tl.constexpr, WIDE: tl.constexpr, SLICED: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Offsets from the running counts ``ends``, positions of the picks (``K`` < 0: of all that may win), zeros."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, degree, node = row_extent(indptr, rows, count, i, n, SLICED)
    end = tl.load(ends + i, i < n, 0)
    begin = tl.load(ends + i - 1, (i < n) & (i > 0), 0)
    tl.store(sub_indptr + 1 + i, tl.minimum(end, num_edges), i < n)
    if tl.program_id(0) == 0:
        tl.store(sub_indptr, tl.zeros((), tl.int64))
        tl.store(total, tl.load(ends + n - 1))
    column = tl.arange(0, WIDE)[None, :]
    if K >= 0:
        mask = (column < (end - begin)[:, None]) & (begin[:, None] + column < num_edges)
        pick = tl.load(picks + i.to(tl.int64)[:, None] * K + column, mask, 0)
        tl.store(out + begin[:, None] + column, start[:, None] + pick, mask)
    else:
        state = node.to(tl.uint32)
        longest = tl.max(degree, 0)
        first = tl.zeros((), tl.int64)
        while first < longest:
            wins = _contenders(table, weight, None, start, degree, state, state, first + column) < NEVER
            place = begin[:, None] + tl.cumsum(wins.to(tl.int64), 1) - 1
            tl.store(out + place, start[:, None] + first + column, wins & (place < num_edges))
            begin += tl.sum(wins.to(tl.int64), 1)
            first += WIDE
    fill_tail(out, tl.load(ends + n - 1), num_edges.to(tl.int64), 0, TAIL)


def _writing(n: int, k: int) -> dict[str, int]:
    """Launch settings of ``_write_picks``: four numbers a thread, unless that leaves multiprocessors idle."""
    wide = power_of_two(k)
    rows = max(1, min(512 // wide, power_of_two(cdiv(n, 512))))
    return {"WIDE": wide, "ROWS": rows, "num_warps": min(4, warps_for(rows * wide))}


@op
def weighted_sample(
    indptr: Tensor, weight: Tensor, row_ids: Tensor, row_count: Tensor, sliced: bool, k: int, replace: bool,
    key: Tensor, site: int, num_edges: int, node_ids: Tensor | None = None, ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` edges of every row by weight: (sub_indptr, positions of the edges int64 ``[num_edges]``, count).

    Row ``i`` is column ``row_ids[i]``, or column ``i`` of a slice; it hashes as node ``row_ids[i]``. ``weight`` is
    float32 ``[E]``; rows have fewer than 2**30 edges. Edges draw by ``ranks``, int32 ``[E]``, or by their positions in
    their rows.
    """
    check_offsets(indptr)
    check_ids(row_ids)
    check_weights(weight)
    check_ranks(ranks, weight)
    check_key(key)
    check_node_ids(node_ids, None if sliced else indptr.numel() - 1)
    if sliced:
        require(indptr.numel() == row_ids.numel() + 1, "one row id per row", f"{row_ids.numel()} ids")
    n, device = row_ids.numel(), indptr.device
    if n == 0 or k == 0 or not weight.numel():
        size = max(num_edges, 0)
        return tuple(torch.zeros(shape, dtype=torch.int64, device=device) for shape in (n + 1, size, ()))
    table = race_table(device)
    counts = torch.empty(n, dtype=torch.int64, device=device)
    picks = torch.empty((n, max(k, 0)), dtype=torch.int32, device=device)
    wide = _CHUNK if k < 0 or replace else power_of_two(k)
    settings = {"SLICED": sliced, "WIDE": wide, "ROWS": 1, "num_warps": warps_for(wide)}
    grid = (n,)
    rows = indptr, weight, row_ids, row_count
    if k < 0:
        _count_positive[grid](*rows, table, counts, n, **settings)
    elif replace or k > LANES:
        pick = _pick_repeatedly if replace else _pick_best
        pick[grid](*rows, key, site, node_ids, ranks, table, picks, counts, n, K=k, **settings)
    else:
        few = {"K": k, "SLICED": sliced, **pick_few_settings(n)}
        pick_few[(cdiv(n, few["ROWS"]),)](*rows, key, site, node_ids, ranks, table, picks, counts, n, **few)
    ends = torch.cumsum(counts, 0)
    if num_edges < 0:
        num_edges = int(ends[-1])
    sub_indptr = torch.empty(n + 1, dtype=torch.int64, device=device)
    out = torch.empty(num_edges, dtype=torch.int64, device=device)
    total = torch.empty((), dtype=torch.int64, device=device)
    if k >= 0:
        settings = {"SLICED": sliced, **_writing(n, k)}
        grid = (cdiv(n, settings["ROWS"]),)
    write = _write_picks[grid]
    write(*rows, table, picks, ends, sub_indptr, out, total, n, num_edges, K=max(k, -1), TAIL=128, **settings)
    return sub_indptr, out, total


@triton.jit(do_not_specialize=_INTEGERS)
def _node_keys(
    end, sub_indices, weight, table, key, site, node_ids, claims_table, calls, out, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Contenders of a collective sample: the first edge of every source."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = (e < size) & (e < tl.load(end))
    node = tl.load(sub_indices + e, valid, 0).to(tl.int64)
    valid = valid & (claimed(claims_table, calls, node, valid, BITS) == e)
    a, b = key_state(key, site)
    name = hashed(node_ids, node)
    a, b = row_state(a, b, name)
    value = tl.full([BLOCK], 1, tl.float32)
    if weight is not None:
        value = tl.load(weight + node, valid, 0)
    race, may_win = race_key(table, draw(a, b, 0), value, valid)
    if node_ids is not None:
        name = name & _LOW
    tl.store(out + e, tl.where(may_win, (race << _NODE) + name, NEVER), e < size)


@triton.jit(do_not_specialize=["num_nodes"])
def _clear_claims(table, calls, num_nodes, PERIOD: tl.constexpr, BLOCK: tl.constexpr):
    clear_claims(table, calls, num_nodes, PERIOD, BLOCK)


@op
def collective_sample(
    sub_indptr: Tensor, sub_indices: Tensor, weight: Tensor | None, num_nodes: int, k: int, key: Tensor, site: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` distinct sources of a slice, together: (node ids ``[k]`` in ascending order, their number).

    ``weight`` is float32 ``[num_nodes]``, ``None`` if all are as likely. Padding repeats the first node, or is 0.
    Shares the claims of ``compact``; ``num_nodes`` is at most 2**31.
    """
    check_offsets(sub_indptr)
    check_ids(sub_indices)
    check_key(key)
    check_node_ids(node_ids, num_nodes)
    require(num_nodes <= 2**31, "at most 2**31 nodes", num_nodes)
    if weight is not None:
        check_weights(weight)
        require(weight.numel() == num_nodes, f"one weight per node, {num_nodes}", weight.numel())
    size, device = sub_indices.numel(), sub_indices.device
    nodes = torch.zeros(k, dtype=torch.int64, device=device)
    if not size or not k:
        return nodes.to(sub_indices.dtype), torch.zeros((), dtype=torch.int64, device=device)
    taken, calls, bits, period = claims(device, num_nodes, size)
    end, grid = sub_indptr[-1:], (cdiv(size, 256),)
    contenders = torch.empty(size, dtype=torch.int64, device=device)
    claim[grid](sub_indices, end, end, sub_indices, taken, calls, 0, size, BITS=bits, PERIOD=period, BLOCK=256)
    race = race_table(device)
    _node_keys[grid](
        end, sub_indices, weight, race, key, site, node_ids, taken, calls, contenders, size, BITS=bits, BLOCK=256
    )
    _clear_claims[(clearing_programs(num_nodes),)](taken, calls, num_nodes, PERIOD=period, BLOCK=1024)
    best, edges = torch.topk(contenders, min(k, size), largest=False, sorted=False)
    won = best < NEVER.value
    winners = best & (2**31 - 1) if node_ids is None else sub_indices[edges].to(torch.int64)
    nodes = torch.full((k,), 2**31, dtype=torch.int64, device=device)
    nodes[: best.numel()] = torch.where(won, winners, 2**31)
    nodes = torch.sort(nodes).values
    nodes = torch.where(nodes < 2**31, nodes, torch.where(nodes[:1] < 2**31, nodes[:1], 0))
    return nodes.to(sub_indices.dtype), won.sum()


@triton.jit(do_not_specialize=_INTEGERS)
def _member_flags(end, sub_indices, wanted, size, n, flags, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the source of each edge is in ``wanted``, sorted: bisection for the last entry that is not larger."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = (e < size) & (e < tl.load(end))
    source = tl.load(sub_indices + e, valid, -1).to(tl.int64)
    low = tl.zeros_like(e)
    high = low + n - 1
    for _ in range(STEPS):
        middle = (low + high + 1) >> 1
        inside = tl.load(wanted + middle) <= source
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, tl.maximum(middle - 1, 0))
    tl.store(flags + e, (valid & (tl.load(wanted + low) == source)).to(tl.int64), e < size)


@triton.jit(do_not_specialize=_INTEGERS)
def _write_members(sub_indptr, ends, new_indptr, out, n, size, num_edges, BLOCK: tl.constexpr):
    """Positions of the flagged edges and the offsets of the rows, from the running count of flags; zeros behind."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ends + i, i < size, 0)
    flagged = (i < size) & (rank > tl.load(ends + i - 1, (i > 0) & (i < size), 0))
    tl.store(out + rank - 1, i, flagged & (rank <= num_edges))
    offset = tl.load(sub_indptr + i, i <= n, 0)
    before = tl.load(ends + offset - 1, (i <= n) & (offset > 0), 0)
    tl.store(new_indptr + i, tl.minimum(before, num_edges), i <= n)
    fill_tail(out, tl.load(ends + size - 1), num_edges.to(tl.int64), 0, BLOCK)


@op
def slice_rows(
    sub_indptr: Tensor, sub_indices: Tensor, row_ids: Tensor, srcs: Tensor, src_count: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges whose source is among ``srcs[:src_count]``: (new_indptr, positions int64 ``[num_edges]``, count)."""
    check_offsets(sub_indptr)
    check_ids(sub_indices, srcs)
    size, n, device = sub_indices.numel(), sub_indptr.numel() - 1, sub_indices.device
    if not size or not srcs.numel():
        return tuple(torch.zeros(shape, dtype=torch.int64, device=device) for shape in (n + 1, max(num_edges, 0), ()))
    valid = torch.arange(srcs.numel(), device=device) < src_count
    wanted = torch.sort(torch.where(valid, srcs.to(torch.int64), torch.iinfo(torch.int64).max)).values
    flags = torch.empty(size, dtype=torch.int64, device=device)
    _member_flags[(cdiv(size, 256),)](
        sub_indptr[-1:], sub_indices, wanted, size, srcs.numel(), flags, STEPS=srcs.numel().bit_length(), BLOCK=256
    )
    ends = torch.cumsum(flags, 0)
    if num_edges < 0:
        num_edges = int(ends[-1])
    new_indptr = torch.empty_like(sub_indptr)
    out = torch.empty(num_edges, dtype=torch.int64, device=device)
    grid = (cdiv(max(size, n + 1), 256),)
    _write_members[grid](sub_indptr, ends, new_indptr, out, n, size, num_edges, BLOCK=256)
    return new_indptr, out, ends[-1].clone()
