"""Edge features through a message of one's own: sums of ``relu(x_j + W e_ij)``, then an MLP (GINE, Hu et al., 2020).

Usage: python examples/user_models/edge_features.py [--backend eager] [--epochs 20]
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, Graph


def prepare(graph: Graph) -> dict[str, int]:
    """Gives a graph edge features made of the degrees at both ends: Cora has none of its own."""
    src, dst, _ = graph.coo()
    degrees = graph.in_degrees().float() + 1
    from_src, to_dst = degrees[src], degrees[dst]
    features = [(from_src * to_dst).rsqrt(), 1 / from_src, 1 / to_dst, (from_src / to_dst).log()]
    graph.edata["f"] = torch.stack(features, dim=1)
    return {"edge_channels": len(features)}


class EdgeLayer(nn.Module):
    """``MLP((1 + eps) x_i + sum_j relu(x_j + W e_ij))``."""

    def __init__(self, in_channels: int, out_channels: int, edge_channels: int):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.lin = nn.Linear(edge_channels, in_channels)
        self.nn = nn.Sequential(nn.Linear(in_channels, out_channels), nn.ReLU(), nn.Linear(out_channels, out_channels))

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``."""

        def message(edges):
            return (edges.src["h"] + self.lin(edges.data["f"])).relu()

        total = block.pull(message, "sum", src={"h": x})
        return self.nn((1 + self.eps) * x[: block.num_dst] + total)


class Net(nn.Module):
    """``num_layers`` of ``EdgeLayer``, ReLU and dropout in between."""

    def __init__(
        self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5,
        edge_channels: int = 4,
    ):  # fmt: skip
        super().__init__()
        widths = [in_channels] + [hidden] * (num_layers - 1) + [out_channels]
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([EdgeLayer(*pair, edge_channels) for pair in pairs])
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
