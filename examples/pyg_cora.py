"""PyTorch Geometric's own GAT, unmodified: its training loop with three lines changed, each with what it was.

Usage: python examples/pyg_cora.py [--backend eager] [--epochs 20]      (pip install 'joestar[pyg]')
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT

import joestar


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains and prints scores; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = joestar.load("cora").to_pyg()  # or Planetoid("data", "Cora")[0]
    model = GAT(data.num_features, 64, num_layers=2, out_channels=7, heads=4, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    graph = joestar.Graph.from_pyg(data)
    # was: loader = NeighborLoader(data, [10, 10], data.train_mask, batch_size=50, shuffle=True)
    sampler = joestar.NeighborSampler(graph, [10, 10])
    # was: loss = F.cross_entropy(model(batch.x, batch.edge_index)[:batch.batch_size], batch.y[:batch.batch_size])
    #      with optimizer.zero_grad() in front of it, loss.backward() and optimizer.step() behind it
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend=args.backend)

    for epoch in range(args.epochs):
        total = 0.0
        # was: for batch in loader:
        for loss in step.epoch(graph.train_idx, batch_size=50):
            total += loss.item()
        print(f"epoch {epoch + 1:3d}  sum of losses {total:.4f}")

    model.eval()  # the model is PyG's as ever
    right = model(data.x, data.edge_index).argmax(1) == data.y
    print(f"test accuracy {right[data.test_mask].float().mean():.1%}")
    return step


if __name__ == "__main__":
    main()
