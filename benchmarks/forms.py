"""Layers as people write them, under a training loop: milliseconds per step of whole epochs by the wall clock.

The layers are those of ``tests/fusion/layer_forms.py`` (three of them, dropout and an activation in between, a
classifier) and the models of ``examples/user_models``. Rows with ``choices`` are the same model under other forms that
are correct; those without have the forms that Joestar takes by itself. An epoch is ``for loss in step.epoch(...)`` from
its call until the last loss is there; the first two are not counted.

    python benchmarks/forms.py --device cuda --shape products --tf32 --out forms.json
    python benchmarks/forms.py --forms FiLM,GCNII --user none --epochs 1              # on a CPU
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.measure import PeakMemory
from joestar.bench.planted import planted
from joestar.bench.setting import machine
from joestar.bench.user_models import FOLDER, example
from joestar.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fusion.layer_forms import FORMS, Net

WEIGHTED = "GCNII, self-loops, picks by weight"
TIMED = (
    "SAGE, ReLU", "SAGE, ELU", "SAGE, GELU and LayerNorm", "SAGE, SiLU and BatchNorm", "cat-SAGE, `lin(cat([x, agg]))`",
    "SAGE with residuals", "FiLM", "gates per edge", "GCNII", "GCNII, self-loops", WEIGHTED, "mean and deviation",
    "power mean", "PNA",
)  # fmt: skip
USER = ("dot_attention", "softmax_aggregation", "gat_edges", "gatv2", "edge_features")
FANOUTS, HIDDEN, LAYERS, BATCH = [15, 10, 5], 128, 3, 1000


def timed(net: torch.nn.Module, sampler, options: argparse.Namespace, **chosen) -> tuple[dict, object]:
    """(What was measured, the step) of a model."""
    graph, device = sampler.graph, torch.device(options.device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, prefetch=options.prefetch, **chosen)
    memory, seconds = PeakMemory(device), []
    for epoch in range(2 + options.epochs):
        if epoch == 2:
            memory.forget()
        start = time.perf_counter()
        *_, last = step.epoch(graph.train_idx, BATCH)
        last = float(last)
        seconds.append(time.perf_counter() - start)
    steps = -(-graph.train_idx.numel() // BATCH)
    row = {
        "ms": 1e3 * statistics.median(seconds[2:]) / steps, "epochs": seconds, "gib": memory.bytes() / 2**30,
        "redone": step.report().counters.fallbacks, "loss": last,
    }  # fmt: skip
    return row, step


def forms(options: argparse.Namespace):
    """Rows of layers."""
    graph = planted(options.shape, options.device)
    for name in options.forms:
        layer, settings = FORMS["GCNII, self-loops" if name == WEIGHTED else name]
        torch.manual_seed(0)
        net = Net(layer, graph.ndata["x"].shape[1], HIDDEN, graph.num_classes, layers=LAYERS, **settings)
        weights = {}
        if name == WEIGHTED:
            graph.edata["w"] = torch.rand(graph.num_edges, device=graph.device) + 0.1
            weights = {"probs": "w"}
        yield name, "", timed(net.to(graph.device), joestar.NeighborSampler(graph, FANOUTS, **weights), options)[0]


def users(options: argparse.Namespace):
    """Rows of user models: as they come, and with every choice of how edges are computed made the other way."""
    for name in options.user:
        graph, module = planted(options.shape, options.device), example(FOLDER, name)
        more = module.prepare(graph) if hasattr(module, "prepare") else {}
        chosen: dict = {}
        for turn in ("", "other"):
            torch.manual_seed(0)
            net = module.Net(graph.ndata["x"].shape[1], HIDDEN, LAYERS, graph.num_classes, 0.5, **more)
            sampler = joestar.NeighborSampler(graph, FANOUTS)
            row, step = timed(net.to(graph.device), sampler, options, choices=chosen or None)
            yield name, ", ".join(f"{key}={value}" for key, value in chosen.items()), row
            sites = step.report().programs[0].sites
            for kind in ("message:", "softmax:"):  # messages of a softmax have no place of their own
                other = {
                    site.key: next(option for option in site.options if option != site.taken)
                    for site in sites if site.key.startswith(kind)
                }  # fmt: skip
                chosen = other or chosen
            if not chosen or turn:
                break


def main() -> None:
    """Measures, prints a line per row as soon as it is there, and writes the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--tf32", action="store_true", help="products may use TF32")
    parser.add_argument("--prefetch", action="store_true", help="batches a step ahead")
    parser.add_argument("--forms", default=";".join(TIMED), help="names by ';', or none")
    parser.add_argument("--user", default=",".join(USER), help="names by ',', or none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="forms.json")
    options = parser.parse_args()
    options.forms = [] if options.forms == "none" else options.forms.split(";")
    options.user = [] if options.user == "none" else options.user.split(",")
    if unknown := set(options.forms) - {*FORMS, WEIGHTED}:
        raise ConfigError(f"--forms: {', '.join(sorted(unknown))} is none of {'; '.join((*FORMS, WEIGHTED))}.")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    rows = []
    for make in (forms, users):
        for name, chosen, row in make(options):
            rows.append({"model": name, "choices": chosen, **row})
            found = f"{row['ms']:9.3f} ms/step {row['gib']:6.2f} GiB, {row['redone']} redone"
            print(f"{name:36} {found}  {chosen}", flush=True)
            text = json.dumps({"machine": machine(torch.device(options.device)), "rows": rows}, indent=1)
            Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
