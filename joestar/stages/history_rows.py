"""Which nodes get a row in the tables of historical embeddings, and where it is (thesis 5.2.2)."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.kernels.checks import require
from joestar.kernels.cpu_stages import fresh
from joestar.kernels.cpu_store import marked_rows
from joestar.stages.exchanged import Marked
from joestar.stages.hubs import row_pieces
from joestar.store.fill import host_gather

EDGES_AT_ONCE = 1 << 25


def boundary_nodes(graph: Graph, assignment: Tensor) -> Tensor:
    """Nodes with an edge into another part, ascending, in the graph's id dtype: all that can be in a halo."""
    marked = torch.zeros(graph.num_nodes, dtype=torch.bool, device="cpu")
    for first, last in row_pieces(graph.indptr, EDGES_AT_ONCE):
        degrees = graph.indptr[first : last + 1].diff()
        sources = graph.indices[int(graph.indptr[first]) : int(graph.indptr[last])].to(torch.int64)
        marked[sources[assignment[sources] != assignment[first:last].repeat_interleave(degrees)]] = True
    return torch.nonzero(marked).flatten().to(graph.indices.dtype)


def halo_within(graph: Graph, assignment: Tensor, seeds: Tensor, hops: int) -> list[Tensor]:
    """For 1, 2, ... ``hops``: the nodes that so many hops from ``seeds`` may find in a halo, as ``boundary_nodes``.

    A path to one may go through any nodes, whose parts may be of the same macro-batch; its last edge is from another
    part. Each node's in-edges are read once.
    """
    seen = torch.zeros(graph.num_nodes, dtype=torch.bool, device="cpu")
    marked = torch.zeros_like(seen)
    seen[seeds.to(torch.int64)] = True
    border, found = torch.nonzero(seen).flatten(), []
    for _ in range(hops):
        reached = torch.zeros_like(seen)
        for sources, owners in in_edges(graph, border):
            marked[sources[assignment[sources] != assignment[owners]]] = True
            reached[sources] = True
        border = torch.nonzero(reached & ~seen).flatten()
        seen |= reached
        found.append(torch.nonzero(marked).flatten().to(graph.indices.dtype))
    return found


def in_edges(graph: Graph, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(sources, destinations), int64, of the in-edges of ``nodes``, int64: many at a time."""
    starts = graph.indptr[nodes].to(torch.int64)
    degrees = graph.indptr[nodes + 1] - starts
    ends = torch.zeros(nodes.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(degrees, 0, out=ends[1:])
    for first, last in row_pieces(ends, EDGES_AT_ONCE):
        count = degrees[first:last]
        before = (starts[first:last] - ends[first:last]).repeat_interleave(count)
        at = torch.arange(int(ends[first]), int(ends[last]), device="cpu") + before
        yield graph.indices[at].to(torch.int64), nodes[first:last].repeat_interleave(count)


class HistoryRows:
    """The row of every node, for each of some layers: that of its place among those which have one.

    Attributes:
        counts: rows per layer; tables: per layer int32 ``[num_nodes]``, -1 where there is none; ``None``: every node's
            own number. Layers of the same nodes have one table.

    Args:
        nodes: ids of those that get a row: per layer, or of all layers; ``None``: all of them.

    Raises:
        ConfigError: what are no ids of nodes, or one stands twice.
    """

    def __init__(self, num_nodes: int, layers: int, nodes: Tensor | Sequence[Tensor] | None):
        each = [nodes] * layers if nodes is None or isinstance(nodes, Tensor) else list(nodes)
        if len(each) != layers:
            raise ConfigError(f"history: expected nodes with a row for {layers} layers, got {len(each)}.")
        made: dict[int, Tensor | None] = {}
        for given in each:
            if id(given) not in made:
                made[id(given)] = None if given is None else _row_table(given, num_nodes)
        self.num_nodes = num_nodes
        self.tables = [made[id(given)] for given in each]
        self.counts = [num_nodes if given is None else given.shape[0] for given in each]
        self._digests: list[str] | None = None

    def has_row(self, layer: int, ids: Tensor) -> Tensor:
        """bool ``[m]``: which nodes have a row in a layer's table."""
        return self.find(layer, ids)[1]

    def find(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows ``[m]`` in a layer's table, 0 where there is none; bool ``[m]``: whether there is one)."""
        table = self.tables[layer]
        if table is None:
            return ids, torch.ones(ids.shape[0], dtype=torch.bool, device="cpu")
        rows = host_gather(table, ids)
        known = rows >= 0
        return rows.clamp_(min=0), known

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in {id(table): table for table in self.tables}.values() if table is not None)

    @property
    def digests(self) -> list[str]:
        """Of the nodes of every layer, in the order of their rows."""
        if self._digests is None:
            found = {id(table): _digest(table, self.num_nodes) for table in self.tables}
            self._digests = [found[id(table)] for table in self.tables]
        return self._digests


class MarkedRows:
    """The marked nodes of a macro-batch, and where their rows are in the tables of all layers: found once for all that
    is asked of them.

    Attributes:
        counts: nodes with a row, per layer.

    Args:
        ids: of the local nodes ``[n]``. marks: bool ``[n]``.
        tables: of every layer, as ``HistoryRows.tables``; or which host has a row, as int16.
        placed: whether nodes without a row in any layer are left out.
    """

    def __init__(self, ids: Tensor, marks: Tensor, tables: Sequence[Tensor | None], placed: bool = False):
        self._ids = ids.contiguous()
        self._found = marked_rows(self._ids, marks, tables, placed)
        self.counts = list(self._found.counts)

    def at(self, slots: Tensor) -> tuple[Marked, list[Tensor], list[Tensor]]:
        """(where they are on a device, by the slot of every local node, int32 ``[n]``; ids of those with a row, and
        what the tables have for them, per layer)."""
        right = slots.shape == self._ids.shape and slots.dtype == torch.int32 and slots.is_contiguous()
        require(right, f"slots int32 [{self._ids.numel()}]", f"{slots.dtype} {list(slots.shape)}")
        found, count = self._found, self._found.count
        marked = Marked(fresh(count, torch.int32), [fresh(count, torch.bool) for _ in self.counts])
        ids = [fresh(number, self._ids.dtype) for number in self.counts]
        places = [fresh(number, torch.int32) for number in self.counts]
        found.write(slots, marked.slots)
        for layer, (flags, *given) in enumerate(zip(marked.layers, ids, places, strict=True)):
            found.write_layer(layer, self._ids, flags.view(torch.uint8), *given)
        return marked, ids, places


def _digest(table: Tensor | None, num_nodes: int) -> str:
    found = hashlib.blake2b(digest_size=16)
    if table is None or bool((table == torch.arange(num_nodes, dtype=torch.int32, device="cpu")).all()):
        found.update(f"all {num_nodes}".encode())  # however they came to have a row each
    else:
        found.update(table.numpy())
    return found.hexdigest()


def _row_table(nodes: Tensor, num_nodes: int) -> Tensor:
    """int32 ``[num_nodes]``: the row of every node, -1 without one."""
    nodes = nodes.to(torch.int64)
    if nodes.dim() != 1 or (nodes.numel() and not (int(nodes.min()) >= 0 and int(nodes.max()) < num_nodes)):
        raise ConfigError(f"history: expected ids of nodes [n] below {num_nodes:,}; got others.")
    table = fresh(num_nodes, torch.int32).fill_(-1)
    table[nodes] = torch.arange(nodes.shape[0], dtype=torch.int32, device="cpu")
    if int((table >= 0).sum()) != nodes.shape[0]:
        raise ConfigError("history: a node stands twice among those that get a row.")
    return table
