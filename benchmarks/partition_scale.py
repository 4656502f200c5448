"""GAP at the size of papers100M: seconds per phase, peak memory, and what the parts are worth (docs/partitioning.md).

On a machine with a GPU, which makes the graph in seconds (13 GB of ids; the GPU is not used for anything else):

    python benchmarks/partition_scale.py --device cuda

Here, a part of it:

    python benchmarks/partition_scale.py --scale 0.12 --threads 2 --compare none
"""

import argparse
import dataclasses
import json
import time
from contextlib import contextmanager

import torch

import joestar
from joestar import _native
from joestar.bench.measure import PeakMemory
from joestar.bench.planted import SHAPES, planted
from joestar.partitioning import facts_of
from joestar.partitioning.partitioning import fingerprint_of


def structure(shape: str, scale: float, device: str) -> joestar.Graph:
    """A planted graph with labels and splits, on the CPU; its features are one column."""
    whole = SHAPES[shape]
    few = {key: max(1, int(getattr(whole, key) * scale)) for key in ("nodes", "train")}
    return planted(dataclasses.replace(whole, **few, val=0, test=0, features=1), device).to("cpu")


@contextmanager
def timed(into: dict, name: str):
    """Notes seconds of wall clock and of all threads together."""
    wall, busy = time.perf_counter(), time.process_time()
    yield
    into[name] = {"s": round(time.perf_counter() - wall, 2), "cpu_s": round(time.process_time() - busy, 2)}
    print(f"{name}: {into[name]['s']:.1f} s, {into[name]['cpu_s']:.1f} s of all threads", flush=True)


def measured(graph: joestar.Graph, method: str, parts: int, passes: int) -> dict:
    """Seconds and facts of one partitioning, and its peak memory in GB: beside what was there, and in all."""
    found = {"method": method, "parts": parts, "passes": passes}
    peak = PeakMemory(torch.device("cpu"))
    peak.forget()
    with timed(found, f"{method}, fingerprint included"):
        made = joestar.partition(graph, parts, method=method, passes=passes)
    found |= {"beside_gb": round(peak.bytes() / 1e9, 2), "peak_gb": round((peak.before + peak.bytes()) / 1e9, 2)}
    with timed(found, "facts"):
        facts = facts_of(graph, made.assignment, parts)
    return found | facts.as_dict()


def main(arguments: list[str] | None = None) -> list[dict]:
    """Prints a line of JSON per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="papers100M", choices=list(SHAPES))
    parser.add_argument("--scale", type=float, default=1.0, help="as many nodes times")
    parser.add_argument("--device", default="cpu", help="where the graph is made")
    parser.add_argument("--parts", type=int, default=1024)
    parser.add_argument("--passes", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compare", default="random", choices=["random", "none"])
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        _native.set_num_threads(chosen.threads)
        torch.set_num_threads(chosen.threads)
    phases: dict = {}
    with timed(phases, "make the graph"):
        graph = structure(chosen.shape, chosen.scale, chosen.device)
    size = (graph.indptr.nbytes + graph.indices.nbytes) / 1e9
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {size:.2f} GB, {_native.num_threads()} threads")
    with timed(phases, "fingerprint alone"):
        fingerprint_of(graph)
    todo = [("gap", passes) for passes in chosen.passes] + [("random", 0)] * (chosen.compare == "random")
    found = []
    for method, passes in todo:
        found.append(measured(graph, method, chosen.parts, passes or 1))
        print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    main()
