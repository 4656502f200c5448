"""GraphSAGE on the bundled Cora graph: sampling, model, loss and optimizer as one compiled step.

Usage: python examples/train_cora.py [--backend eager] [--epochs 30]
"""

import argparse

import torch
import torch.nn.functional as F

import joestar


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains, prints scores and the report; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = joestar.load("cora")
    sampler = joestar.NeighborSampler(graph, fanouts=[10, 10])
    model = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 64, num_layers=2, out_channels=7, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend=args.backend)

    for epoch in range(args.epochs):
        losses = list(step.epoch(graph.train_idx, batch_size=50))
        if epoch % 5 == 0 or epoch == args.epochs - 1:
            score = step.evaluate(graph.val_idx, batch_size=500)["accuracy"]
            print(f"epoch {epoch + 1:3d}  loss {torch.stack(losses).mean():.4f}  validation {score:.1%}")
    print(f"test accuracy {step.evaluate(graph.test_idx, batch_size=500)['accuracy']:.1%}\n")
    print(step.report())
    return step


if __name__ == "__main__":
    main()
