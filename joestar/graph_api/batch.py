"""What user-defined functions see of edges and nodes, in DGL's style: ``edges.src["h"]``, ``nodes.data["h"]``."""

from collections.abc import Callable, Mapping

from torch import Tensor

from joestar.errors import GraphError


class Rows:
    """Named tensors, one row per edge or node of the batch: looked up when they are first read.

    Args:
        name: how messages call it; given: tensors handed over with the call; kept: those of graph or block.
        look: from a tensor of the nodes (or edges) to its rows in the batch.
    """

    def __init__(self, name: str, given: Mapping | None, kept, look: Callable[[Tensor], Tensor]):
        self.name = name
        self.given = {} if given is None else given
        self.kept = kept
        self.look = look
        self.values: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.values:
            if key not in self.given and key not in self.kept:
                known = ", ".join([*self.given, *self.kept.keys()]) or "nothing"
                raise GraphError(
                    f"{self.name}[{key!r}]: there is no such tensor; there is: {known}. Hand it over with the call "
                    "(src={...}, dst={...}, edge={...}), or assign it to srcdata, dstdata or edata first."
                )
            self.values[key] = self.look(self.given[key] if key in self.given else self.kept[key])
        return self.values[key]

    def __contains__(self, key: str) -> bool:
        return key in self.given or key in self.kept


class EdgeBatch:
    """All edges of a structure, in CSC order.

    Attributes:
        src, dst: node tensors of either end, ``edges.src[name]`` is ``[num_edges, ...]``.
        data: edge tensors ``[num_edges, ...]``.
    """

    def __init__(self, src: Rows, dst: Rows, data: Rows, num_edges):
        self.src = src
        self.dst = dst
        self.data = data
        self.num_edges = num_edges

    def batch_size(self) -> int:
        """Number of edges (a symbolic integer while traced)."""
        return self.num_edges


class NodeBatch:
    """All sources or destinations of a structure; ``nodes.data[name]`` is ``[num_nodes, ...]``."""

    def __init__(self, data: Rows, num_nodes):
        self.data = data
        self.num_nodes = num_nodes

    def batch_size(self) -> int:
        """Number of nodes (a symbolic integer while traced)."""
        return self.num_nodes


def check_result(result, rows, what: str):
    """The result of a user's function, a tensor or a dict of them; raises unless each has one row per edge or node."""
    for value in result.values() if isinstance(result, dict) else (result,):
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
            came = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise GraphError(
                f"the function must return a tensor, or a dict of tensors, with one row for each of the {rows} {what}; "
                f"got {came}."
            )
    return result
