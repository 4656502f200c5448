"""Node and edge tensors of a sampled set, looked up when they are first read."""

from collections.abc import Callable, Mapping

import torch
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

    Attributes:
        values: tensors by name, as far as they were read or added. own: of those that are not the graph's, functions
            that give them: added here, or to what this was made of (``carry``).
    """

    def __init__(self, name: str, table: dict[str, Tensor], ids: Callable[[], Tensor], num_rows):
        self.name = name
        self.table = table
        self.ids = ids
        self.num_rows = num_rows
        self.values: dict[str, Tensor] = {}
        self.own: dict[str, Callable[[], Tensor]] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.values:
            return self.values[key]
        value = self.own[key]() if key in self.own else self._looked_up(key)
        self.values[key] = value
        return value

    def _looked_up(self, key: str) -> Tensor:
        if key not in self.table:
            known = ", ".join(sorted({*self.table, *self.own})) or "nothing"
            raise GraphError(f"{self.name}[{key!r}]: neither graph nor block has such a tensor; there is: {known}.")
        source = source_of(self.table, key)
        return rows_at(self.table[key], self.ids()) if source is None else source.rows(self.ids())

    def __setitem__(self, key: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.num_rows:
            if isinstance(value, Tensor) and torch.compiler.is_compiling():  # sizes are stand-ins
                what = f"{self.name}[{key!r}] needs a tensor whose rows are those of the block or slice it is set in"
                raise GraphError(f"{what}: one of another set may have as many in one batch, and not in the next.")
            came = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise GraphError(f"{self.name}[{key!r}] needs a tensor with {self.num_rows} rows; got {came}.")
        self.values[key] = value
        self.own[key] = lambda: value

    def __contains__(self, key: str) -> bool:
        return key in self.own or key in self.table

    def __iter__(self):
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Names that can be read."""
        return [*self.table, *(key for key in self.own if key not in self.table)]

    def __repr__(self) -> str:
        return f"Gathered({self.name}: {', '.join(self.keys())})"


class OfAllNodes(Mapping):
    """The graph's node tensors, whole, as a slice's sources have them. Read only: a batch writes nothing to the graph.

    Args:
        table: the graph's ``ndata``.
    """

    def __init__(self, table: dict[str, Tensor]):
        self.table = table

    def __getitem__(self, key: str) -> Tensor:
        return self.table[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        raise GraphError(
            f"srcdata[{key!r}] of a slice would be the graph's ndata, of all nodes and every batch: set it in a block "
            f"(block.srcdata[{key!r}], a row per source), or hand it over, pull(message, src={{{key!r}: ...}})."
        )

    def __contains__(self, key: str) -> bool:
        return key in self.table

    def __iter__(self):
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


Move = Callable[[str, Callable[[], Tensor]], Tensor]
"""From the name of a value of edges, and a function that gives it, to its rows in what was made of them."""


def carry(source, made, move: Move):
    """Hands on the tensors of its own that a block or slice has to what is made of it, which has the same nodes.

    Nothing is computed before it is read.

    Args:
        source, made: blocks or slices; move: for values of edges.

    Returns:
        ``made``.
    """
    for name, frame in source._frames.items():
        for key, value in frame.own.items():
            getattr(made, name).own[key] = _moved(move, key, value) if name == "edata" else value
    return made


def _moved(move: Move, key: str, value: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: move(key, value)


def rows_of(positions: Tensor) -> Move:
    """Edges at these positions, int64 ``[n]``."""
    return lambda key, value: rows_at(value(), positions)


def same_rows(key: str, value: Callable[[], Tensor]) -> Tensor:
    """A ``Move`` of all edges, in the same order."""
    return value()
