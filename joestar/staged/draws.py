"""What a sampler draws from, and whether steps over macro-batches repeat it.

A macro-batch is the union of what all calls of a sampler have drawn for many seeds. Draws made anew in it are those of
the whole graph where every call draws evenly from all edges of a node: each is as likely to be there as another. Else
what one call prefers is there too often for the others.
"""

import itertools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import JoestarWarning
from joestar.graph_api.columns import Columns
from joestar.sampling import LayerDependentSampler
from joestar.staged.pure import is_ours, sampled
from joestar.stages.union import FirstStageContext


@dataclass(frozen=True)
class Draws:
    """Of the calls of a sampler that draw fewer than all edges of a slice.

    Attributes:
        by_weight: some draw edges by weight; evenly: some draw edges that are all as likely; of_nodes: some draw nodes
            (``collective_sample``).
        of_parts: of those that draw evenly, some draw from a part of the edges of a node; apart: and another one from
            other edges of that node, of which some are the same.
    """

    by_weight: bool = False
    evenly: bool = False
    of_nodes: bool = False
    of_parts: bool = False
    apart: bool = False

    @property
    def repeated(self) -> bool:
        """Whether steps have to repeat draws of edges, as races: drawn anew they would be others."""
        return self.by_weight or self.apart or (self.of_nodes and self.evenly)


def draws_of(sampler, seeds: Tensor) -> Draws:
    """What it draws for ``seeds``, which are enough to tell: all calls, and nodes for which several draw."""
    if is_ours(sampler) and getattr(sampler, "probs", None) is None:
        return Draws(of_nodes=isinstance(sampler, LayerDependentSampler))
    context = _Watched((0, 0, 0))
    sampled(sampler, sampler.graph, seeds, context)
    kinds = {kind for kind, _ in context.draws}
    even = [columns for kind, columns in context.draws if kind == "edges"]
    return Draws(
        "edges by weight" in kinds, bool(even), "nodes" in kinds, not all(columns.whole for columns in even),
        any(_partly_the_same(*pair) for pair in itertools.combinations(even, 2)),
    )  # fmt: skip


def warn_of_nodes(sampler, draws: Draws) -> None:
    """Warns where nodes are drawn among what draws of edges have left: these are repeated, those are not."""
    if draws.of_nodes and draws.repeated:
        warnings.warn(
            f"{type(sampler).__name__} draws edges in some calls (individual_sample), and nodes in others "
            "(collective_sample). Over macro-batches edges are those of the whole graph, but nodes are drawn among "
            "what all calls have found for many seeds: those that edges lead to are picked too often "
            "(docs/write-your-own-sampler.md, 'For a graph larger than the GPU'). Without first_stage and memory "
            "picks are right in any case.",
            JoestarWarning,
            stacklevel=2,
        )


def warn_of_fanouts(sampler, draws: Draws, fanouts: list[int] | None) -> None:
    """Warns where steps draw, not evenly from all edges of a node, among what partitions have picked ahead evenly."""
    if not any(fanout > 0 for fanout in fanouts or ()):
        return
    ahead = f"joestar.Partitions(ahead={fanouts})"
    instead = "Give ahead a number of hops, which keeps all of their edges."
    if draws.by_weight:
        warnings.warn(
            f"{type(sampler).__name__} draws edges by weight among those that {ahead} picks uniformly before: light "
            f"edges are picked more often than their weights say. {instead}",
            JoestarWarning,
            stacklevel=2,
        )
    elif draws.of_parts:
        warnings.warn(
            f"{type(sampler).__name__} draws edges from some of the sources (graph[srcs, dsts]) among those that "
            f"{ahead} picks from all: it finds fewer of them than in the whole graph. {instead}",
            JoestarWarning,
            stacklevel=2,
        )


class _Watched(FirstStageContext):
    """Keeps all draws: what kind they are of, and the slices."""

    def __init__(self, key: tuple[int, int, int]):
        super().__init__(key)
        self.draws: list[tuple[str, Columns]] = []

    def note_draw(self, kind: str, columns: Columns) -> None:
        self.draws.append((kind, columns))


def _partly_the_same(one: Columns, other: Columns) -> bool:
    """Whether there is a node some of whose edges, not all, are in both slices."""
    if (one.whole and other.whole) or one.graph.indptr is not other.graph.indptr:
        return False
    edges = one.eids.unique(), other.eids.unique()
    common = edges[0][torch.isin(edges[0], edges[1])]
    indptr = one.graph.indptr
    nodes = _rows(indptr, common)
    return any(
        bool((torch.isin(_rows(indptr, slice_edges), nodes) & ~torch.isin(slice_edges, common)).any())
        for slice_edges in edges
    )


def _rows(indptr: Tensor, edges: Tensor) -> Tensor:
    return torch.searchsorted(indptr, edges, right=True) - 1
