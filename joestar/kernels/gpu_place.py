"""The structure of a macro-batch among the slots of an arena, built on the device."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import ID_DTYPES, cdiv, check_offsets, on_device, require

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _degrees(indptr, slots, out_indptr, rows, BLOCK: tl.constexpr):
    """``out_indptr[slot + 1]`` = edges of the row in that slot."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < rows
    degree = tl.load(indptr + i + 1, inside, 0) - tl.load(indptr + i, inside, 0)
    slot = tl.load(slots + i, inside, 0).to(tl.int64)
    tl.store(out_indptr + slot + 1, degree, inside)


@triton.jit
def _row_of(indptr, low, high, position):
    """The last row in ``[low, high]`` that begins at or before a position, which is the one that holds it."""
    while low < high:
        middle = (low + high + 1) // 2
        inside = tl.load(indptr + middle) <= position
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["rows", "edges"])
def _place_edges(indptr, indices, slots, table, out_indptr, out_indices, rows, edges, BLOCK: tl.constexpr):
    """A tile of edges, of however many rows: its ends are sought first, then each edge's row between them."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    last = tl.minimum(first + BLOCK, edges) - 1
    zero = tl.zeros([], tl.int64)
    top = _row_of(indptr, zero, zero + rows - 1, first)
    end = _row_of(indptr, top, zero + rows - 1, last)
    e = first + tl.arange(0, BLOCK)
    inside = e <= last
    low = tl.zeros([BLOCK], tl.int64) + top
    high = tl.zeros([BLOCK], tl.int64) + end
    span = end - top
    while span > 0:  # halved at least, for every edge
        middle = (low + high + 1) // 2
        before = tl.load(indptr + middle) <= e
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
        span = span // 2
    slot = tl.load(slots + low).to(tl.int64)
    place = tl.load(out_indptr + slot, inside, 0) + e - tl.load(indptr + low)
    source = tl.load(indices + e, inside, 0).to(tl.int64)
    value = tl.load(table + source, inside, 0)
    tl.store(out_indices + place, value.to(out_indices.dtype.element_ty), inside)


def _check(indptr: Tensor, indices: Tensor, slots: Tensor, table: Tensor, out_indptr: Tensor,
           out_indices: Tensor) -> None:  # fmt: skip
    check_offsets(indptr), check_offsets(out_indptr)
    for name, ids in (("indices", indices), ("slots", slots), ("table", table), ("out_indices", out_indices)):
        right = ids.dtype in ID_DTYPES and ids.dim() == 1 and ids.is_contiguous()
        require(right, f"{name} int32 or int64 [n], contiguous", f"{ids.dtype} {list(ids.shape)}")
    require(indptr.is_contiguous() and out_indptr.is_contiguous(), "contiguous offsets", "strided ones")
    require(slots.numel() >= indptr.numel() - 1, f"a slot for each of {indptr.numel() - 1} rows", f"{slots.numel()}")
    require(out_indices.numel() >= indices.numel(), f"room for {indices.numel()} edges", f"{out_indices.numel()}")


@on_device
def place_structure(indptr: Tensor, indices: Tensor, slots: Tensor, out_indptr: Tensor, out_indices: Tensor,
                    table: Tensor | None = None) -> None:  # fmt: skip
    """Writes a macro-batch's structure as that of an arena, on the current stream, without waiting.

    Args:
        indptr: int64 ``[r + 1]``, offsets of ``r`` rows. indices: int32 or int64 ``[e]``, sources;
            ``indptr[r] == e``.
        slots: int32 or int64 ``[n]``, slot of every row, each once; ``n >= r``. table: int32 or int64, slot of
            whatever sources are numbered by; ``slots`` if they are local ids as rows are.
        out_indptr: int64 ``[K + 1]``, written. out_indices: int32 or int64 ``[E]``, ``E >= e``, written: row
            ``slots[i]`` has the edges of local row ``i`` in their order, sources as slots; 0 past the last edge.
    """
    table = slots if table is None else table
    _check(indptr, indices, slots, table, out_indptr, out_indices)
    rows, edges = indptr.numel() - 1, indices.numel()
    out_indptr.zero_()
    out_indices[edges:].zero_()
    if rows == 0:
        return
    _degrees[(cdiv(rows, _BLOCK),)](indptr, slots, out_indptr, rows, BLOCK=_BLOCK)
    out_indptr.cumsum_(0)
    if edges > 0:
        grid = (cdiv(edges, _BLOCK),)
        _place_edges[grid](indptr, indices, slots, table, out_indptr, out_indices, rows, edges, BLOCK=_BLOCK)
