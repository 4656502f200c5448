"""GATv2 (Brody, Alon and Yahav, 2022): scores ``a^T leaky_relu(W_l x_j + W_r x_i)``, softmax over the neighbours.

Usage: python examples/user_models/gatv2.py [--backend eager] [--epochs 20]
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, fn


class AttentionLayer(nn.Module):
    """``heads`` sums of ``alpha_ij W_l x_j``, side by side; coefficients are dropped out."""

    def __init__(self, in_channels: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.lin_l = nn.Linear(in_channels, heads * width)
        self.lin_r = nn.Linear(in_channels, heads * width)
        self.att = nn.Parameter(torch.empty(1, heads, width))
        self.bias = nn.Parameter(torch.zeros(heads * width))
        self.dropout = dropout
        nn.init.xavier_uniform_(self.att)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, heads * width]``."""
        shape = self.att.shape[1:]
        left = self.lin_l(x).unflatten(1, shape)  # [num_src, heads, width]
        right = self.lin_r(x[: block.num_dst]).unflatten(1, shape)
        pairs = F.leaky_relu(block.apply_edges(fn.u_add_v(left, right)), 0.2)
        weights = block.edge_softmax((pairs * self.att).sum(dim=-1))  # [num_edges, heads]
        weights = F.dropout(weights, self.dropout, self.training)
        return block.pull(fn.u_mul_e(left, weights), "sum").flatten(1) + self.bias


class Net(nn.Module):
    """``num_layers`` of ``AttentionLayer``, the last with one head; ReLU and dropout in between."""

    def __init__(
        self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5, heads: int = 4
    ):
        super().__init__()
        inner = [AttentionLayer(in_channels if i == 0 else hidden, hidden // heads, heads, dropout)
                 for i in range(num_layers - 1)]  # fmt: skip
        last = AttentionLayer(hidden if inner else in_channels, out_channels, 1, dropout)
        self.convs = nn.ModuleList([*inner, last])
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
