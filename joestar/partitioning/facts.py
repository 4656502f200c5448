"""What a partitioning is worth: edges cut, balance, label skew, halo nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.kernels.cpu_partition import part_facts
from joestar.partitioning.labels import training_labels


@dataclass(frozen=True)
class PartitionFacts:
    """Facts of one assignment of nodes to parts.

    Attributes:
        edges: of the graph, as stored (both directions of an undirected edge count).
        cut: edges whose ends lie in different parts.
        balance: nodes of the largest part over the mean.
        skew: how far the training labels of a part are from those of all training nodes: total-variation distance
            between the two distributions, averaged over parts weighted by their training nodes; 0 is alike, 1 disjoint.
            ``None`` without training nodes.
        surplus: share of the training nodes that a part has above its even share of their label, rounded up to whole
            nodes: what GAP balances. ``None`` without training nodes.
        sizes: int64 ``[parts]``: nodes of every part.
        halo: int64 ``[parts]``: different nodes of other parts that have an edge into the part.
    """

    edges: int
    cut: int
    balance: float
    skew: float | None
    surplus: float | None
    sizes: Tensor
    halo: Tensor

    @property
    def cut_share(self) -> float:
        """Share of the edges that are cut."""
        return self.cut / self.edges if self.edges else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain numbers: edges, cut, cut_share, balance, skew, surplus, and the least, mean and largest halo."""
        halo = self.halo.to(torch.float64)
        return {
            "edges": self.edges,
            "cut": self.cut,
            "cut_share": self.cut_share,
            "balance": self.balance,
            "skew": self.skew,
            "surplus": self.surplus,
            "halo_min": int(self.halo.min()),
            "halo_mean": float(halo.mean()),
            "halo_max": int(self.halo.max()),
        }


def facts_of(graph: Graph, assignment: Tensor, parts: int) -> PartitionFacts:
    """Facts of ``assignment``, int32 ``[num_nodes]`` in ``[0, parts)``: two passes over the edges.

    Raises:
        ValueError: the assignment has another shape, dtype or range.
    """
    cut, halo = part_facts(graph.indptr, graph.indices, assignment, parts)
    sizes = torch.bincount(assignment, minlength=parts)
    balance = float(sizes.max()) * parts / graph.num_nodes
    counts = label_counts(graph, assignment, parts)
    skew, surplus = (None, None) if counts is None else (skew_of(counts), surplus_of(counts))
    return PartitionFacts(graph.num_edges, int(cut.sum()), balance, skew, surplus, sizes, halo)


def label_counts(graph: Graph, assignment: Tensor, parts: int) -> Tensor | None:
    """Training nodes of every part by class, float64 ``[parts, classes]``; ``None`` without training nodes."""
    labels, classes = training_labels(graph)
    if labels is None or classes == 0:
        return None
    known = torch.nonzero(labels >= 0).flatten()
    cells = assignment[known].to(torch.int64) * classes + labels[known]
    return torch.bincount(cells, minlength=parts * classes).view(parts, classes).to(torch.float64)


def skew_of(counts: Tensor) -> float:
    """``PartitionFacts.skew`` of training nodes ``[parts, classes]``."""
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    return float((counts - expected).abs().sum() / 2 / counts.sum())


def surplus_of(counts: Tensor) -> float:
    """``PartitionFacts.surplus`` of training nodes ``[parts, classes]``."""
    even = torch.ceil(counts.sum(0) / counts.shape[0])
    return float((counts - even).clamp(min=0).sum() / counts.sum())
