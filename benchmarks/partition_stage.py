"""What the partition-based first stage transfers, with and without ahead-of-time sampling (docs/partitioning.md).

python benchmarks/partition_stage.py --scale 0.01 --parts 96 --group 8
python benchmarks/partition_stage.py --shape papers100M --scale 1 --parts 1024 --group 86 --device cuda  # 14 GB
"""

import argparse
import dataclasses
import time

import torch

import joestar
from joestar.bench.planted import SHAPES, planted
from joestar.sampling import NeighborSampler
from joestar.stages import LargeBatch, Partitions

FANOUTS = [15, 10, 5]
ROW, HISTORY = 128 * 4, 2 * 128 * 4
"""Bytes of a node's features, and of its two hidden states."""
CASES = {
    "all of the parts": {},
    "within 3 hops": {"ahead": 3},
    "picked 15, 10, 5": {"ahead": FANOUTS},
    "picked, 5 halo edges per row": {"ahead": FANOUTS, "halo_fanout": 5},
    "picked, 1 % hubs": {"ahead": FANOUTS, "hubs": 0.01},
}


def scaled(name: str, scale: float, device: str):
    """A graph of a shape's degrees, labels and communities, with a share of its nodes, made on a device."""
    shape = SHAPES[name]
    few = dataclasses.replace(shape, nodes=int(shape.nodes * scale), train=int(shape.train * scale), features=1)
    if name == "papers":
        few = dataclasses.replace(few, community=2048)
    return planted(few, device).to("cpu")


def line(name: str, sizes: list, seeds: int, seconds: float) -> str:
    """Means over the macro-batches; megabytes of an epoch per thousand seeds."""
    mean = [sum(getattr(size, part) for size in sizes) / len(sizes) for part in ("nodes", "halo", "rows", "edges")]
    megabytes = sum(size.nbytes(ROW, HISTORY) for size in sizes) / seeds / 1e3
    cells = [name, *(f"{value:,.0f}" for value in mean), f"{megabytes:,.2f}", f"{seconds / len(sizes):.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="papers", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", help="where the graph is made")
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--parts", type=int, default=96)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--macro-batches", type=int, default=3)
    chosen = parser.parse_args()
    graph = scaled(chosen.shape, chosen.scale, chosen.device)
    start = time.perf_counter()
    parts = joestar.partition(graph, chosen.parts, passes=chosen.passes)
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges; {chosen.passes} passes of GAP and the fingerprint in "
          f"{time.perf_counter() - start:.1f} s; {parts.facts(graph).as_dict()}")  # fmt: skip
    print("| what | nodes | halo | rows | edges | MB per 1,000 seeds | s |\n|---|---|---|---|---|---|---|")
    for name, settings in CASES.items():
        hubs = int(settings.get("hubs", 0) * graph.num_nodes)
        stage = Partitions(parts, chosen.group, **(settings | {"hubs": hubs})).prepare(graph)
        start = time.perf_counter()
        macros = [stage.sample((0, 0, index)) for index in range(chosen.macro_batches)]
        seconds = time.perf_counter() - start
        print(line(name, [macro.sizes for macro in macros], sum(len(macro.seeds) for macro in macros), seconds))
    large(graph, len(macros[0].seeds))


def large(graph, seeds: int) -> None:
    """The large-batch stage with as many seeds."""
    sampler, order = NeighborSampler(graph, FANOUTS), torch.randperm(len(graph.train_idx))[:seeds]
    start = time.perf_counter()
    macro = LargeBatch(seeds).sample(graph, sampler, graph.train_idx[order], (0, 0, 0))
    seconds = time.perf_counter() - start
    size = joestar.stages.partitions.Sizes(macro.num_nodes, 0, macro.num_rows, macro.num_edges)
    print(line("large-batch stage", [size], seeds, seconds))


if __name__ == "__main__":
    main()
