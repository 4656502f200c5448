"""How far from the seeds the steps of a sampler read hidden rows, and so which nodes have a row (thesis 5.2.2)."""

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Block, Graph
from joestar.stages.history import HistoryStore
from joestar.stages.history_rows import boundary_nodes, halo_within, in_edges
from joestar.stages.large_batch import has_fast_way
from joestar.stages.partitions import PreparedPartitions
from joestar.stages.union import run_sampler

TRIED = 4
"""Batches that a sampler draws."""
_LOOKS = 1 << 20
"""Index of the first macro-batch whose key they have: none of a run's."""


class HiddenReach:
    """Which halo nodes have hidden rows that steps may read.

    A hidden layer needs a row of those nodes that lie one hop from the seeds for the last one, two for the one before,
    and so on, where all blocks take one hop (``takes_one_hop``). Else of all that can be in a halo.

    Args:
        stage: prepared for the graph. layers: hidden ones. by_depth: whether blocks take one hop.
    """

    def __init__(self, stage: PreparedPartitions, layers: int, by_depth: bool):
        self.stage, self.layers, self.by_depth = stage, layers, by_depth
        self._fine: Tensor | None = None

    def nodes(self, seeds: Tensor) -> list[Tensor]:
        """Ids of the nodes whose rows steps of these seeds may read, ascending, per layer; no hubs."""
        graph, assignment = self.stage.graph, self.stage.stage.partitioning.assignment
        if not self.by_depth:
            return [self._no_hubs(boundary_nodes(graph, assignment))] * self.layers
        return [self._no_hubs(nodes) for nodes in reversed(halo_within(graph, assignment, seeds, self.layers))]

    def _no_hubs(self, nodes: Tensor) -> Tensor:
        return nodes[~torch.isin(nodes, self.stage.hubs)]

    def check(self, seeds: Tensor, store: HistoryStore) -> None:
        """Raises ``ConfigError`` where steps of these seeds may read a row that no table has: they would learn from
        fewer neighbours. Seeds that tables were made for have all of theirs; the same seeds are looked at once."""
        last = self._fine
        if not self.by_depth or (last is not None and last.dtype == seeds.dtype and torch.equal(seeds, last)):
            return
        others = seeds[~self.stage.trains(seeds)]
        for layer, nodes in enumerate(self.nodes(others) if others.numel() else []):
            lacking = nodes[~store.has_row(layer, nodes)]
            if lacking.numel():
                raise ConfigError(
                    f"{others.numel():,} seeds of this epoch, {int(others[0])} among them, are no training nodes, and "
                    f"the tables of hidden rows lack {lacking.numel():,} nodes that steps of these would read in layer "
                    f"{layer}, {int(lacking[0])} among them: tables have what graph.train_idx leads to. Put all nodes "
                    "to train on into graph.train_idx before joestar.compile."
                )
        self._fine = seeds.clone()


def takes_one_hop(graph: Graph, sampler, seeds: Tensor, batch: int, seed: int) -> bool:
    """Whether a block's rows are those of its destinations and of their in-neighbours, by edges of the graph, as they
    are known to be of a ``NeighborSampler`` and found to be in some batches of others; those of the last, the seeds.

    Then hidden rows that are read lie one hop from the seeds, two in the layer before, and so on. The blocks of a
    sampler that walks, or gives every layer the same nodes, have others.

    Args:
        graph: the whole graph, on the CPU. seeds: of training, in random order.

    Raises:
        SamplerError: blocks that do not follow one another.
    """
    if has_fast_way(graph, sampler):
        return True
    for index, some in enumerate(seeds.split(batch)[:TRIED]):
        blocks, _ = run_sampler(graph, sampler, some, (seed, 0, _LOOKS + index))
        if not (_within(blocks[-1].dsts, some, graph) and all(_neighbours_only(graph, block) for block in blocks)):
            return False
    return True


def _neighbours_only(graph: Graph, block: Block) -> bool:
    """Each edge is one of the graph, or a loop, and each source has an edge or is a destination: statistics over all
    rows read those, too."""
    sources = block.srcs[block.indices.to(torch.int64)].to(torch.int64)
    owners = block.dsts.to(torch.int64).repeat_interleave(block.indptr.diff())
    if not _within(block.srcs, torch.cat([sources, block.dsts.to(torch.int64)]), graph):
        return False
    apart = sources != owners
    pairs = torch.unique(owners[apart] * graph.num_nodes + sources[apart])
    found = torch.zeros_like(pairs, dtype=torch.bool)
    for near, nodes in in_edges(graph, torch.unique(owners[apart])):
        there = nodes * graph.num_nodes + near
        at = torch.searchsorted(pairs, there).clamp_(max=max(0, pairs.numel() - 1))
        found[at[pairs[at] == there]] = True
    return bool(found.all())


def _within(some: Tensor, others: Tensor, graph: Graph) -> bool:
    there = torch.zeros(graph.num_nodes, dtype=torch.bool, device="cpu")
    there[others.to(torch.int64)] = True
    return bool(there[some.to(torch.int64)].all())
