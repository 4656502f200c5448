"""Message passing shared by graphs, blocks and slices (thesis table 5.2, "Graph Computation").

A class that mixes this in has ``indptr``, ``indices``, ``num_src``, ``num_dst``, ``srcdata``, ``dstdata``, ``edata``.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from joestar import ops  # noqa: F401  (registers torch.ops.joestar)
from joestar.errors import GraphError
from joestar.graph_api.batch import EdgeBatch, NodeBatch, Rows, check_result
from joestar.graph_api.fn import Message

REDUCES = ("sum", "mean", "max", "min")
MessageFunction = Message | Callable[[EdgeBatch], Tensor | dict[str, Tensor]]


class Computation:
    """Edge-wise and node-wise computation over a CSC structure.

    A message is one of ``joestar.fn``, or a function of an ``EdgeBatch`` that returns a tensor ``[num_edges, ...]`` or
    a dict of them; it may read tensors handed over with the call (``src={"h": h}``), and what graph or block hold.

    Attributes:
        history: of the hidden layer whose rows are the destinations, in training over partitions (``nn.historical``).
    """

    history = None

    def in_degrees(self) -> Tensor:
        """Edges entering every destination, int64 ``[num_dst]``."""
        return self.indptr[1:] - self.indptr[:-1]

    def out_degrees(self) -> Tensor:
        """Edges leaving every source, int64 ``[num_src]``."""
        return torch.ops.joestar.out_degrees(self.indptr, self.indices, self.num_src)

    # --- aggregation ---

    def pull(
        self, message: MessageFunction, reduce: str, *, src: Mapping | None = None, dst: Mapping | None = None,
        edge: Mapping | None = None,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """Each destination aggregates the messages of its in-edges: SpMM, or SDDMM and a segmented reduction.

        Args:
            message: from ``joestar.fn`` (operands ``[rows, ...]``), or a function of an ``EdgeBatch``.
            reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; a destination without edges gets 0.
            src, dst, edge: tensors by name for the function, one row per source, destination and edge.

        Returns:
            ``[num_dst, ...]`` in the message's dtype; a dict of them if the function returns a dict.

        Raises:
            GraphError: for an unknown reduction, messages that are no floating-point numbers, or operands with the
                wrong number of rows.
        """
        if reduce not in REDUCES:
            raise GraphError(f"pull: reduce must be one of {', '.join(REDUCES)}; got {reduce!r}.")
        if not isinstance(message, Message):
            values = self.apply_edges(message, src=src, dst=dst, edge=edge)
            if isinstance(values, dict):
                return {name: self._aggregate(value, reduce) for name, value in values.items()}
            return self._aggregate(values, reduce)
        x, weight = _as_product(message)
        if x is not None:
            weight = None if weight is None else self._rows(weight, "e")
            _check_floating(x)
            return self._spmm(self._rows(x, "u"), weight, reduce)
        return self._aggregate(self.apply_edges(message), reduce)

    def push(
        self, message: MessageFunction, reduce: str, *, src: Mapping | None = None, dst: Mapping | None = None,
        edge: Mapping | None = None,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """Each source sends its message along its out-edges; destinations aggregate what reaches them.

        Over all edges that is ``pull`` seen from the other end, as in DGL: same arguments, same result. Let only some
        sources send with ``graph[srcs, :].push(...)``; aggregate at the sources, against the edges (what thesis table
        5.2 calls pull), with ``reverse().pull(...)``.
        """
        return self.pull(message, reduce, src=src, dst=dst, edge=edge)

    def _aggregate(self, values: Tensor, reduce: str) -> Tensor:
        _check_floating(values)
        return self._reduce(values, reduce)

    def _reduce(self, values: Tensor, reduce: str) -> Tensor:
        """Per destination, over the values of its edges."""
        order = torch.arange(values.shape[0], dtype=self.indices.dtype, device=values.device)
        return torch.ops.joestar.spmm(self.indptr, order, values, None, reduce)

    def _spmm(self, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
        return torch.ops.joestar.spmm(self.indptr, self.indices, x, weight, reduce)

    # --- per edge, per node ---

    def apply_edges(
        self, message: MessageFunction, *, src: Mapping | None = None, dst: Mapping | None = None,
        edge: Mapping | None = None,
    ) -> Tensor | dict[str, Tensor]:  # fmt: skip
        """Value of the message on every edge, ``[num_edges, ...]`` in CSC order (SDDMM); arguments as in ``pull``."""
        if not isinstance(message, Message):
            return check_result(message(self._edge_batch(src, dst, edge)), self.indices.shape[0], "edges")
        if src is not None or dst is not None or edge is not None:
            raise GraphError(
                f"fn.{message.name} holds its operands; src, dst and edge are for functions of an EdgeBatch."
            )
        lhs = self._rows(message.lhs, message.lhs_side)
        if message.rhs is None:
            return self._on_edges(lhs, message.lhs_side)
        rhs = self._rows(message.rhs, message.rhs_side)
        if message.lhs_side != "e" and message.rhs_side != "e":
            return self._of_both_ends(message, lhs, rhs)
        left, right = self._on_edges(lhs, message.lhs_side), self._on_edges(rhs, message.rhs_side)
        if message.lhs_side == "e":
            left = _like_messages(left, right, message)
        else:
            right = _like_messages(right, left, message)
        return _OPS[message.op](left, right)

    def _of_both_ends(self, message: Message, lhs: Tensor, rhs: Tensor) -> Tensor:
        for operand in (lhs, rhs):
            _check_floating(operand, f"{message.name}: operands of both ends must be floating point")
        if lhs.shape[1:] != rhs.shape[1:]:
            shapes = f"{list(lhs.shape)} and {list(rhs.shape)}"
            raise GraphError(f"{message.name}: operands need the same trailing shape; got {shapes}.")
        op = message.op
        if message.lhs_side == "u":
            return self._sddmm(lhs, rhs, op)
        if op == "div":
            return self._on_edges(lhs, "v") / self._on_edges(rhs, "u")
        value = self._sddmm(rhs, lhs, op)
        return -value if op == "sub" else value

    def _sddmm(self, lhs: Tensor | None, rhs: Tensor | None, op: str) -> Tensor:
        """``op`` of source rows and destination rows on every edge."""
        return torch.ops.joestar.sddmm(self.indptr, self.indices, lhs, rhs, op)

    def _on_edges(self, values: Tensor, side: str) -> Tensor:
        """Rows of the sources (``u``), destinations (``v``) or edges (``e``) for every edge."""
        if side == "e":
            return values
        if values.dtype.is_floating_point:
            return self._sddmm(values, None, "copy_lhs") if side == "u" else self._sddmm(None, values, "copy_rhs")
        return torch.index_select(values, 0, self._ends(side))

    def _ends(self, side: str) -> Tensor:
        """Source (``u``) or destination (``v``) of every edge, as a local id."""
        if side == "u":
            return self.indices
        return torch.ops.joestar.edge_dst(self.indptr, self.indices.shape[0], self.indices)

    def apply_nodes(
        self,
        function: Callable[[NodeBatch], Tensor | dict[str, Tensor]],
        side: str = "dst",
        data: Mapping | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """What the function makes of the nodes: a tensor ``[num_nodes, ...]``, or a dict of them. Nothing is stored.

        Args:
            side: ``"dst"`` or ``"src"``; on a graph, both are all nodes.
            data: tensors by name, besides those of graph or block.
        """
        check_side(side, "apply_nodes")
        frame, rows = (self.srcdata, self.num_src) if side == "src" else (self.dstdata, self.num_dst)
        given = {name: self._rows(value, "u" if side == "src" else "v") for name, value in (data or {}).items()}
        return check_result(function(NodeBatch(Rows("nodes.data", given, frame, _same), rows)), rows, "nodes")

    def edge_softmax(self, scores: Tensor) -> Tensor:
        """Softmax of edge scores ``[E]`` or ``[E, H]``, floating point, over the in-edges of each destination."""
        check_scores(scores)
        return torch.ops.joestar.edge_softmax(self.indptr, self._rows(scores, "e"))

    def _edge_batch(self, src: Mapping | None, dst: Mapping | None, edge: Mapping | None) -> EdgeBatch:
        sources = Rows("edges.src", src, self.srcdata, lambda x: self._on_edges(self._rows(x, "u"), "u"))
        destinations = Rows("edges.dst", dst, self.dstdata, lambda x: self._on_edges(self._rows(x, "v"), "v"))
        return EdgeBatch(
            sources, destinations, Rows("edges.data", edge, self.edata, lambda x: self._rows(x, "e")),
            self.indices.shape[0],
        )  # fmt: skip

    def _rows(self, operand: Tensor, side: str) -> Tensor:
        expected = {"u": self.num_src, "v": self.num_dst, "e": self.indices.shape[0]}[side]
        if operand.shape[0] != expected:
            what = {"u": "sources", "v": "destinations", "e": "edges"}[side]
            raise GraphError(
                f"a message operand over {what} needs {expected} rows; got {operand.shape[0]} "
                f"(shape {list(operand.shape)}). Slice x[:block.num_dst] for destination rows."
            )
        return operand


_OPS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "dot": lambda left, right: (left * right).sum(-1),
}


def _same(x: Tensor) -> Tensor:
    return x


def _as_product(message: Message) -> tuple[Tensor | None, Tensor | None]:
    """(source rows, weights or ``None``) of a message that SpMM computes; (``None``, ``None``) for others."""
    if message.rhs is None:
        return (message.lhs, None) if message.lhs_side == "u" else (None, None)
    if message.op == "mul":
        for x, w, sides in ((message.lhs, message.rhs, "ue"), (message.rhs, message.lhs, "eu")):
            if message.lhs_side + message.rhs_side == sides and _is_weight(x, w):
                return x, w
    return None, None


def _like_messages(edge: Tensor, message: Tensor, of: Message) -> Tensor:
    """Edge values with trailing dimensions of 1, so that they broadcast over node rows, leading dimensions first."""
    shapes = edge.shape[1:], message.shape[1:]
    fits = shapes[0] == shapes[1] if of.op == "dot" else _fits(*shapes)
    if not fits:
        raise GraphError(
            f"{of.name}: edge values must be [E], [E, H] or shaped like the messages {list(message.shape)}"
            f"{', which dot needs' if of.op == 'dot' else ''}; got {list(edge.shape)}."
        )
    return edge.reshape(edge.shape + (1,) * (message.dim() - edge.dim()))


def _fits(edge: torch.Size, message: torch.Size) -> bool:
    """Whether edge values of this trailing shape broadcast over messages of that one, leading dimensions first."""
    return len(edge) <= len(message) and all(e in (1, m) for e, m in zip(edge, message, strict=False))


def _is_weight(x: Tensor, e: Tensor) -> bool:
    """True if ``e`` scales whole rows ``[E]``, whole heads ``[E, H]``, or for each head the row that heads share."""
    return e.dim() == 1 or (x.dim() == 3 and e.dim() == 2 and x.shape[1] in (1, e.shape[1]))


def check_side(side: str, call: str) -> None:
    """Raises ``GraphError`` for sides other than ``"src"`` and ``"dst"``."""
    if side not in ("src", "dst"):
        raise GraphError(f'{call}: side must be "src" or "dst"; got {side!r}.')


def check_scores(scores: Tensor) -> None:
    """Raises ``GraphError`` for scores that are no floating-point numbers."""
    _check_floating(scores, "edge_softmax: scores must be floating point")


def _check_floating(values: Tensor, wanted: str = "pull: messages must be floating point to be aggregated") -> None:
    if not values.dtype.is_floating_point:
        raise GraphError(f"{wanted}; got {values.dtype}. Use .float() or .double().")
