"""The models of ``examples/user_models`` in PyG's layers, to compare with: same parameters under the same names.

They run over bipartite blocks that are sampled in torch ops, as in ``joestar.bench.baselines``, and share no code with
Joestar. Where PyG has no such layer, it is a ``MessagePassing`` layer of PyG's with linear maps around it.
"""

import itertools
from dataclasses import dataclass

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F

from joestar.bench.baselines import TorchSampler


@dataclass
class TorchBlock:
    """A bipartite block: ``edge_index`` int64 ``[2, E]`` of local ids, destinations, features of edges."""

    edge_index: Tensor
    num_dst: int
    edge_attr: Tensor | None = None


class NeighborBlocks:
    """Uniform picks as in ``TorchSampler``, with edge features ``[num_edges, D]`` of the graph if there are any."""

    def __init__(self, indptr: Tensor, indices: Tensor, fanouts: list[int], edge_attr: Tensor | None = None):
        positions = torch.arange(indices.numel(), device=indices.device)
        self.sampler = TorchSampler(indptr, positions, fanouts)  # its "sources" are positions of edges
        self.indices, self.edge_attr, self.local = indices, edge_attr, self.sampler.local

    def blocks(self, seeds: Tensor) -> tuple[Tensor, list[TorchBlock]]:
        """(input node ids, blocks input side first); destinations come first."""
        nodes, blocks = seeds.long(), []
        for fanout in self.sampler.fanouts:
            row, position = self.sampler.neighbours(nodes, fanout)
            count, src = nodes.numel(), self.indices[position].long()
            nodes, src = relabelled(self.local, nodes, src)
            attributes = None if self.edge_attr is None else self.edge_attr[position]
            blocks.append(TorchBlock(torch.stack([src, row]), count, attributes))
        return nodes, blocks[::-1]


class DegreeBiasedBlocks:
    """Layer-dependent picks in proportion to (edges into the layer) x sqrt(degree), by ``torch.multinomial``."""

    def __init__(self, indptr: Tensor, indices: Tensor, sizes: list[int]):
        self.indptr, self.indices, self.sizes = indptr, indices, sizes
        self.popularity = (indptr[1:] - indptr[:-1]).float().sqrt()
        self.local = torch.full((indptr.numel() - 1,), -1, dtype=torch.int64, device=indptr.device)

    def blocks(self, seeds: Tensor) -> tuple[Tensor, list[TorchBlock]]:
        """(input node ids, blocks input side first); destinations come first."""
        nodes, blocks = seeds.long(), []
        for size in self.sizes:
            count, start = nodes.numel(), self.indptr[nodes]
            degree = self.indptr[nodes + 1] - start
            row = torch.repeat_interleave(torch.arange(count, device=nodes.device), degree)
            first = torch.cumsum(degree, 0) - degree
            position = torch.arange(row.numel(), device=nodes.device) + (start - first)[row]
            src = self.indices[position].long()
            weight = torch.bincount(src, minlength=self.local.numel()) * self.popularity
            candidates = weight.nonzero()[:, 0]
            if candidates.numel() > size:
                candidates = candidates[torch.multinomial(weight[candidates], size)]
            picked = torch.zeros_like(self.local, dtype=torch.bool)
            picked[candidates] = True
            kept = picked[src]
            nodes, src = relabelled(self.local, nodes, src[kept])
            blocks.append(TorchBlock(torch.stack([src, row[kept]]), count))
        return nodes, blocks[::-1]


