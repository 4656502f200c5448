"""Node and edge tensors of a sampled set, looked up when they are first read."""

from collections.abc import Callable

from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.row_source import source_of
from joestar.ops.padding.rows_at import rows_at


class Gathered:
    """Rows of a graph's tensors for the nodes or edges of a block; tensors of the block's own can be added.

    ``block.edata["w"]`` gathers ``graph.edata["w"]`` of the sampled edges once; what nobody reads costs nothing.
    ``block.srcdata["h"] = h`` keeps a tensor with one row per source, for messages to read.

    Args:
        name: how messages call it (``edata``, ``srcdata``, ``dstdata``).
        table: the graph's tensors; ids: gives the rows to look up, integers ``[num_rows]``.
        num_rows: rows of every tensor (a symbolic integer while traced).
    """

    def __init__(self, name: str, table: dict[str, Tensor], ids: Callable[[], Tensor], num_rows):
        self.name = name
        self.table = table
        self.ids = ids
        self.num_rows = num_rows
        self.values: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.values:
            return self.values[key]
        if key not in self.table:
            known = ", ".join(sorted({*self.table, *self.values})) or "nothing"
            raise GraphError(f"{self.name}[{key!r}]: neither graph nor block has such a tensor; there is: {known}.")
        source = source_of(self.table, key)
        value = rows_at(self.table[key], self.ids()) if source is None else source.rows(self.ids())
        self.values[key] = value
        return value

    def __setitem__(self, key: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.num_rows:
            came = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise GraphError(f"{self.name}[{key!r}] needs a tensor with {self.num_rows} rows; got {came}.")
        self.values[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.values or key in self.table

    def __iter__(self):
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Names that can be read."""
        return [*self.table, *(key for key in self.values if key not in self.table)]

    def __repr__(self) -> str:
        return f"Gathered({self.name}: {', '.join(self.keys())})"
