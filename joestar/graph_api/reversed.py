"""Blocks and slices seen against their edges: aggregation at the sources, without converting anything."""

import torch
from torch import Tensor

from joestar.graph_api import fn
from joestar.graph_api.computation import Computation, check_scores
from joestar.graph_api.fn import Message

_OTHER = {"u": "v", "v": "u", "e": "e"}


class Reversed(Computation):
    """The structure with every edge turned around: sources are ``base.dsts``, destinations ``base.srcs``.

    Edges keep the order of ``base``, so edge tensors fit both. Only computation: the CSC of ``base`` is read as the
    CSR of this one, and sums are scattered (thesis 5.3.3: SpMM in the format that is there).

    Attributes:
        base: the block or slice.
    """

    def __init__(self, base: Computation):
        self.base = base
        self.indices = base.indices

    @property
    def num_src(self) -> int:
        """Number of sources: the destinations of ``base``."""
        return self.base.num_dst

    @property
    def num_dst(self) -> int:
        """Number of destinations: the sources of ``base``."""
        return self.base.num_src

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.base.num_edges

    @property
    def srcdata(self):
        """Node tensors of the sources."""
        return self.base.dstdata

    @property
    def dstdata(self):
        """Node tensors of the destinations."""
        return self.base.srcdata

    @property
    def edata(self):
        """Edge tensors, in the order of ``base``."""
        return self.base.edata

    def reverse(self) -> Computation:
        """``base``."""
        return self.base

    def in_degrees(self) -> Tensor:
        """Edges entering every destination, int64 ``[num_dst]``."""
        return self.base.out_degrees()

    def out_degrees(self) -> Tensor:
        """Edges leaving every source, int64 ``[num_src]``."""
        return self.base.in_degrees()

    def edge_softmax(self, scores: Tensor) -> Tensor:
        """Softmax of edge scores ``[E]`` or ``[E, H]``, floating point, over the edges of each destination (source of
        ``base``)."""
        check_scores(scores)
        top = self.pull(fn.copy_e(scores.detach()), "max")
        power = torch.exp(scores - self._on_edges(top, "v"))
        return power / self._on_edges(self.pull(fn.copy_e(power), "sum"), "v")

    def _reduce(self, values: Tensor, reduce: str) -> Tensor:
        edges = torch.arange(values.shape[0] + 1, device=values.device)
        each = torch.minimum(edges, self.base.indptr.amax())  # a row per edge; none behind the last valid one
        return torch.ops.joestar.spmm_csr(each, self.indices, values, None, self.num_dst, reduce)

    def _spmm(self, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
        if weight is not None and weight.dim() == 2 and x.shape[1] != weight.shape[1]:
            x = x.expand(-1, weight.shape[1], -1)  # a row for all heads, which only the gather reads as one
        return torch.ops.joestar.spmm_csr(self.base.indptr, self.indices, x, weight, self.num_dst, reduce)

    def _sddmm(self, lhs: Tensor, rhs: Tensor, op: str) -> Tensor:
        return self.base._of_both_ends(Message(op, lhs, "v", rhs, "u"), lhs, rhs)

    def _on_edges(self, values: Tensor, side: str) -> Tensor:
        return self.base._on_edges(values, _OTHER[side])

    def __repr__(self) -> str:
        return f"Reversed({self.base!r})"
