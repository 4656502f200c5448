"""The structure of an arena from that of a macro-batch."""

from torch import Tensor

from joestar.store.fill import kernel_for


def place_structure(indptr: Tensor, indices: Tensor, slots: Tensor, out_indptr: Tensor, out_indices: Tensor,
                    table: Tensor | None = None) -> None:  # fmt: skip
    """Writes a macro-batch's structure as that of an arena, whose ids are slots.

    Row ``slots[i]`` of the result has the edges of local row ``i`` in the same order; slots without a row are empty;
    entries of ``out_indices`` past the last edge are 0, a slot that exists. On a GPU the work is queued on the current
    stream and nothing waits.

    Args:
        indptr: int64 ``[r + 1]``: in-edges of the first ``r`` local nodes; the others have none.
        indices: int32 or int64 ``[e]``, sources, ``e == indptr[r]``.
        slots: int32 or int64 ``[n]``, ``n >= r``: slot of every local node, no slot twice.
        table: int32 or int64, slot of whatever the sources are numbered by; ``None``: of local nodes, as ``slots``.
        out_indptr: int64 ``[K + 1]``, written. out_indices: int32 or int64 ``[E]``, ``E >= e``, written. Both may have
            any content before. All on one device.

    Raises:
        ValueError: for shapes or dtypes that do not fit, and on a CPU for a slot that occurs twice.
        IndexError: on a CPU, for a slot or a source that is not there.
    """
    kernel_for(out_indptr, "place_structure")(indptr, indices, slots, out_indptr, out_indices, table)
