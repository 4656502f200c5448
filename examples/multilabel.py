"""Several labels per node, some of them unknown (NaN), rare positives weighted up.

Usage: python examples/multilabel.py [--backend eager] [--epochs 20]
"""

import argparse

import torch
from torch import Tensor

import joestar
from joestar import Graph

NODES, TASKS, WIDTH = 3000, 6, 16


def communities(seed: int = 0) -> Graph:
    """Nodes that belong to any of six communities, noisy features, edges mostly within a community, NaN labels."""
    random = torch.Generator().manual_seed(seed)
    member = torch.rand(NODES, TASKS, generator=random) < 0.2
    # Ten candidates for the source of every edge: the one that shares most communities with the destination wins.
    dst = torch.arange(NODES).repeat_interleave(10)
    candidates = torch.randint(NODES, (len(dst), 10), generator=random)
    shared = (member[candidates] & member[dst][:, None]).sum(-1)
    src = candidates.gather(1, shared.argmax(1, keepdim=True)).flatten()
    mixing = torch.randn(TASKS, WIDTH, generator=random)
    x = member.float() @ mixing + 2 * torch.randn(NODES, WIDTH, generator=random)
    y = member.float()
    y[torch.rand(NODES, TASKS, generator=random) < 0.1] = torch.nan  # unknown: in no loss and no score
    graph = Graph.from_edge_index(torch.stack([src, dst]), NODES, ndata={"x": x, "y": y})
    graph.train_idx, graph.val_idx, graph.test_idx = torch.randperm(NODES, generator=random).split([1800, 600, 600])
    return graph


def positive_weights(y: Tensor) -> Tensor:
    """Negatives per positive, for every task ``[T]``; comparisons with NaN are false."""
    return (y < 0.5).sum(0) / (y > 0.5).sum(0).clamp(min=1)


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains, prints micro F1; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = communities()
    model = joestar.nn.GAT(WIDTH, 32, num_layers=2, out_channels=TASKS, heads=4, dropout=0.2, norm="batch_norm")
    loss = torch.nn.BCEWithLogitsLoss(pos_weight=positive_weights(graph.ndata["y"][graph.train_idx]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = joestar.compile(model, joestar.NeighborSampler(graph, [8, 8]), loss, optimizer, backend=args.backend)
    history = step.fit(graph.train_idx, graph.val_idx, epochs=args.epochs, batch_size=300, patience=5)
    print(f"best validation micro F1 {history.best_val:.1%} in epoch {history.best_epoch + 1}")
    print(f"test micro F1 {step.evaluate(graph.test_idx, batch_size=300)['f1_micro']:.1%}")
    return step


if __name__ == "__main__":
    main()
