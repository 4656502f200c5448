"""Seconds per epoch on one and several GPUs: one command per number of processes, rank 0 prints a line of JSON.

    python benchmarks/ranks.py                                        # one GPU
    torchrun --nproc-per-node 2 benchmarks/ranks.py                   # two, with as many seeds per step each
    torchrun --nproc-per-node 2 benchmarks/ranks.py --device cpu --shape tiny --batch 20 --backend eager

``seconds``: of every epoch, wall clock from before its first step until all ranks are done, the first (which compiles)
left out; ``steps``, ``seeds_per_second``; ``reduced_bytes``: of the buffer that is summed in every step;
``reduce_us``: of that sum alone, captured in a graph of 20 on a GPU, the median of 20 replays; ``share``: of a step's
time; ``peak_GiB``: of rank 0's device. Speed-up: (seconds on 1 GPU) / (seconds on N), over the same seeds.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted

SUMS = 20


def main() -> None:
    """Trains, and prints."""
    options = _options()
    group = joestar.distributed.init(device=options.device)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cuda.matmul.allow_tf32 = True
    graph = planted(options.shape, device, scale=options.scale)
    torch.manual_seed(0)
    fanouts = [int(n) for n in options.fanouts.split(",")]
    make = {"sage": joestar.nn.GraphSAGE, "gat": joestar.nn.GAT}[options.model]
    more = {"heads": 4} if options.model == "gat" else {}
    model = make(graph.ndata["x"].shape[1], options.hidden, len(fanouts), graph.num_classes, dropout=0.5, **more)
    model = model.to(device)
    sampler = joestar.NeighborSampler(graph, fanouts, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend=options.backend)
    seconds = [_epoch(step, graph.train_idx, options.batch, group, device) for _ in range(options.epochs + 1)][1:]
    steps = len(step.epoch(graph.train_idx, options.batch))
    median = statistics.median(seconds)
    found = {
        "world": joestar.distributed.world_size(), "device": str(device), "torch": torch.__version__, **vars(options),
        "seconds": seconds, "median": median, "steps": steps, "seeds_per_second": len(graph.train_idx) / median,
        "overflows": step.counters.overflows,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
    if group is not None:
        size = step._runner.ranks.reduction.bytes
        microseconds = _sum_us(group, size, device)
        share = microseconds * steps / (median * 1e6)
        found |= {"reduced_bytes": size, "reduce_us": microseconds, "share": share}
    if joestar.distributed.is_first():
        print(json.dumps(found), flush=True)


def _epoch(step, idx, batch: int, group, device: torch.device) -> float:
    _wait(device)
    if group is not None:
        group.exchange("an epoch that is timed")
    start = time.perf_counter()
    for loss in step.epoch(idx, batch):
        last = loss
    float(last)
    _wait(device)
    if group is not None:
        group.exchange("the end of an epoch that is timed")
    return time.perf_counter() - start


def _sum_us(group, size: int, device: torch.device) -> float:
    """Microseconds of the sum over the ranks of so many bytes."""
    flat = torch.zeros(size // 4, device=device)
    group.exchange("the timing of sums")

    def sums() -> None:
        for _ in range(SUMS):
            group.add_up(flat)

    sums()
    launch = sums
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sums()
        launch = graph.replay
    found = []
    for _ in range(SUMS):
        _wait(device)
        start = time.perf_counter()
        launch()
        _wait(device)
        found.append((time.perf_counter() - start) * 1e6 / SUMS)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="products", help="of joestar.bench.planted")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--model", default="sage", choices=("sage", "gat"))
    parser.add_argument("--fanouts", default="15,10,5")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1000, help="seeds per step and process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default=None, choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
