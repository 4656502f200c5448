"""The device's side of historical embeddings: slices of a macro-batch, at addresses that never change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from joestar.graph_api.history import HistoryTables
from joestar.stages.history import Slice

HALVES = 2


class DeviceHistory:
    """Slices of historical embeddings beside an arena: two halves, which macro-batches take in turns.

    Row 0 of every table belongs to nobody: nodes that are computed read none, and what is not to be kept is written
    there. Steps write to one half of ``pushed`` while the other one is brought back to the host.

    Args:
        slots: of the arena. widths: of the hidden layers. pulls, pushes: rows of a half. dtype: of the tables.

    Attributes:
        tables: what programs read. pushed: per layer ``[1 + 2 * pushes, width]``; written: bool ``[1 + 2 * pushes]``.
    """

    def __init__(self, slots: int, widths: Sequence[int], pulls: int, pushes: int, dtype: torch.dtype, device):
        self.device = torch.device(device)
        self.pulls, self.pushes = pulls, pushes
        with torch.inference_mode(False), torch.device(self.device):
            place = torch.zeros(slots, dtype=torch.int32)
            self._next = torch.zeros_like(place)
            pulled = [torch.zeros(1 + HALVES * pulls, width, dtype=dtype) for width in widths]
            usable = [torch.zeros(1 + HALVES * pulls, dtype=torch.bool) for _ in widths]
            self.pushed = [torch.zeros(1 + HALVES * pushes, width, dtype=dtype) for width in widths]
            self.written = [torch.zeros(1 + HALVES * pushes, dtype=torch.bool) for _ in widths]
            for flags in usable:
                flags[0] = True
        self.tables = HistoryTables(place, pulled, usable)

    @property
    def tensors(self) -> list[Tensor]:
        """All that it has on the device."""
        tables = self.tables
        return [self._next, tables.place, *tables.pulled, *tables.usable, *self.pushed, *self.written]

    @staticmethod
    def nbytes_of(widths: Sequence[int], pulls: int, pushes: int, dtype: torch.dtype) -> int:
        """Bytes of the device, but for the 8 per slot."""
        size = torch.empty(0, dtype=dtype, device="cpu").element_size()
        return sum(HALVES * (pulls + pushes) * (width * size + 1) for width in widths)

    @torch.no_grad()
    def load(self, half: int, pull_slots: Tensor, push_slots: Tensor, slices: list[Slice]) -> None:
        """Brings a macro-batch's slices into a half that no step to come reads, on the current stream.

        Args:
            pull_slots, push_slots: int32, on the CPU: slots whose rows are read, in the order of the slices, and whose
                rows are kept.
        """
        reads, keeps = 1 + half * self.pulls, 1 + half * self.pushes
        self._next.zero_()
        self._number(pull_slots, reads, 1)
        self._number(push_slots, keeps, -1)
        for layer, given in enumerate(slices):
            rows = slice(reads, reads + len(given.values))
            self.tables.pulled[layer][rows].copy_(given.values, non_blocking=True)
            self.tables.usable[layer][rows].copy_(given.usable, non_blocking=True)
        self.forget(half, push_slots.numel())

    def _number(self, slots: Tensor, first: int, sign: int) -> None:
        if not slots.numel():
            return
        rows = torch.arange(first, first + slots.numel(), dtype=torch.int32, device=self.device) * sign
        self._next.index_copy_(0, slots.to(self.device, torch.int64, non_blocking=True), rows)

    @torch.no_grad()
    def show(self) -> None:
        """What was loaded last is what steps on the current stream read from now on."""
        self.tables.place.copy_(self._next)
        for tensor in (self.tables.place, *self.tables.pulled, *self.tables.usable):
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
    def collected(self, half: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """What was pushed into a half since it was loaded or forgotten, per layer, on the CPU: (which of its ``count``
        nodes, values). Waits for the current stream."""
        first = 1 + half * self.pushes
        found = []
        for values, flags in zip(self.pushed, self.written, strict=True):
            flags = flags[first : first + count]
            which = torch.nonzero(flags).flatten()
            found.append((which.cpu(), _on_host(values.index_select(0, which + first))))
        return found

    @torch.no_grad()
    def forget(self, half: int, count: int) -> None:
        """What was pushed into a half so far is not collected again; on the current stream."""
        for flags in self.written:
            flags[1 + half * self.pushes :][:count].zero_()


def _on_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows
    copied = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    return copied.copy_(rows)
