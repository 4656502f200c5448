"""Graph attention whose scores read edge features, by a layer of the library.

Usage: python examples/user_models/gat_edges.py [--backend eager] [--epochs 20]
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, Graph
from joestar.nn import GATConv


def prepare(graph: Graph) -> dict[str, int]:
    """Gives a graph edge features made of the degrees at both ends: Cora has none of its own."""
    src, dst, _ = graph.coo()
    degrees = graph.in_degrees().float() + 1
    from_src, to_dst = degrees[src], degrees[dst]
    features = [(from_src * to_dst).rsqrt(), 1 / from_src, 1 / to_dst, (from_src / to_dst).log()]
    graph.edata["f"] = torch.stack(features, dim=1)
    return {"edge_channels": len(features)}


class Net(nn.Module):
    """``num_layers`` of ``GATConv``, the last with one head; ReLU and dropout in between."""

    def __init__(
        self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5, heads: int = 4,
        edge_channels: int = 4,
    ):  # fmt: skip
        super().__init__()
        options = {"edge_dim": edge_channels, "dropout": dropout, "add_self_loops": False}
        widths = [in_channels] + [hidden] * (num_layers - 1)
        convs = [GATConv(width, hidden // heads, heads, **options) for width in widths[:-1]]
        self.convs = nn.ModuleList([*convs, GATConv(widths[-1], out_channels, **options)])
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        for conv, block in zip(self.convs[:-1], blocks[:-1], strict=True):
            x = F.dropout(conv(block, x, block.edata["f"]).relu(), self.dropout, self.training)
        return self.convs[-1](blocks[-1], x, blocks[-1].edata["f"])


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, prepare=prepare, argv=argv)


if __name__ == "__main__":
    main()
