"""Node data that compiled programs must not read in place: what ``graph.ndata`` keeps beside the tensor."""

import torch
from torch import Tensor


class RowSource:
    """A table of node rows, and how a program gathers from it (``joestar.store.FeatureStore``).

    ``graph.ndata["x"] = source`` puts ``source.table`` there and remembers the source: gathering goes through
    ``rows``, so that nothing is fused that would read far memory in any order.

    Attributes:
        table: all rows, ``[N, ...]``, as a tensor of the device that gathers.
        cache: hot rows on the device ``[H, ...]``, or ``None``; slot_of: int32 ``[N]``, row of the cache or -1.
        in_place: whether the table is memory of the device, and needs none of this.
    """

    table: Tensor
    cache: Tensor | None = None
    slot_of: Tensor | None = None
    in_place = False

    @property
    def shape(self) -> torch.Size:
        """Of the whole table: ``[N, ...]``."""
        return self.table.shape

    @property
    def dtype(self) -> torch.dtype:
        """In which rows are stored."""
        return self.table.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.table[:1].numel() * self.table.element_size()

    def rows(self, ids: Tensor) -> Tensor:
        """``table[ids]``, ``[n, ...]``; rows of 0 if the table is empty: ids are then padding only."""
        if self.table.shape[0] == 0:
            return self.table.new_zeros((ids.shape[0], *self.table.shape[1:]))
        return torch.ops.joestar.gather_rows(self.table, self.cache, self.slot_of, ids)

    def refresh(self) -> None:
        """Renews copies of rows, if the table was written since they were made."""

    def written(self) -> tuple:
        """Changes with every write to the rows that PyTorch counts, and to copies of them."""
        return ()

    def to(self, device) -> "RowSource":
        """The same rows for programs of another device."""
        raise NotImplementedError


def source_of(table, key: str) -> RowSource | None:
    """The source that ``table[key]`` was assigned from, if it was one."""
    return getattr(table, "sources", {}).get(key)


def device_of(table, key: str) -> torch.device:
    """Where programs read ``table[key]``: for rows of a source that is not the tensor's own device."""
    tensor, source = table[key], source_of(table, key)
    return getattr(source, "device", tensor.device) if tensor.is_meta else tensor.device
