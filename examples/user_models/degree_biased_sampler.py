"""A layer-dependent sampler biased by degree, and a model of mean aggregations.

All destinations of a layer share the nodes that are picked for it. A node counts the more, the more of the layer's
destinations it reaches and the more neighbours it has in the whole graph.

Usage: python examples/user_models/degree_biased_sampler.py [--backend eager] [--epochs 20]
"""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from joestar import Block, Graph, fn


class DegreeBiasedSampler:
    """Picks ``sizes[h]`` nodes together at hop ``h``, in proportion to (edges into the layer) x sqrt(degree)."""

    def __init__(self, graph: Graph, sizes: list[int]):
        self.graph = graph
        self.sizes = sizes

    def sample(self, graph: Graph, seeds: Tensor) -> list[Block]:
        """One block per layer, input side first."""
        popularity = graph.in_degrees().float().sqrt()
        blocks, dsts = [], seeds
        for size in self.sizes:
            columns = graph[:, dsts]
            blocks.append(columns.collective_sample(size, node_probs=columns.out_degrees() * popularity))
            dsts = blocks[-1].srcs
        return blocks[::-1]

    def __repr__(self) -> str:
        return f"DegreeBiasedSampler(sizes={self.sizes})"


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
    """``num_layers`` of ``MeanLayer``, ReLU and dropout in between."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        widths = [in_channels] + [hidden] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList([MeanLayer(*pair) for pair in itertools.pairwise(widths)])
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        for conv, block in zip(self.convs[:-1], blocks[:-1], strict=True):
            x = F.dropout(conv(block, x).relu(), self.dropout, self.training)
        return self.convs[-1](blocks[-1], x)


def sampler(graph: Graph, sizes: tuple[int, ...] = (256, 256)) -> DegreeBiasedSampler:
    """The sampler that ``Net`` is trained with here."""
    return DegreeBiasedSampler(graph, list(sizes))


def main(argv: list[str] | None = None):
    """Trains on Cora; returns the compiled step."""
    from on_cora import train

    return train(__doc__, Net, sampler=sampler, argv=argv)


if __name__ == "__main__":
    main()
