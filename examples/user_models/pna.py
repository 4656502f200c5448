"""Principal neighbourhood aggregation (Corso et al., 2020): four aggregators, each scaled three ways by the degree.

Usage: python examples/user_models/pna.py [--backend eager] [--epochs 20]
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, Graph, fn

EPS = 1e-5
"""A smaller variance counts as none: the root has no gradient at 0."""


def prepare(graph: Graph, largest: int = 10) -> dict[str, float]:
    """Mean of log(degree + 1), degrees cut off at the largest fanout."""
    return {"mean_log": (graph.in_degrees().clamp(max=largest) + 1).log().mean().item()}


class PNALayer(nn.Module):
    """A linear map of ``x_i`` beside {mean, max, min, std} x {1, amplification, attenuation} of the neighbours."""

    def __init__(self, in_channels: int, out_channels: int, mean_log: float):
        super().__init__()
        self.lin = nn.Linear(13 * in_channels, out_channels)
        self.mean_log = mean_log

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``."""
        mean, most, least = (block.pull(fn.copy_u(x), reduce) for reduce in ("mean", "max", "min"))
        variance = block.pull(fn.copy_u(x * x), "mean") - mean * mean
        std = torch.where(variance > EPS, variance.clamp(min=EPS).sqrt(), 0.0)
        around = torch.cat([mean, most, least, std], dim=1)
        amplify = (block.in_degrees().clamp(min=1) + 1).to(x.dtype).log()[:, None] / self.mean_log
        return self.lin(torch.cat([x[: block.num_dst], around, around * amplify, around / amplify], dim=1))


class Net(nn.Module):
    """``num_layers`` of ``PNALayer``, ReLU and dropout in between."""

    def __init__(
        self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5,
        mean_log: float = 2.0,
    ):  # fmt: skip
        super().__init__()
        widths = [in_channels] + [hidden] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList([PNALayer(*pair, mean_log) for pair in itertools.pairwise(widths)])
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
