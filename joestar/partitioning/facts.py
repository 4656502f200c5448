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
        least_skew: the least skew that parts with as many training nodes each can have: with few of them per part even
            the best choice of whole nodes is far from the distribution of all. ``None`` without training nodes.
        excess: how much more often two training nodes of a part are of one label than two of the graph, over what it is
            in parts of one label each: 0 by chance whatever the size of the parts, 1 disjoint, below 0 more mixed than
            by chance. ``None`` where no part has two training nodes, or all are of one label.
        surplus: share of the training nodes that a part has above its even share of their label, rounded up to whole
            nodes: what GAP balances. ``None`` without training nodes.
        sizes: int64 ``[parts]``: nodes of every part.
        halo: int64 ``[parts]``: different nodes of other parts that have an edge into the part.
    """

    edges: int
    cut: int
    balance: float
    skew: float | None
    least_skew: float | None
    excess: float | None
    surplus: float | None
    sizes: Tensor
    halo: Tensor

    @property
    def cut_share(self) -> float:
        """Share of the edges that are cut."""
        return self.cut / self.edges if self.edges else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain numbers: all facts, ``cut_share``, and in place of sizes and halo the least, mean and largest halo."""
        halo = self.halo.to(torch.float64)
        return {
            "edges": self.edges,
            "cut": self.cut,
            "cut_share": self.cut_share,
            "balance": self.balance,
            "skew": self.skew,
            "least_skew": self.least_skew,
            "excess": self.excess,
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
    of_labels = [None if counts is None else fact(counts) for fact in (skew_of, least_skew_of, excess_of, surplus_of)]
    return PartitionFacts(graph.num_edges, int(cut.sum()), balance, *of_labels, sizes, halo)


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


def least_skew_of(counts: Tensor) -> float:
    """``PartitionFacts.least_skew`` of training nodes ``[parts, classes]``.

    Whole counts nearest to a part's even share of every class: rounded down, and then one more for as many of the
    largest remainders as the part has nodes left.
    """
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    nearest = torch.floor(expected)
    left = (counts.sum(1, keepdim=True) - nearest.sum(1, keepdim=True)).round()
    rank = (expected - nearest).argsort(1, descending=True).argsort(1)
    return float((nearest + (rank < left) - expected).abs().sum() / 2 / counts.sum())


def excess_of(counts: Tensor) -> float | None:
    """``PartitionFacts.excess`` of training nodes ``[parts, classes]``."""

    def pairs(numbers: Tensor) -> float:
        return float((numbers * (numbers - 1)).sum())

    total, within = counts.sum(), pairs(counts.sum(1))
    if within == 0 or pairs(total) == pairs(counts.sum(0)):
        return None
    chance = pairs(counts.sum(0)) / pairs(total)
    return (pairs(counts) / within - chance) / (1 - chance)


def surplus_of(counts: Tensor) -> float:
    """``PartitionFacts.surplus`` of training nodes ``[parts, classes]``."""
    even = torch.ceil(counts.sum(0) / counts.shape[0])
    return float((counts - even).clamp(min=0).sum() / counts.sum())
