"""Test accuracy of Joestar against PyG: same graphs, splits, recipe, fanouts and seeds; both columns printed.

    python benchmarks/accuracy.py DATASET.npz ... [--models sage gcn gat] [--seeds 5] [--epochs 30] [--device cuda]

Recipe: 2 layers, hidden 64 (GAT: 4 heads x 16), dropout 0.5, Adam lr 0.01 and weight decay 1e-5, batch 1000, fanouts
10,10 in training and evaluation; test accuracy at the epoch of best validation accuracy. Seeds are paired: the same
seed initialises both sides, and both start from the same weights.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from baselines import MODELS, EagerTrainer

import joestar

FANOUTS, HIDDEN, BATCH, EVAL_BATCH = [10, 10], 64, 1000, 4096
OURS = {"sage": joestar.nn.GraphSAGE, "gcn": joestar.nn.GCN, "gat": joestar.nn.GAT, "gin": joestar.nn.GIN}


def build(kind: dict, name: str, graph) -> torch.nn.Module:
    """A model of either library; the constructors agree."""
    options = {"heads": 4} if name == "gat" else {}
    classes = int(graph.ndata["y"].max()) + 1
    features = graph.ndata["x"].shape[1]
    return kind[name](features, HIDDEN, num_layers=2, out_channels=classes, dropout=0.5, **options).to(graph.device)


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    """The recipe's optimizer."""
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)


def run_pyg(graph, name: str, seed: int, epochs: int, weights: dict) -> dict:
    """One PyG run from the given weights."""
    torch.manual_seed(seed)
    model = build(MODELS, name, graph)
    model.load_state_dict(weights)
    trainer = EagerTrainer(graph, model, FANOUTS, adam(model))
    best, test, start = -1.0, 0.0, time.perf_counter()
    for _ in range(epochs):
        trainer.epoch(graph.train_idx, BATCH)
        val = trainer.accuracy(graph.val_idx, EVAL_BATCH)
        if val > best:
            best, test = val, trainer.accuracy(graph.test_idx, EVAL_BATCH)
    return {"test": test, "val": best, "seconds": time.perf_counter() - start}


class Joestar:
    """Joestar's side: compiled once per dataset and model, started over for every seed."""

    def __init__(self, graph, name: str, backend: str):
        self.graph = graph
        self.model = build(OURS, name, graph)
        sampler = joestar.NeighborSampler(graph, FANOUTS)
        self.step = joestar.compile(self.model, sampler, F.cross_entropy, adam(self.model), backend=backend)

    def run(self, seed: int, epochs: int, weights: dict) -> dict:
        """One run from the given weights."""
        graph, step = self.graph, self.step
        self.model.load_state_dict(weights)
        step.restart(seed)
        best, test, start = -1.0, 0.0, time.perf_counter()
        for _ in range(epochs):
            for _ in step.epoch(graph.train_idx, BATCH):
                pass
            val = step.evaluate(graph.val_idx, EVAL_BATCH)["accuracy"]
            if val > best:
                best, test = val, step.evaluate(graph.test_idx, EVAL_BATCH)["accuracy"]
        return {"test": test, "val": best, "seconds": time.perf_counter() - start}


def compare(path: str, name: str, args) -> dict:
    """All seeds of one dataset and model, both sides."""
    graph = joestar.load(path).to(args.device)
    ours_side = Joestar(graph, name, args.backend)
    rows = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        weights = {k: v.clone() for k, v in build(MODELS, name, graph).state_dict().items()}
        ours = ours_side.run(seed, args.epochs, weights)
        theirs = run_pyg(graph, name, seed, args.epochs, weights)
        rows.append({"seed": seed, "joestar": ours, "pyg": theirs})
        print(f"  {graph.name} {name} seed {seed}: joestar {ours['test']:.4f} pyg {theirs['test']:.4f}", flush=True)
    counters = ours_side.step.counters
    return {
        "dataset": graph.name,
        "model": name,
        "runs": rows,
        "fallbacks": counters.fallbacks,
        "steps": counters.steps,
    }


def line(result: dict) -> str:
    """One row of the Markdown table."""
    cells = [result["dataset"], result["model"]]
    means = []
    for side in ("joestar", "pyg"):
        values = [100 * run[side]["test"] for run in result["runs"]]
        means.append(statistics.fmean(values))
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells.append(f"{means[-1]:.2f} ± {spread:.2f}")
    return "| " + " | ".join([*cells, f"{means[0] - means[1]:+.2f}"]) + " |"


def main() -> None:
    """Parses arguments, runs, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", help="paths of .npz graphs (see joestar.data.npz)")
    parser.add_argument("--models", nargs="+", default=["sage", "gcn", "gat"], choices=sorted(OURS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor", choices=joestar.api.BACKENDS)
    parser.add_argument("--out", type=Path, help="JSON file for every run")
    args = parser.parse_args()
    results = [compare(path, name, args) for path in args.datasets for name in args.models]
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor()
    print(f"\n{machine}; torch {torch.__version__}; {args.seeds} paired seeds, {args.epochs} epochs")
    print("| dataset | model | Joestar % | PyG % | difference |\n|---|---|---|---|---|")
    print("\n".join(line(result) for result in results))
    if args.out:
        args.out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "results": results}, indent=2))


if __name__ == "__main__":
    main()
