"""Expert-eager baseline: neighbour sampling written in torch ops on the training device, and PyG's own layers.

It shares no code with what Joestar compiles: an independent implementation to compare accuracy with. PyG's
``NeighborLoader`` needs pyg-lib; this sampler keeps its semantics (a node is expanded once, at the hop where it is
first seen; layers run over the union of the hops).
"""

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from joestar.bench.baselines import TorchSampler


class UnionSampler(TorchSampler):
    """Expands every node once, at the hop where it is first seen; all edges together."""

    def sample(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(global ids of the sampled nodes, seeds first; ``edge_index`` ``[2, E]`` in local ids)."""
        nodes, edges = seeds, []
        self.local[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        frontier = seeds
        for fanout in self.fanouts:
            row, src = self.neighbours(frontier, fanout)
            unseen = torch.unique(src[self.local[src] < 0])
            self.local[unseen] = torch.arange(nodes.numel(), nodes.numel() + unseen.numel(), device=nodes.device)
            nodes = torch.cat([nodes, unseen])
            edges.append(torch.stack([self.local[src], self.local[frontier[row]]]))
            frontier = unseen
        self.local[nodes] = -1
        return nodes, torch.cat(edges, 1)


MODELS = {"sage": pyg.GraphSAGE, "gcn": pyg.GCN, "gat": pyg.GAT, "gin": pyg.GIN}


class EagerTrainer:
    """PyG's model of the given name trained over ``UnionSampler``, one Python step after the other."""

    def __init__(self, graph, model: torch.nn.Module, fanouts: list[int], optimizer: torch.optim.Optimizer):
        self.sampler = UnionSampler(graph.indptr, graph.indices, fanouts)
        self.x, self.y = graph.ndata["x"], graph.ndata["y"]
        self.model = model
        self.optimizer = optimizer

    def logits(self, seeds: Tensor) -> Tensor:
        """Logits of the seeds ``[B, C]``."""
        nodes, edge_index = self.sampler.sample(seeds)
        return self.model(self.x[nodes], edge_index)[: seeds.numel()]

    def epoch(self, idx: Tensor, batch_size: int) -> list[Tensor]:
        """One pass over ``idx`` in random order; the losses."""
        self.model.train()
        losses = []
        for seeds in idx[torch.randperm(idx.numel(), device=idx.device)].split(batch_size):
            self.optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(self.logits(seeds), self.y[seeds])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    @torch.no_grad()
    def accuracy(self, idx: Tensor, batch_size: int) -> float:
        """Share of right predictions over ``idx``, sampled like training."""
        self.model.eval()
        hits = [(self.logits(seeds).argmax(-1) == self.y[seeds]) for seeds in idx.split(batch_size)]
        return torch.cat(hits).float().mean().item()
