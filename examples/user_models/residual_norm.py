"""Residual layers with LayerNorm.

Usage: python examples/user_models/residual_norm.py [--backend eager] [--epochs 20]
"""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, fn


class ResidualLayer(nn.Module):
    """``S x_i + dropout(relu(LayerNorm(W_l mean_j x_j + W_r x_i + b)))``; ``S`` is 1 where the widths are equal."""

    def __init__(self, in_channels: int, out_channels: int, dropout: float):
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)
        self.norm = nn.LayerNorm(out_channels)
        same = in_channels == out_channels
        self.skip = nn.Identity() if same else nn.Linear(in_channels, out_channels, bias=False)
        self.dropout = dropout

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``."""
        own = x[: block.num_dst]
        h = self.norm(self.lin_l(block.pull(fn.copy_u(x), "mean")) + self.lin_r(own)).relu()
        return self.skip(own) + F.dropout(h, self.dropout, self.training)


class Net(nn.Module):
    """``num_layers`` of ``ResidualLayer`` and a classifier."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        widths = [in_channels] + [hidden] * num_layers
        self.convs = nn.ModuleList([ResidualLayer(*pair, dropout) for pair in itertools.pairwise(widths)])
        self.classify = nn.Linear(hidden, out_channels)

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        for conv, block in zip(self.convs, blocks, strict=True):
            x = conv(block, x)
        return self.classify(x)


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, argv=argv)


if __name__ == "__main__":
    main()
