"""Features on every GPU, sharded over the GPUs, or in host memory: reads of rows and whole epochs, a line of JSON each.

    torchrun --nproc-per-node 2 benchmarks/shards.py --hot 0,8GiB                         # papers' shape in fp32, 57 GB
    torchrun --nproc-per-node 2 benchmarks/shards.py --shape mag240m-c --scale 0.4 --dtype float16 --tiers sharded,host
    torchrun --nproc-per-node 2 benchmarks/shards.py --device cpu --shape tiny --batch 20 --backend eager --hot 0,12KiB

Structure is that of a planted graph, on every GPU; features are noise made in pieces, so that no GPU has to hold all.
Hot rows are those that ``joestar.compile`` chooses; each amount of ``--hot`` is a line for ``sharded`` and ``host``.

``seconds``: of every epoch, wall clock, from before its first step until all ranks are done, the first (which compiles)
left out. ``read_us``, ``read_gbps``: rows of a real batch read by the store alone, all ranks at the same time, captured
in a graph of 20 on a GPU, the median of 20 replays; bytes of all its rows over that time. ``rows``: of that batch;
``hot_share``: of these, held by this GPU as hot ones. ``load_s``: of making the store. ``plan``: what the planner says.
``prefetched``: steps whose rows were made ahead. All of rank 0; ``peak_GiB``: what PyTorch's allocator had at most,
without shards.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.data.planted import shape_of
from joestar.graph_api.row_source import source_of

READS = 20
LISTS = ("hot", "tiers", "prefetch", "device", "plan")


class Noise:
    """Features that are functions of row and column, made where they are asked for."""

    def __init__(self, nodes: int, width: int, dtype: torch.dtype, device: torch.device):
        self.shape, self.dtype, self.device = (nodes, width), dtype, device

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, last, _ = rows.indices(self.shape[0])
        row = torch.arange(first, last, device=self.device)[:, None]
        mixed = (row * 40_503 + torch.arange(self.shape[1], device=self.device) * 9_973) % 2_001
        return ((mixed - 1_000) / 1_000).to(self.dtype)


def main() -> None:
    """Times one tier after the other."""
    options = _options()
    group = joestar.distributed.init(device=options.device)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device = device if group is None else group.device
    torch.backends.cuda.matmul.allow_tf32 = True
    _, shape = shape_of(options.shape, options.scale)
    width, dtype = options.features or shape.features, getattr(torch, options.dtype)
    graph = planted(dataclasses.replace(shape, features=1), device)
    del graph.ndata["x"]
    noise = Noise(graph.num_nodes, width, dtype, device)
    for tier in options.tiers.split(","):
        for hot in options.hot.split(",") if tier != "replicated" else ["0"]:
            for ahead in options.prefetch.split(","):
                found = _measured(tier, None if hot == "0" else hot, ahead == "1", graph, noise, group, options)
                if joestar.distributed.is_first():
                    print(json.dumps(found), flush=True)


def _measured(tier: str, hot: str | None, ahead: bool, graph, noise: Noise, group, options) -> dict:
    device = noise.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    if tier == "replicated":
        graph.ndata["x"] = _whole(noise)
    else:
        graph.ndata["x"] = joestar.store.shard(
            noise, hot, place={"sharded": "peers", "host": "host"}[tier], device=device
        )
    _wait(device)
    load = time.perf_counter() - start
    source, step = source_of(graph.ndata, "x"), _step(graph, noise, ahead, options)
    seconds = [_epoch(step, graph.train_idx, options.batch, group, device) for _ in range(options.epochs + 1)][1:]
    steps = len(step.epoch(graph.train_idx, options.batch))
    ids = _ids(step, graph, options.batch)
    microseconds = _read_us(graph.ndata["x"], source, ids, group, device)
    row = noise.shape[1] * noise.dtype.itemsize
    slots = None if source is None else source.slot_of
    given = {name: value for name, value in vars(options).items() if name not in LISTS}
    found = {
        "tier": tier, "hot": hot, "prefetch": ahead, "world": joestar.distributed.world_size(), "device": str(device),
        "torch": torch.__version__, **given, "nodes": noise.shape[0], "row_bytes": row, "load_s": load,
        "seconds": seconds, "median": statistics.median(seconds), "steps": steps, "rows": ids.numel(),
        "read_us": microseconds, "read_gbps": ids.numel() * row / microseconds / 1e3,
        "hot_rows": 0 if source is None or source.hot is None else source.hot.numel(),
        "hot_share": None if slots is None else float((slots[ids.long()] >= 0).double().mean()),
        "overflows": step.counters.overflows, "prefetched": step.counters.prefetched,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
    if options.plan and tier != "replicated":
        found["plan"] = str(joestar.store.plan_features(graph, step.sampler, options.batch))
    if group is not None:
        group.exchange("the end of a tier")
        group.free_graphs()
    del graph.ndata["x"], step
    if hasattr(source, "close"):
        source.close()
    del source
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _whole(noise: Noise) -> torch.Tensor:
    out = torch.empty(noise.shape, dtype=noise.dtype, device=noise.device)
    for first in range(0, noise.shape[0], 1 << 20):
        out[first : first + (1 << 20)] = noise[first : first + (1 << 20)]
    return out


def _step(graph, noise: Noise, ahead: bool, options):
    torch.manual_seed(0)
    fanouts = [int(n) for n in options.fanouts.split(",")]
    make = {"sage": joestar.nn.GraphSAGE, "gat": joestar.nn.GAT}[options.model]
    more = {"heads": 4} if options.model == "gat" else {}
    model = make(noise.shape[1], options.hidden, len(fanouts), graph.num_classes, dropout=0.5, **more).to(noise.device)
    sampler = joestar.NeighborSampler(graph, fanouts, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    autocast = None if noise.dtype == torch.float32 else noise.dtype
    settings = {"backend": options.backend, "autocast": autocast, "batch_size": options.batch, "prefetch": ahead}
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, **settings)


def _ids(step, graph, batch: int) -> torch.Tensor:
    """What a batch of this rank needs."""
    random = torch.Generator("cpu").manual_seed(joestar.distributed.rank())
    chosen = torch.randperm(graph.train_idx.numel(), generator=random, device="cpu")[:batch].to(graph.device)
    return step.sampler.sample(graph.keyed(1, 0, joestar.distributed.rank()), graph.train_idx[chosen])[0].srcs


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


def _read_us(x: torch.Tensor, source, ids: torch.Tensor, group, device: torch.device) -> float:
    """Microseconds in which the rows of a batch are read, by all ranks at the same time."""

    def reads() -> None:
        for _ in range(READS):
            torch.index_select(x, 0, ids) if source is None else source.rows(ids)

    reads()
    launch = reads
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            reads()
        launch = graph.replay
    found = []
    for _ in range(READS):
        _wait(device)
        if group is not None:
            group.exchange("a read that is timed")
        start = time.perf_counter()
        launch()
        _wait(device)
        found.append((time.perf_counter() - start) * 1e6 / READS)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="papers", help="of joestar.bench.planted")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--features", type=int, default=0, help="columns; by default the shape's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--tiers", default="replicated,sharded,host")
    parser.add_argument("--hot", default="0,8GiB", help="bytes of hot rows on every GPU; several after commas")
    parser.add_argument("--prefetch", default="0", help="1: rows of the next step are gathered ahead; or 0,1")
    parser.add_argument("--model", default="sage", choices=("sage", "gat"))
    parser.add_argument("--fanouts", default="15,10,5")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1000, help="seeds per step and process")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--plan", action="store_true", help="what the planner says, too")
    parser.add_argument("--device", default=None, choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
