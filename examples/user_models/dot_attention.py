"""Dot-product attention with edge features, as in graph transformers (Shi et al., 2021).

Scores ``(W_q x_i) . (W_k x_j + W_e e_ij) / sqrt(d)``, values ``W_v x_j + W_e e_ij``, softmax over the neighbours.

Usage: python examples/user_models/dot_attention.py [--backend eager] [--epochs 20]
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, Graph, fn


def prepare(graph: Graph) -> dict[str, int]:
    """Gives a graph edge features made of the degrees at both ends: Cora has none of its own."""
    src, dst, _ = graph.coo()
    degrees = graph.in_degrees().float() + 1
    from_src, to_dst = degrees[src], degrees[dst]
    features = [(from_src * to_dst).rsqrt(), 1 / from_src, 1 / to_dst, (from_src / to_dst).log()]
    graph.edata["f"] = torch.stack(features, dim=1)
    return {"edge_channels": len(features)}


class AttentionLayer(nn.Module):
    """``heads`` weighted sums side by side, plus a linear map of the own row; coefficients are dropped out."""

    def __init__(self, in_channels: int, width: int, heads: int, edge_channels: int, dropout: float):
        super().__init__()
        self.shape = (heads, width)
        self.lin_query, self.lin_key = nn.Linear(in_channels, heads * width), nn.Linear(in_channels, heads * width)
        self.lin_value, self.lin_skip = nn.Linear(in_channels, heads * width), nn.Linear(in_channels, heads * width)
        self.lin_edge = nn.Linear(edge_channels, heads * width, bias=False)
        self.dropout = dropout

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, heads * width]``."""
        own = x[: block.num_dst]
        query, edge = (y.unflatten(1, self.shape) for y in (self.lin_query(own), self.lin_edge(block.edata["f"])))
        key, value = (y.unflatten(1, self.shape) for y in (self.lin_key(x), self.lin_value(x)))
        scale = math.sqrt(self.shape[1])
        scores = block.apply_edges(
            lambda edges: (edges.dst["q"] * (edges.src["k"] + edge)).sum(-1) / scale, src={"k": key}, dst={"q": query}
        )
        alpha = F.dropout(block.edge_softmax(scores), self.dropout, self.training)  # [num_edges, heads]
        values = block.apply_edges(fn.copy_u(value)) + edge
        return block.pull(fn.copy_e(values * alpha.unsqueeze(-1)), "sum").flatten(1) + self.lin_skip(own)


class Net(nn.Module):
    """``num_layers`` of ``AttentionLayer``, the last with one head; ReLU and dropout in between."""

    def __init__(
        self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5, heads: int = 4,
        edge_channels: int = 4,
    ):  # fmt: skip
        super().__init__()
        widths, rest = [in_channels] + [hidden] * (num_layers - 1), (edge_channels, dropout)
        inner = [AttentionLayer(width, hidden // heads, heads, *rest) for width in widths[:-1]]
        self.convs = nn.ModuleList([*inner, AttentionLayer(widths[-1], out_channels, 1, *rest)])
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        for conv, block in zip(self.convs[:-1], blocks[:-1], strict=True):
            x = F.dropout(conv(block, x).relu(), self.dropout, self.training)
        return self.convs[-1](blocks[-1], x)


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, prepare=prepare, argv=argv)


if __name__ == "__main__":
    main()
