"""Softmax aggregation with a learnt temperature (Li et al., 2020): every column has a softmax of its own.

Usage: python examples/user_models/softmax_aggregation.py [--backend eager] [--epochs 20]
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, fn


class SoftmaxLayer(nn.Module):
    """``W_l (sum_j softmax_j(t x_j) x_j) + W_r x_i``."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.t = nn.Parameter(torch.ones(1))
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``."""
        rows = block.apply_edges(fn.copy_u(x))
        total = block.pull(fn.copy_e(rows * block.edge_softmax(rows * self.t)), "sum")
        return self.lin_l(total) + self.lin_r(x[: block.num_dst])


class Net(nn.Module):
    """``num_layers`` of ``SoftmaxLayer``, ReLU and dropout in between."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        widths = [in_channels] + [hidden] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList([SoftmaxLayer(*pair) for pair in itertools.pairwise(widths)])
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        for conv, block in zip(self.convs[:-1], blocks[:-1], strict=True):
            x = F.dropout(conv(block, x).relu(), self.dropout, self.training)
        return self.convs[-1](blocks[-1], x)


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, argv=argv)


if __name__ == "__main__":
    main()