def relabelled(local: Tensor, nodes: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """(the destinations, then the new sources; local ids of ``src``); ``local`` is a table of -1, left as it was."""
    count = nodes.numel()
    local[nodes] = torch.arange(count, device=nodes.device)
    unseen = torch.unique(src[local[src] < 0])
    local[unseen] = torch.arange(count, count + unseen.numel(), device=nodes.device)
    nodes, src = torch.cat([nodes, unseen]), local[src]
    local[nodes] = -1
    return nodes, src


class ResidualLayer(pyg.SAGEConv):
    """A mean aggregation, LayerNorm, ReLU, dropout, and the destination's own row."""

    def __init__(self, before: int, after: int, dropout: float):
        super().__init__((before, before), after)
        self.norm = nn.LayerNorm(after)
        self.skip = nn.Identity() if before == after else nn.Linear(before, after, bias=False)
        self.dropout = dropout

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x`` = (sources, destinations); ``[num_dst, after]``."""
        h = self.norm(super().forward(x, edge_index)).relu()
        return self.skip(x[1]) + F.dropout(h, self.dropout, self.training)


class SoftmaxLayer(pyg.SAGEConv):
    """A softmax aggregation with a learnt temperature ``t``."""

    def __init__(self, before: int, after: int):
        super().__init__((before, before), after, aggr=pyg.aggr.SoftmaxAggregation(learn=True))
        self.t = self.aggr_module.t


class PNALayer(nn.Module):
    """PyG's degree-scaled aggregations of the plain neighbours, and a linear map of them beside the own row."""

    def __init__(self, before: int, after: int, mean_log: float):
        super().__init__()
        scalers = ["identity", "amplification", "attenuation"]
        scaled = pyg.aggr.DegreeScalerAggregation(["mean", "max", "min", "std"], scalers, torch.tensor([0, 1]))
        scaled.avg_deg_log.fill_(mean_log)
        self.gather = pyg.SimpleConv(aggr=scaled)
        self.lin = nn.Linear(13 * before, after)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x`` = (sources, destinations); ``[num_dst, after]``."""
        return self.lin(torch.cat([x[1], self.gather(x, edge_index)], dim=1))


class UpdateFirstLayer(nn.Module):
    """A linear map of the sources, their mean, and a linear map of the own row."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.lin, self.lin_r = nn.Linear(before, after), nn.Linear(before, after, bias=False)
        self.gather = pyg.SimpleConv(aggr="mean")

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x`` = (sources, destinations); ``[num_dst, after]``."""
        return self.gather((self.lin(x[0]), x[1]), edge_index) + self.lin_r(x[1])


class PygModel(nn.Module):
    """A stack of layers with ReLU and dropout in between.

    Args:
        name: of the example; options: further arguments of its ``Net`` (``edge_channels``, ``mean_log``, ``heads``).
    """

    def __init__(
        self, name: str, channels: int, hidden: int, layers: int, classes: int, dropout: float = 0.5, **options
    ):
        super().__init__()
        self.name, self.dropout = name, dropout
        self.classify = None
        widths = [channels] + [hidden] * (layers - 1) + [classes]
        if name in ("residual_norm", "jumping_knowledge"):
            widths[-1] = hidden
            self.classify = nn.Linear(hidden * (layers if name == "jumping_knowledge" else 1), classes)
        self.jump = pyg.JumpingKnowledge("cat") if name == "jumping_knowledge" else None
        last = len(widths) - 2
        self.convs = nn.ModuleList(
            [self._layer(*pair, i == last, options) for i, pair in enumerate(itertools.pairwise(widths))]
        )

    def _layer(self, before: int, after: int, last: bool, options: dict) -> nn.Module:
        pair = (before, before)
        match self.name:
            case "edge_features":
                mlp = nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Linear(after, after))
                return pyg.GINEConv(mlp, train_eps=True, edge_dim=options["edge_channels"])
            case "residual_norm":
                return ResidualLayer(before, after, self.dropout)
            case "two_aggregators":
                return pyg.SAGEConv(pair, after, aggr=["mean", "max"])
            case "gatv2":
                heads = 1 if last else options.get("heads", 4)
                return pyg.GATv2Conv(pair, after // heads, heads, dropout=self.dropout, add_self_loops=False)
            case "dot_attention":
                heads, edges = 1 if last else options.get("heads", 4), options["edge_channels"]
                return pyg.TransformerConv(pair, after // heads, heads, dropout=self.dropout, edge_dim=edges)
            case "softmax_aggregation":
                return SoftmaxLayer(before, after)
            case "gat_edges":
                heads, edges = 1 if last else options.get("heads", 4), options["edge_channels"]
                loops = {"add_self_loops": False, "edge_dim": edges}
                return pyg.GATConv(before, after // heads, heads, dropout=self.dropout, **loops)
            case "pna":
                return PNALayer(before, after, options["mean_log"])
            case "update_first":
                return UpdateFirstLayer(before, after)
        return pyg.SAGEConv(pair, after)

    def forward(self, x: Tensor, blocks: list[TorchBlock]) -> Tensor:
        """Logits of the seeds."""
        seeds, of_seeds = blocks[-1].num_dst, []
        for position, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            edges = () if block.edge_attr is None else (block.edge_attr,)
            x = conv((x, x[: block.num_dst]), block.edge_index, *edges)
            if self.name != "residual_norm" and (self.jump is not None or position < len(blocks) - 1):
                x = F.dropout(F.relu(x), self.dropout, self.training)
            of_seeds.append(x[:seeds])
        x = x if self.jump is None else self.jump(of_seeds)
        return x if self.classify is None else self.classify(x)
