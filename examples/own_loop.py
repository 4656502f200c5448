"""A training loop of one's own: the callable form, an optimizer that Joestar does not know, accumulated gradients.

Usage: python examples/own_loop.py [--backend eager] [--epochs 20]
"""

import argparse

import torch
import torch.nn.functional as F

import joestar


class Lion(torch.optim.Optimizer):
    """Sign of a smoothed gradient (Chen et al., 2023, "Symbolic discovery of optimization algorithms")."""

    def __init__(self, params, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, average, fast).sign())
                average.lerp_(p.grad, 1 - slow)


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains in batches of 4 x 25 seeds; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = joestar.load("cora")
    labels = graph.ndata["y"]
    model = joestar.nn.GCN(graph.ndata["x"].shape[1], 64, num_layers=2, out_channels=7, dropout=0.5)
    # Only the first batch is known when the sizes are chosen, so they need room.
    compiled = joestar.compile(model, joestar.NeighborSampler(graph, [10, 10]), slack=1.0, backend=args.backend)
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for batch in graph.train_idx[torch.randperm(len(graph.train_idx))].split(100):
            optimizer.zero_grad()
            for seeds in batch.split(25):  # gradients add up over the parts of the batch
                loss = F.cross_entropy(compiled(seeds), labels[seeds], reduction="sum") / len(batch)
                loss.backward()
                total += loss.item() * len(batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if epoch % 5 == 0 or epoch == args.epochs - 1:
            score = compiled.evaluate(graph.val_idx, batch_size=250)["accuracy"]
            print(f"epoch {epoch + 1:3d}  loss {total / len(graph.train_idx):.4f}  validation {score:.1%}")
    print(f"test accuracy {compiled.evaluate(graph.test_idx, batch_size=250)['accuracy']:.1%}")
    return compiled


if __name__ == "__main__":
    main()
