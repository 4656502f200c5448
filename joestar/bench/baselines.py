"""Expert-eager baseline: neighbour sampling in torch ops on the training device, and PyG's layers, one per block.

It shares no code with Joestar: an independent implementation to compare with. Each layer runs over its own bipartite
block (nothing is computed for nodes that no later layer reads), and the frontier's ids are relabelled through a table.
"""

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F


class TorchSampler:
    """Uniform sampling without replacement by Floyd's algorithm with ``torch.rand``.

    Args:
        indptr, indices: CSC of the graph (in-neighbours); fanouts: from the seeds outwards, -1 for every neighbour.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, fanouts: list[int]):
        self.indptr = indptr
        self.indices = indices
        self.fanouts = fanouts
        self.local = torch.full((indptr.numel() - 1,), -1, dtype=torch.int64, device=indptr.device)

    def neighbours(self, dst: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(position in ``dst``, source id) of every sampled edge."""
        start = self.indptr[dst]
        degree = self.indptr[dst + 1] - start
        if k < 0:
            row = torch.repeat_interleave(degree)
            first = degree.cumsum(0) - degree
            position = torch.arange(row.numel(), device=dst.device) - first[row]
            return row, self.indices[start[row] + position].long()
        top = (degree[:, None] - k + torch.arange(k, device=dst.device)).clamp_(min=0)
        picks = (torch.rand(dst.numel(), k, device=dst.device) * (top + 1)).long().minimum(top)
        for j in range(1, k):  # a repeated draw takes the top of its range
            repeated = (picks[:, :j] == picks[:, j : j + 1]).any(1)
            picks[:, j] = torch.where(repeated, top[:, j], picks[:, j])
        slots = torch.arange(k, device=dst.device)
        picks = torch.where(degree[:, None] > k, picks, slots)
        valid = slots < degree.clamp(max=k)[:, None]
        row = torch.arange(dst.numel(), device=dst.device)[:, None].expand(-1, k)[valid]
        return row, self.indices[(start[:, None] + picks)[valid]].long()

    def blocks(self, seeds: Tensor) -> tuple[Tensor, list[tuple[Tensor, int]]]:
        """(input node ids, [(``edge_index``, number of destinations)] input side first); destinations come first."""
        nodes, blocks = seeds.long(), []
        for fanout in self.fanouts:
            row, src = self.neighbours(nodes, fanout)
            count = nodes.numel()
            self.local[nodes] = torch.arange(count, device=nodes.device)
            unseen = torch.unique(src[self.local[src] < 0])
            self.local[unseen] = torch.arange(count, count + unseen.numel(), device=nodes.device)
            blocks.append((torch.stack([self.local[src], row]), count))
            nodes = torch.cat([nodes, unseen])
            self.local[nodes] = -1
        return nodes, blocks[::-1]


class BlockGCNConv(nn.Module):
    """GCN normalised by degrees within the block; ``pyg.GCNConv`` refuses bipartite blocks."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.lin = pyg.Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.propagate = pyg.SimpleConv(aggr="sum")

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        """``x`` = (sources, destinations); one self-loop per destination."""
        loops = torch.arange(x[1].shape[0], device=edge_index.device).expand(2, -1)
        src, dst = edges = torch.cat([edge_index, loops], 1)
        out_degree = torch.zeros(x[0].shape[0], device=src.device).index_add_(0, src, torch.ones_like(src).float())
        in_degree = torch.zeros(x[1].shape[0], device=src.device).index_add_(0, dst, torch.ones_like(dst).float())
        weight = out_degree.clamp(min=1).rsqrt()[src] * in_degree.clamp(min=1).rsqrt()[dst]
        h = self.lin(x[0])
        return self.propagate((h, h[: x[1].shape[0]]), edges, weight) + self.bias


def _gin(in_channels: int, out_channels: int) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(in_channels, out_channels), nn.ReLU(), nn.Linear(out_channels, out_channels))
    return pyg.GINConv(mlp)


class BlockModel(nn.Module):
    """A stack of PyG layers over bipartite blocks, ReLU and dropout between them.

    Args:
        name: ``sage``, ``gcn``, ``gin`` (2-layer MLPs) or ``gat``; heads: of GAT, of ``hidden / heads`` channels each.
    """

    def __init__(self, name: str, channels: int, hidden: int, layers: int, classes: int, heads: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.convs = nn.ModuleList()
        for layer in range(layers):
            last = layer == layers - 1
            before, after = (hidden if layer else channels), (classes if last else hidden)
            if name == "gat":
                width, count = (after, 1) if last else (after // heads, heads)
                options = {"heads": count, "dropout": dropout, "add_self_loops": False}  # dropout as in pyg.GAT
                self.convs.append(pyg.GATConv((before, before), width, **options))
            else:
                self.convs.append({"sage": pyg.SAGEConv, "gcn": BlockGCNConv, "gin": _gin}[name](before, after))

    def forward(self, x: Tensor, blocks: list[tuple[Tensor, int]]) -> Tensor:
        """Logits of the seeds."""
        for position, (conv, (edge_index, count)) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv((x, x[:count]), edge_index)
            if position < len(blocks) - 1:
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


class EagerStep:
    """One training step after the other in eager PyTorch: sample, gather, forward, backward, Adam.

    Args:
        graph: with ``indptr``, ``indices``, ``ndata``; model: a ``BlockModel``; forward: it, or compiled;
        autocast: dtype or ``None``.
    """

    def __init__(self, graph, fanouts: list[int], model: BlockModel, optimizer, forward=None, autocast=None):
        self.sampler = TorchSampler(graph.indptr, graph.indices, fanouts)
        self.x, self.y = graph.ndata["x"], graph.ndata["y"]
        self.model, self.optimizer = model, optimizer
        self.forward = model if forward is None else forward
        self.autocast = autocast

    def __call__(self, seeds: Tensor) -> Tensor:
        """Trains on one batch; the loss."""
        nodes, blocks = self.sampler.blocks(seeds)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(seeds.device.type, self.autocast, enabled=self.autocast is not None):
            loss = F.cross_entropy(self.forward(self.x[nodes], blocks), self.y[seeds.long()])
        loss.backward()
        self.optimizer.step()
        return loss.detach()
