"""FuseSampleAgg's grid: two-hop sample-aggregate with a light head, fused against unfused, to CSV.

After section 5 of the paper: fanouts 10-10, 15-10, 25-10; batch 1024; mixed precision on and off; hidden 256, AdamW; 5
warm-up steps, then 30 timed ones, each synchronised before and after; medians over three seeds. Features stay in
float32; mixed precision is the head's. "fused" is ``joestar.ops.sample_aggregate``; "unfused" draws both hops in torch
ops, gathers the features of every sampled edge and reduces them in two steps. Peak memory is what is allocated beyond
graph, features and model. With ``--learn-features`` the features get (dense) gradients, and "fused, saved picks"
replays stored picks instead of drawing them again.

    python benchmarks/fuse_sample_agg.py --shape products --csv fuse_sample_agg.csv
"""

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import joestar
from joestar.bench.baselines import TorchSampler
from joestar.bench.planted import planted

FANOUTS = ((10, 10), (15, 10), (25, 10))
COLUMNS = (
    *("graph", "device", "torch", "joestar", "variant", "fanouts", "batch", "amp", "learn_features"),
    *("step_ms", "p20_ms", "p80_ms", "edges_per_s", "peak_mib", "repeats"),
)


class Head(nn.Module):
    """Own and aggregated features to classes."""

    def __init__(self, width: int, classes: int, hidden: int = 256):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * width, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, own: Tensor, aggregated: Tensor) -> Tensor:
        return self.layers(torch.cat([own, aggregated], 1))


def fused(graph, fanouts: tuple[int, int], replay: str = "recomputed") -> Callable[[Tensor, int], Tensor]:
    """Aggregated features of some seeds at a step, by the fused operator."""
    x, key = graph.ndata["x"], torch.tensor([1, 0, 0], device=graph.indptr.device)

    def run(seeds: Tensor, step: int) -> Tensor:
        key[2] = step
        return joestar.ops.sample_aggregate(graph, x, seeds, fanouts, key=key, replay=replay)

    return run


def unfused(graph, fanouts: tuple[int, int]) -> Callable[[Tensor, int], Tensor]:
    """The same in torch ops; samples, and features of every edge, are stored."""
    sampler, x = TorchSampler(graph.indptr, graph.indices, list(fanouts)), graph.ndata["x"]

    def mean(rows: Tensor, row: Tensor, count: int) -> Tensor:
        total = rows.new_zeros((count, rows.shape[1])).index_add(0, row, rows)
        return total / torch.bincount(row, minlength=count).clamp(min=1)[:, None]

    def run(seeds: Tensor, step: int) -> Tensor:
        row, first = sampler.neighbours(seeds.long(), fanouts[0])
        inner, second = sampler.neighbours(first, fanouts[1])
        return mean(mean(x[second], inner, first.numel()), row, seeds.numel())

    return run


def measure(graph, aggregate, batch: int, amp: bool, steps: int, warm_up: int, seed: int) -> tuple[list[float], float]:
    """(milliseconds of every timed step, peak MiB beyond what is allocated at the start)."""
    device, x, y = graph.indptr.device, graph.ndata["x"], graph.ndata["y"]
    torch.manual_seed(seed)
    head = Head(x.shape[1], graph.num_classes).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), 3e-3, fused=device.type == "cuda")
    order = graph.train_idx[torch.randperm(graph.train_idx.numel(), device=device)]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times, before = [], 0
    for step in range(warm_up + steps):
        if step == warm_up and device.type == "cuda":
            optimizer.zero_grad(set_to_none=True)
            x.grad = None
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        first = step * batch % max(1, order.numel() - batch)
        seeds = order[first : first + batch]
        wait()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        aggregated = aggregate(seeds, step)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = head(x[seeds.long()], aggregated)
        F.cross_entropy(logits.float(), y[seeds.long()]).backward()
        optimizer.step()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else float("nan")
    return times[warm_up:], peak


VARIANTS = {
    "unfused": unfused,
    "fused": fused,
    "fused, saved picks": lambda graph, fanouts: fused(graph, fanouts, "saved"),
}


def run(
    shape: str, device: str, batch: int, steps: int, warm_up: int, repeats: int, learn_features: bool, grid=FANOUTS
) -> list[dict]:
    """Every cell of the grid; where memory does not suffice, ``step_ms`` says so."""
    graph, rows = planted(shape, device), []
    graph.ndata["x"].requires_grad_(learn_features)
    variants = {name: VARIANTS[name] for name in VARIANTS if learn_features or name != "fused, saved picks"}
    place = torch.device(device)
    about = {
        "graph": graph.name,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "joestar": joestar.__version__,
        "batch": batch,
        "learn_features": "yes" if learn_features else "no",
        "repeats": repeats,
    }
    for fanouts, amp, (name, make) in itertools.product(grid, (False, True), variants.items()):
        row = {**about, "variant": name, "fanouts": "-".join(map(str, fanouts)), "amp": "on" if amp else "off"}
        try:
            runs = [measure(graph, make(graph, fanouts), batch, amp, steps, warm_up, seed) for seed in range(repeats)]
        except torch.cuda.OutOfMemoryError:
            rows.append({**row, "step_ms": "out of memory"})
            continue
        times = sorted(time for milliseconds, _ in runs for time in milliseconds)
        medians = [statistics.median(milliseconds) for milliseconds, _ in runs]
        median = statistics.median(medians)
        row |= {"step_ms": round(median, 4), "p20_ms": round(times[len(times) // 5], 4)}
        row |= {"p80_ms": round(times[len(times) * 4 // 5], 4), "peak_mib": round(max(peak for _, peak in runs), 1)}
        row["edges_per_s"] = round(batch * fanouts[0] * (1 + fanouts[1]) / median * 1e3)
        rows.append(row)
        cell = f"{row['fanouts']:>6} amp {row['amp']:<4}{name:<20}"
        print(f"{cell}{median:>10.3f} ms{row['peak_mib']:>10.1f} MiB", flush=True)
    return rows


def main() -> None:
    """Runs the grid and writes the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="products")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learn-features", action="store_true", help="gradients for the features as well")
    parser.add_argument("--csv", default="fuse_sample_agg.csv")
    args = parser.parse_args()
    rows = run(args.shape, args.device, args.batch, args.steps, args.warm_up, args.repeats, args.learn_features)
    with open(args.csv, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
