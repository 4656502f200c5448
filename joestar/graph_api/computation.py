"""Message passing shared by ``Graph`` and ``Block`` (thesis table 5.2, "Graph Computation").

A class that mixes this in has ``indptr``, ``indices``, ``num_src`` and ``num_dst``.
"""

import torch
from torch import Tensor

from joestar import ops  # noqa: F401  (registers torch.ops.joestar)
from joestar.errors import GraphError
from joestar.graph_api.fn import Message

REDUCES = ("sum", "mean", "max", "min")


class Computation:
    """Edge-wise and node-wise computation over a CSC structure."""

    def in_degrees(self) -> Tensor:
        """Edges entering every destination, int64 ``[num_dst]``."""
        return self.indptr[1:] - self.indptr[:-1]

    def out_degrees(self) -> Tensor:
        """Edges leaving every source, int64 ``[num_src]``."""
        return torch.ops.joestar.out_degrees(self.indptr, self.indices, self.num_src)

    def pull(self, message: Message, reduce: str) -> Tensor:
        """Each destination aggregates the messages of its in-edges: SpMM, or SDDMM and a segmented reduction.

        Args:
            message: from ``joestar.fn``; operands ``[rows, ...]``.
            reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; a destination without edges gets 0.

        Returns:
            ``[num_dst, ...]`` in the operand's dtype.
        """
        if reduce not in REDUCES:
            raise GraphError(f"pull: reduce must be one of {', '.join(REDUCES)}; got {reduce!r}.")
        spmm = torch.ops.joestar.spmm
        if message.op == "copy" and message.lhs_side == "u":
            return spmm(self.indptr, self.indices, self._rows(message.lhs, "u"), None, reduce)
        if message.op == "mul" and message.rhs_side == "e" and _is_weight(message.lhs, message.rhs):
            weight = self._rows(message.rhs, "e")
            return spmm(self.indptr, self.indices, self._rows(message.lhs, "u"), weight, reduce)
        values = self.apply_edges(message)
        order = torch.arange(values.shape[0], dtype=self.indices.dtype, device=values.device)
        return spmm(self.indptr, order, values, None, reduce)

    def apply_edges(self, message: Message) -> Tensor:
        """Value of the message on every edge, ``[E, ...]`` in CSC order (SDDMM)."""
        sddmm = torch.ops.joestar.sddmm
        lhs = self._rows(message.lhs, message.lhs_side)
        if message.rhs is None:
            return lhs if message.lhs_side == "e" else sddmm(self.indptr, self.indices, lhs, None, "copy_lhs")
        rhs = self._rows(message.rhs, message.rhs_side)
        if message.rhs_side == "v":
            if lhs.shape[1:] != rhs.shape[1:]:
                shapes = f"{list(lhs.shape)} and {list(rhs.shape)}"
                raise GraphError(f"u_{message.op}_v: operands need the same trailing shape; got {shapes}.")
            return sddmm(self.indptr, self.indices, lhs, rhs, message.op)
        source = sddmm(self.indptr, self.indices, lhs, None, "copy_lhs")
        if not _fits(rhs.shape[1:], source.shape[1:]):
            raise GraphError(
                f"u_{message.op}_e: edge values must be [E], [E, H] or shaped like the messages {list(source.shape)}; "
                f"got {list(rhs.shape)}."
            )
        rhs = rhs.reshape(rhs.shape + (1,) * (source.dim() - rhs.dim()))
        return source * rhs if message.op == "mul" else source + rhs

    def edge_softmax(self, scores: Tensor) -> Tensor:
        """Softmax of edge scores ``[E]`` or ``[E, H]`` over the in-edges of each destination."""
        return torch.ops.joestar.edge_softmax(self.indptr, self._rows(scores, "e"))

    def _rows(self, operand: Tensor, side: str) -> Tensor:
        expected = {"u": self.num_src, "v": self.num_dst, "e": self.indices.shape[0]}[side]
        if operand.shape[0] != expected:
            what = {"u": "sources", "v": "destinations", "e": "edges"}[side]
            raise GraphError(
                f"a message operand over {what} needs {expected} rows; got {operand.shape[0]} "
                f"(shape {list(operand.shape)}). Slice x[:block.num_dst] for destination rows."
            )
        return operand


def _fits(edge: torch.Size, message: torch.Size) -> bool:
    """Whether edge values of this trailing shape broadcast over messages of that one, leading dimensions first."""
    return len(edge) <= len(message) and all(e in (1, m) for e, m in zip(edge, message, strict=False))


def _is_weight(x: Tensor, e: Tensor) -> bool:
    """True if ``e`` scales whole rows ``[E]`` or whole heads ``[E, H]``."""
    return e.dim() == 1 or (x.dim() == 3 and e.dim() == 2 and e.shape[1] == x.shape[1])
