"""What can be learnt on planted graphs: features alone should tell under 45 % of the labels, neighbours 75 to 90 %.

    python benchmarks/planted_labels.py tiny mini products --scale 1 1 0.02
    python benchmarks/planted_labels.py papers100M --device cuda

An MLP and a SAGE of two layers, in plain PyTorch: Joestar samples, and compiles nothing. SAGE is trained on sampled
neighbours and judged on all (exact inference), in graphs of more than --exact nodes on up to 50 neighbours of the test
nodes and of their neighbours. Test accuracy at the best validation score, of up to --judged test nodes. Graphs are made
on the device, as `joestar bench` makes them.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.data.planted import shape_of
from joestar.runtime.inference import Inference

BAND = (0.45, 0.75, 0.90)
"""What the MLP stays under; what SAGE is between."""
CHECKS = 6
"""How often validation is looked at."""
WIDE = 50
"""Neighbours per hop, where judging on all would take too long."""


@dataclass(frozen=True)
class Recipe:
    """Adam; a tenth of the training nodes in a batch, at most ``batch``."""

    batch: int = 1000
    steps: int = 400
    hidden: int = 128
    dropout: float = 0.5
    lr: float = 0.005
    decay: float = 3e-4
    fanouts: tuple[int, ...] = (15, 10)

    def size(self, train: int) -> int:
        """Of a batch."""
        return max(1, min(self.batch, train // 10))


def batches(ids: torch.Tensor, size: int, number: int):
    """So many batches of ids in a random order, epoch after epoch."""
    made = 0
    while True:
        for part in ids[torch.randperm(ids.numel(), device=ids.device)].split(size):
            yield part
            made += 1
            if made == number:
                return


def learnt(model, recipe: Recipe, train: torch.Tensor, outputs, judge, labels: torch.Tensor) -> float:
    """Test accuracy at the best validation score; ``outputs(seeds, step)`` gives logits, ``judge()`` (val, test)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.decay)
    best, found, every = -1.0, 0.0, max(1, recipe.steps // CHECKS)
    for step, seeds in enumerate(batches(train, recipe.size(train.numel()), recipe.steps)):
        loss = F.cross_entropy(outputs(seeds, step), labels[seeds.long()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % every == 0:
            model.eval()
            with torch.no_grad():
                val, test = judge()
            model.train()
            if val > best:
                best, found = val, test
    return found


def right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the rows that are right."""
    return float((logits.argmax(1) == labels).float().mean())


def mlp_accuracy(graph, recipe: Recipe, splits) -> float:
    """Of features alone."""
    x, y, (train, *judged) = graph.ndata["x"], graph.ndata["y"], splits
    model = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], recipe.hidden), torch.nn.ReLU(), torch.nn.Dropout(recipe.dropout),
        torch.nn.Linear(recipe.hidden, graph.num_classes),
    ).to(x.device)  # fmt: skip

    def judge():
        return [right(model(x[ids.long()]), y[ids.long()]) for ids in judged]

    return learnt(model, recipe, train, lambda seeds, step: model(x[seeds.long()]), judge, y)


def sage_accuracy(graph, recipe: Recipe, splits, exact: bool) -> float:
    """With neighbours."""
    x, y, (train, *judged) = graph.ndata["x"], graph.ndata["y"], splits
    model = joestar.nn.GraphSAGE(
        x.shape[1], recipe.hidden, num_layers=2, out_channels=graph.num_classes, dropout=recipe.dropout
    ).to(x.device)
    near, wide = (joestar.NeighborSampler(graph, list(fanouts)) for fanouts in (recipe.fanouts, (WIDE, WIDE)))
    inference = Inference(model, graph, 2) if exact else None

    def logits(sampler, seeds, *key):
        blocks = sampler.sample(graph.keyed(*key), seeds.to(graph.indices.dtype))
        return model(blocks, x[blocks[0].srcs.long()])

    def judge():
        if exact:
            every = inference.run(progress=False)
            return [right(every[ids.long()], y[ids.long()]) for ids in judged]
        return [
            right(torch.cat([logits(wide, part, 1, i) for i, part in enumerate(ids.split(500))]), y[ids.long()])
            for ids in judged
        ]

    return learnt(model, recipe, train, lambda seeds, step: logits(near, seeds, 0, step), judge, y)


def enough(graph, number: int) -> torch.Tensor:
    """The training nodes, and others that are in no split until there are so many."""
    train = graph.train_idx
    if train.numel() >= number:
        return train
    free = torch.ones(graph.num_nodes, dtype=torch.bool, device=train.device)
    for ids in (train, graph.val_idx, graph.test_idx):
        free[ids.long()] = False
    others = free.nonzero().view(-1)
    others = others[torch.randperm(others.numel(), device=others.device)[: number - train.numel()]]
    return torch.cat([train, others.to(train.dtype)])


def measure(name: str, scale: float, options: argparse.Namespace) -> dict:
    """A row of the table."""
    called, shape = shape_of(name, scale)
    start = time.perf_counter()
    graph = planted(shape, options.device)
    made = time.perf_counter() - start
    torch.manual_seed(options.seed)
    recipe = Recipe(batch=options.batch, steps=options.steps)
    train = enough(graph, options.train)
    rest = [ids[: options.judged] for ids in (graph.val_idx, graph.test_idx)]
    exact, small = graph.num_nodes <= options.exact, replace(recipe, hidden=64)
    return {
        "shape": called, "nodes": graph.num_nodes, "classes": graph.num_classes,
        "present": min(shape.classes, -(-shape.nodes // shape.community)), "train": train.numel(),
        "mlp": mlp_accuracy(graph, small, (train, *rest)),
        "sage": sage_accuracy(graph, recipe, (train, *rest), exact),
        "judged on": "all neighbours" if exact else f"{WIDE}, {WIDE}",
        "made": made, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def fits(row: dict) -> bool:
    """Whether it is within the band."""
    return row["mlp"] < BAND[0] and BAND[1] <= row["sage"] <= BAND[2]


def line(row: dict) -> str:
    """Of the Markdown table."""
    cells = [
        row["shape"], f"{row['nodes']:,}", f"{row['train']:,}", f"{row['present']} of {row['classes']}",
        f"{100 * row['mlp']:.1f}", f"{100 * row['sage']:.1f}", row["judged on"], f"{row['seconds']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |" + ("" if fits(row) else " outside the band")


def main() -> int:
    """Runs, prints; 1 if a shape misses the band."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--scale", nargs="+", type=float, default=[1.0], help="of all shapes, or one for each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400, help="at most so many of training")
    parser.add_argument("--train", type=int, default=0, help="at least so many training nodes: small scales have few")
    parser.add_argument("--judged", type=int, default=20_000)
    parser.add_argument("--exact", type=int, default=5_000_000, help="nodes up to which inference is exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scales = options.scale * len(options.shapes) if len(options.scale) == 1 else options.scale
    print("| shape | nodes | training nodes | classes there | MLP % | SAGE % | judged on | s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name, scale in zip(options.shapes, scales, strict=True):
        rows.append(measure(name, scale, options))
        print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(not all(map(fits, rows)))


if __name__ == "__main__":
    sys.exit(main())
