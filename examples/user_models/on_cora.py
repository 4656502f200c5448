"""What the scripts of this folder share: training a model on the bundled Cora graph."""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

import joestar


def train(
    text: str | None, net: Callable, sampler: Callable | None = None, prepare: Callable | None = None,
    argv: list[str] | None = None,
) -> joestar.Step:  # fmt: skip
    """Reads the command line, trains, prints scores and what was fused; returns the compiled step.

    Args:
        text: help of the command. net: the model's class. sampler: makes one for a graph; by default, of neighbours.
        prepare: adds to a graph what the model reads; returns keyword arguments of ``net``.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = joestar.load("cora")
    options = {} if prepare is None else prepare(graph)
    model = net(graph.ndata["x"].shape[1], 64, num_layers=2, out_channels=graph.num_classes, **options)
    picks = joestar.NeighborSampler(graph, [10, 10]) if sampler is None else sampler(graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    step = joestar.compile(model, picks, F.cross_entropy, optimizer, slack=0.3, backend=args.backend)
    history = step.fit(graph.train_idx, graph.val_idx, epochs=args.epochs, batch_size=70)
    print(f"best validation {history.best_val:.1%}; test {step.evaluate(graph.test_idx, 70)['accuracy']:.1%}\n")
    print(step.explain())
    return step
