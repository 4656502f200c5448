"""Checks of whole training runs, for ``on_gpu.py``: losses of different executions, and memory.

python benchmarks/gpu_checks.py losses --shape small --json losses.json
python benchmarks/gpu_checks.py memory --shape products --json memory.json
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional as F

import joestar
from joestar.bench.measure import PeakMemory
from joestar.bench.planted import planted


def losses(shape: str, device: str, batch: int, steps: int = 50) -> dict:
    """Losses of ``steps`` steps from one seed: padded and exact on the device, exact on the CPU; TF32 off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    graph, found = planted(shape), {}
    batch = min(batch, graph.train_idx.numel() // 4, 256)
    for name, place, execution in (("padded", device, "padded"), ("exact", device, "exact"), ("cpu", "cpu", "exact")):
        torch.manual_seed(0)
        here = graph.to(place)
        net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 64, 3, graph.num_classes, dropout=0.5).to(place)
        sampler = joestar.NeighborSampler(here, [10, 5, 5], seed=1)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        step = joestar.compile(net, sampler, F.cross_entropy, optimizer, execution=execution)
        values, idx = [], graph.train_idx[: steps * batch].to(place)
        while len(values) < steps:
            values += [float(loss) for loss in list(step.epoch(idx, batch))]
        found[name] = values[:steps]
    pairs = (("padded", "exact"), ("padded", "cpu"), ("exact", "cpu"))
    worst = {f"{a} / {b}": max(abs(x - y) / abs(y) for x, y in zip(found[a], found[b], strict=True)) for a, b in pairs}
    return {"losses": found, "largest_relative_difference": worst}


def memory(shape: str, device: str, batch: int, steps: int) -> dict:
    """Bytes that graph and features take, and that training takes beyond them once everything is captured."""
    graph = planted(shape, device)
    held = sum(t.numel() * t.element_size() for t in (graph.indptr, graph.indices, *graph.ndata.values()))
    peak = PeakMemory(torch.device(device))
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 128, 3, graph.num_classes, dropout=0.5).to(device)
    sampler = joestar.NeighborSampler(graph, [15, 10, 5], seed=1)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3))
    batch = min(batch, graph.train_idx.numel() // 4)
    idx = graph.train_idx[: batch * steps]
    list(step.epoch(idx, batch))
    warm = peak.bytes()
    peak.forget()
    list(step.epoch(idx, batch))
    found = {"graph_and_features": held, "while_compiling": warm, "steady_state": peak.bytes()}
    if device == "cuda":
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    for name, value in found.items():
        print(f"{name:20} {value / 2**30:9.3f} GiB")
    return found


def main() -> None:
    """Prints what was found and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("losses", "memory"))
    parser.add_argument("--shape", default="small")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200, help="of the check of memory")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.check == "losses":
        found = losses(options.shape, options.device, options.batch_size)
    else:
        found = memory(options.shape, options.device, options.batch_size, options.steps)
    options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
