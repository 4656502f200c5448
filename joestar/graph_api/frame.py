"""Named tensors with one row per node or edge."""

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import plain, shortened, to_tensor
from joestar.graph_api.row_source import RowSource


class Frame(dict):
    """A dict of tensors that refuses a tensor with the wrong number of rows; arrays and lists become tensors.

    Args:
        name: how messages call it (``ndata`` or ``edata``).
        what: what a row is (``nodes`` or ``edges``).
        num_rows: rows that every tensor must have.
        data: initial content, a mapping or ``None``.
    """

    def __init__(self, name: str, what: str, num_rows: int, data=None):
        super().__init__()
        self.sources: dict[str, RowSource] = {}
        self.name = name
        self.what = what
        self.num_rows = num_rows
        for key, value in dict(data or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Tensor | RowSource) -> None:
        source = value if isinstance(value, RowSource) else None
        if source is not None:
            value = source.table
        name = f"{self.name}[{key!r}]"
        value = plain(value, name) if isinstance(value, Tensor) else shortened(to_tensor(value, name), key, name)
        if value.layout != torch.strided:
            raise GraphError(
                f"{self.name}[{key!r}] is a sparse tensor ({value.layout}), whose rows cannot be gathered: give "
                "value.to_dense()."
            )
        if value.dim() == 0 or value.shape[0] != self.num_rows:
            raise GraphError(
                f"{self.name}[{key!r}] needs one row per entry of the graph's {self.num_rows} {self.what}; "
                f"got shape {list(value.shape)}."
            )
        super().__setitem__(key, value)
        self.sources.pop(key, None)
        if source is not None and not source.in_place:
            self.sources[key] = source

    def copy(self) -> "Frame":
        """Another frame of the same tensors: what is set in one is not in the other."""
        found = Frame(self.name, self.what, self.num_rows)
        dict.update(found, self)
        found.sources = dict(self.sources)
        return found

    def refresh(self) -> None:
        """Renews what sources have copied of tables that were written since."""
        for source in self.sources.values():
            source.refresh()

    def update(self, *args, **kwargs) -> None:
        """As ``dict.update``, every value checked."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other) -> "Frame":
        self.update(other)
        return self

    def setdefault(self, key: str, default: Tensor) -> Tensor:
        """As ``dict.setdefault``, the value checked."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce__(self):
        """Pickles as a call: unpickled item by item, a dict subclass would be filled before it knows its rows."""
        return Frame, (self.name, self.what, self.num_rows, {**self, **self.sources})
