"""The device's side of historical embeddings: slices of a macro-batch, at addresses that never change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from joestar.graph_api.history import HistoryTables
from joestar.stages.exchanged import Marked
from joestar.stages.history import Slice

HALVES = 2
_PULLED, _PUSHED = 2, 1
"""Rows in front of the halves."""
_WITHOUT = 1


class DeviceHistory:
    """Slices of historical embeddings beside an arena: two halves, which macro-batches take in turns.

    Row 0 of every table belongs to nobody: nodes that are computed read none, and what is not to be kept is written
    there. Row 1 of what is pulled stands for halo nodes without a row in that layer, and is never usable. Steps write
    to one half of ``pushed`` while the other one is brought back to the host.

    Args:
        slots: of the arena. widths: of the hidden layers. pulls, pushes: rows of a half, per layer. dtype: of the
            tables.

    Attributes:
        tables: what programs read. pushed: per layer ``[1 + 2 * pushes, width]``; written: bool ``[1 + 2 * pushes]``.
    """

    def __init__(
        self, slots: int, widths: Sequence[int], pulls: Sequence[int], pushes: Sequence[int], dtype: torch.dtype, device
    ):
        self.device = torch.device(device)
        self.pulls, self.pushes = list(pulls), list(pushes)
        read = [(_PULLED + HALVES * rows, width) for rows, width in zip(pulls, widths, strict=True)]
        kept = [(_PUSHED + HALVES * rows, width) for rows, width in zip(pushes, widths, strict=True)]
        with torch.inference_mode(False), torch.device(self.device):
            places = [torch.zeros(slots, dtype=torch.int32) for _ in widths]
            self._next = [torch.zeros_like(place) for place in places]
            pulled = [torch.zeros(shape, dtype=dtype) for shape in read]
            usable = [torch.zeros(rows, dtype=torch.bool) for rows, _ in read]
            self.pushed = [torch.zeros(shape, dtype=dtype) for shape in kept]
            self.written = [torch.zeros(rows, dtype=torch.bool) for rows, _ in kept]
            for flags in usable:
                flags[0] = True
        self.tables = HistoryTables(places, pulled, usable)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has on the device."""
        tables = self.tables
        return [*self._next, *tables.places, *tables.pulled, *tables.usable, *self.pushed, *self.written]

    @staticmethod
    def nbytes_of(widths: Sequence[int], pulls: Sequence[int], pushes: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the device, but for ``slot_nbytes`` of every slot."""
        rows = (sum(each) for each in zip(pulls, pushes, strict=True))
        return sum(HALVES * count * (width * dtype.itemsize + 1) for count, width in zip(rows, widths, strict=True))

    @staticmethod
    def slot_nbytes(layers: int) -> int:
        """Bytes per slot of the tables that say where its rows are, now and next."""
        return 2 * 4 * layers

    @torch.no_grad()
    def load(self, half: int, pulls: Marked, pushes: Marked, slices: list[Slice]) -> None:
        """Brings a macro-batch's slices into a half that no step to come reads, on the current stream.

        Args:
            pulls: halo nodes, whose rows are read, in the order of the slices; pushes: those whose rows are kept.
        """
        (halo, *reads), (own, *keeps) = (
            [tensor.to(self.device, non_blocking=True) for tensor in (each.slots, *each.layers)]
            for each in (pulls, pushes)
        )
        halo, own = halo.to(torch.int64), own.to(torch.int64)
        for layer, following in enumerate(self._next):
            first = _PULLED + half * self.pulls[layer]
            following.zero_()
            following.index_copy_(0, halo, _numbered(reads[layer], first, _WITHOUT))
            following.index_copy_(0, own, -_numbered(keeps[layer], _PUSHED + half * self.pushes[layer], 0))
            if slices:
                given, rows = slices[layer], slice(first, first + len(slices[layer].values))
                self.tables.pulled[layer][rows].copy_(given.values, non_blocking=True)
                self.tables.usable[layer][rows].copy_(given.usable, non_blocking=True)
        self.forget(half, [int(flags.sum()) for flags in pushes.layers])

    @torch.no_grad()
    def show(self) -> None:
        """What was loaded last is what steps on the current stream read from now on."""
        for place, following in zip(self.tables.places, self._next, strict=True):
            place.copy_(following)
        for tensor in (*self.tables.places, *self.tables.pulled, *self.tables.usable):
            torch.autograd.graph.increment_version(tensor)

    @torch.no_grad()
    def push(self, outputs: list[Tensor], ok: Tensor) -> None:
        """Keeps the hidden rows of a step, if it happened: a part of the step, which nothing waits for.

        Rows that are not finite are not kept, as of a step that a loss scale skips: others would read them for epochs.

        Args:
            outputs: of every layer rows of the table (int32 ``[D]``, 0 for what is not kept) and values ``[D, width]``.
            ok: 0-d bool.
        """
        for layer, (rows, values) in enumerate(zip(outputs[::2], outputs[1::2], strict=True)):
            values = values.detach().to(self.pushed[layer].dtype)
            kept = ok & torch.isfinite(values).all(1)
            rows = (rows * kept).to(torch.int64)  # what did not happen goes to row 0
            self.pushed[layer].index_copy_(0, rows, values)
            self.written[layer].index_fill_(0, rows, True)

    @torch.no_grad()
    def collected(self, half: int, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What was pushed into a half since it was loaded or forgotten, per layer, on the CPU: (which of its so many
        nodes, values). Waits for the current stream."""
        found = []
        for pushes, count, values, flags in zip(self.pushes, counts, self.pushed, self.written, strict=True):
            first = _PUSHED + half * pushes
            flags = flags[first : first + count]
            which = torch.nonzero(flags).flatten()
            found.append((which.cpu(), _on_host(values.index_select(0, which + first))))
        return found

    @torch.no_grad()
    def forget(self, half: int, counts: Sequence[int]) -> None:
        """What was pushed into a half so far is not collected again; on the current stream."""
        for pushes, count, flags in zip(self.pushes, counts, self.written, strict=True):
            flags[_PUSHED + half * pushes :][:count].zero_()


def _numbered(flags: Tensor, first: int, others: int) -> Tensor:
    """int32 ``[n]``: ``first``, ``first + 1``, ... where ``flags`` are set, ``others`` elsewhere."""
    return torch.where(flags, flags.cumsum(0, dtype=torch.int32) + (first - 1), others)


def _on_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows
    copied = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    return copied.copy_(rows)
