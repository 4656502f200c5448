"""GAP beside random parts and METIS: edges cut, balance, labels, halo nodes and seconds (docs/partitioning.md).

python benchmarks/partition.py data/*.npz --parts 64
"""

import argparse
import time
from pathlib import Path

import joestar
from joestar.partitioning import facts_of

COLUMNS = "graph, method, edges cut, cut / METIS, largest / mean, label skew, surplus, mean halo, largest halo, seconds"


def rows_of(path: Path, parts: int, passes: int, seed: int) -> list[str]:
    """A line of the table per method; METIS first, so that cuts can be compared with its."""
    graph = joestar.load(path, verbose=False)
    lines, reference = {}, None
    for method in ("metis", "gap", "random"):
        start = time.perf_counter()
        made = joestar.partition(graph, parts, method=method, passes=passes, seed=seed)
        seconds = time.perf_counter() - start
        facts = facts_of(graph, made.assignment, parts).as_dict()
        reference = reference or facts["cut"]
        cells = [path.stem, method, f"{facts['cut_share']:.1%}", f"{facts['cut'] / reference:.2f}"]
        cells += [f"{facts['balance']:.2f}", f"{facts['skew']:.3f}", f"{facts['surplus']:.3f}"]
        cells += [f"{facts['halo_mean']:,.0f}", f"{facts['halo_max']:,}", f"{seconds:.2f}"]
        lines[method] = f"| {' | '.join(cells)} |"
    return [lines[method] for method in ("gap", "metis", "random")]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(f"| {COLUMNS.replace(', ', ' | ')} |")
    print(f"|{'---|' * (COLUMNS.count(',') + 1)}")
    for path in chosen.graphs:
        for line in rows_of(path, chosen.parts, chosen.passes, chosen.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
