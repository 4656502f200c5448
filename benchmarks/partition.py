"""GAP beside METIS and random parts: edges cut, balance, labels, halo nodes and seconds (docs/partitioning.md).

python benchmarks/partition.py data/*.npz --parts 64 --seeds 10
"""

import argparse
import statistics
import time
from pathlib import Path

import joestar
from joestar.partitioning import facts_of

METHODS = ("gap", "metis", "random")
SPREAD = {"edges cut": "cut_share", "label skew": "skew", "excess": "excess", "surplus": "surplus"}
"""Columns of means and standard deviations over the seeds."""
COLUMNS = ("graph", "method", *SPREAD, "least skew", "cut / METIS", "skew / METIS", "excess / METIS",
           "largest / mean (worst)", "mean halo", "largest halo", "seconds")  # fmt: skip


def measured(graph: joestar.Graph, method: str, parts: int, passes: int, seed: int) -> dict:
    """Facts of one partitioning, and its seconds."""
    start = time.perf_counter()
    made = joestar.partition(graph, parts, method=method, passes=passes, seed=seed)
    seconds = time.perf_counter() - start
    return facts_of(graph, made.assignment, parts).as_dict() | {"seconds": seconds}


def line(name: str, method: str, runs: list[dict], metis: list[dict]) -> str:
    """A line of the table: ratios are those of the means over the seeds."""
    mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    below = {key: statistics.mean(run[key] for run in metis) for key in ("cut", "skew", "excess")}
    cells = [name, method]
    cells += [f"{mean[key]:.3f} ± {statistics.pstdev(run[key] for run in runs):.3f}" for key in SPREAD.values()]
    cells += [f"{mean['least_skew']:.3f}", *(f"{mean[key] / below[key]:.2f}" for key in below)]
    cells += [f"{max(run['balance'] for run in runs):.2f}", f"{mean['halo_mean']:,.0f}", f"{mean['halo_max']:,.0f}"]
    cells.append(f"{mean['seconds']:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=10)
    chosen = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for path in chosen.graphs:
        graph = joestar.load(path, verbose=False)
        runs = {
            method: [measured(graph, method, chosen.parts, chosen.passes, seed) for seed in range(chosen.seeds)]
            for method in METHODS
        }
        for method in METHODS:
            print(line(path.stem, method, runs[method], runs["metis"]), flush=True)


if __name__ == "__main__":
    main()
