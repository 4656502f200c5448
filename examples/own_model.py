"""A model of one's own: residual layers over concatenated mean and maximum of the neighbours.

Usage: python examples/own_model.py [--backend eager] [--epochs 20]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import joestar
from joestar import Block, fn


class MeanMaxLayer(nn.Module):
    """``x_i + relu(W [LayerNorm(x_i), mean_j, max_j])`` over the neighbours ``j``, all normalised."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lin = nn.Linear(3 * width, width)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        """Rows of the sources ``[num_src, width]`` to rows of the destinations ``[num_dst, width]``."""
        h = self.norm(x)
        mean = block.pull(fn.copy_u(h), "mean")
        most = block.pull(fn.copy_u(h), "max")
        own = slice(0, block.num_dst)  # destinations are the first of the sources
        return x[own] + F.relu(self.lin(torch.cat([h[own], mean, most], dim=1)))


class MeanMaxNet(nn.Module):
    """A projection, one ``MeanMaxLayer`` for every block, and a classifier."""

    def __init__(self, in_channels: int, width: int, num_layers: int, out_channels: int, dropout: float = 0.5):
        super().__init__()
        self.project = nn.Linear(in_channels, width)
        self.layers = nn.ModuleList([MeanMaxLayer(width) for _ in range(num_layers)])
        self.classify = nn.Linear(width, out_channels)
        self.dropout = dropout

    def forward(self, blocks: list[Block], x: Tensor) -> Tensor:
        """``blocks`` input side first, ``x`` the features of ``blocks[0].srcs``; logits ``[num_seeds, C]``."""
        h = F.dropout(self.project(x).relu(), self.dropout, self.training)
        for layer, block in zip(self.layers, blocks, strict=True):
            h = F.dropout(layer(block, h), self.dropout, self.training)
        return self.classify(h)


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains the model; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = joestar.load("cora")
    model = MeanMaxNet(graph.ndata["x"].shape[1], 64, num_layers=2, out_channels=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    sampler = joestar.NeighborSampler(graph, fanouts=[10, 10])
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, slack=0.3, backend=args.backend)
    history = step.fit(graph.train_idx, graph.val_idx, epochs=args.epochs, batch_size=70)
    print(f"best validation {history.best_val:.1%}; test {step.evaluate(graph.test_idx, 70)['accuracy']:.1%}\n")
    print(step.explain())
    return step


if __name__ == "__main__":
    main()
