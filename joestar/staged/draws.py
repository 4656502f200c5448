"""What a sampler draws from, and whether steps over macro-batches repeat it.

A macro-batch is the union of what all calls of a sampler have drawn for many seeds. Draws made anew in it are those of
the whole graph where every call draws evenly from all edges of a node: each is as likely to be there as another. Else
what one call prefers is there too often for the others.
"""

import warnings
from dataclasses import dataclass

from torch import Tensor

from joestar.errors import JoestarWarning
from joestar.graph_api.columns import Columns
from joestar.sampling import LayerDependentSampler
from joestar.staged.pure import is_ours, sampled
from joestar.stages.union import FirstStageContext, kept_of


@dataclass(frozen=True)
class Draws:
    """Of the calls of a sampler that take fewer than all edges of a node.

    Attributes:
        by_weight: some draw edges by weight; evenly: some draw edges that are all as likely; of_parts: some of these
            from a part of the edges of a node; some_edges: some take all edges of a part, or all that have a weight, or
            blocks are returned that no call made; of_nodes: some draw nodes (``collective_sample``).
    """

    by_weight: bool = False
    evenly: bool = False
    of_parts: bool = False
    some_edges: bool = False
    of_nodes: bool = False

    @property
    def repeated(self) -> bool:
        """Whether steps have to repeat draws of edges, as races: drawn anew they would be others."""
        return self.by_weight or (self.evenly and (self.of_parts or self.some_edges or self.of_nodes))


def draws_of(sampler, seeds: Tensor) -> Draws:
    """What it draws for ``seeds``, enough of them that every call is made."""
    if is_ours(sampler) and getattr(sampler, "probs", None) is None:
        return Draws(of_nodes=isinstance(sampler, LayerDependentSampler))
    context = _Watched((0, 0, 0))
    blocks = sampled(sampler, sampler.graph, seeds, context)
    kinds = {kind for kind, _ in context.draws}
    made = set(map(id, context.made))
    of_calls = all(block._eids is None or made.intersection(map(id, (block, *kept_of(block)))) for block in blocks)
    return Draws(
        "edges by weight" in kinds, "edges" in kinds, ("edges", False) in context.draws,
        "some edges" in kinds or not of_calls, "nodes" in kinds,
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
    elif draws.of_parts or draws.some_edges:
        warnings.warn(
            f"{type(sampler).__name__} takes edges from some of the sources (graph[srcs, dsts]), or those that have a "
            f"weight, among what {ahead} picks from all: it finds fewer of them than in the whole graph. {instead}",
            JoestarWarning,
            stacklevel=2,
        )


class _Watched(FirstStageContext):
    """Keeps what is drawn: its kind, and whether from all edges of the nodes."""

    def __init__(self, key: tuple[int, int, int]):
        super().__init__(key)
        self.draws: list[tuple[str, bool]] = []

    def note_draw(self, kind: str, columns: Columns) -> None:
        self.draws.append((kind, columns.whole))
