"""Jumping knowledge (Xu et al., 2018): the classifier reads what every layer made of the seeds.

Usage: python examples/user_models/jumping_knowledge.py [--backend eager] [--epochs 20]
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, fn


class MeanLayer(nn.Module):
    """``W_l mean_j x_j + W_r x_i + b``."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``."""
        return self.lin_l(block.pull(fn.copy_u(x), "mean")) + self.lin_r(x[: block.num_dst])


class Net(nn.Module):
    """``num_layers`` of ``MeanLayer``; their results for the seeds side by side, and a classifier."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        widths = [in_channels] + [hidden] * num_layers
        self.convs = nn.ModuleList([MeanLayer(*pair) for pair in itertools.pairwise(widths)])
        self.classify = nn.Linear(num_layers * hidden, out_channels)
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        num_seeds, of_seeds = blocks[-1].num_dst, []
        for conv, block in zip(self.convs, blocks, strict=True):
            x = F.dropout(conv(block, x).relu(), self.dropout, self.training)
            of_seeds.append(x[:num_seeds])  # the seeds are the first rows of every layer
        return self.classify(torch.cat(of_seeds, dim=1))


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, argv=argv)


if __name__ == "__main__":
    main()
