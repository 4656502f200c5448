"""Instructions per sampled edge, counted by valgrind: does the cost of sampling depend on the size of the graph?

Runs the C++ benchmark (``csrc/bench``) on planted graphs of two sizes with a few calls more and a few calls less; the
difference leaves out the making of the graph. Counts do not depend on what else the machine does. Run by
``make callgrind``; fails if the costs are more than 10 % apart.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS = (1, 4)
CASES = {"sampling": "sample, hop", "relabelling": "compact, hop", "both": "batch"}
LIMIT = 0.10


def instructions(bench: Path, nodes: int, only: str, calls: int) -> tuple[int, int]:
    """(instructions of the whole run, edges of one call of every case)."""
    with tempfile.TemporaryDirectory() as folder:
        profile, table = Path(folder) / "callgrind.out", Path(folder) / "table.json"
        command = [
            "valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={profile}", str(bench), "--threads", "1",
            "--nodes", str(nodes), "--only", only, "--calls", str(calls), "--json", str(table),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = re.search(r"^(?:summary|totals): (\d+)", profile.read_text(encoding="utf-8"), re.MULTILINE)
        if found is None:
            raise RuntimeError(f"expected a line 'summary: N' in callgrind's output for {only!r}, found none")
        rows = json.loads(table.read_text(encoding="utf-8"))["rows"]
    return int(found[1]), sum(row["edges"] for row in rows)


def per_edge(bench: Path, nodes: int, only: str) -> float:
    """Instructions per edge of the cases whose name contains ``only``."""
    (few, edges), (many, _) = (instructions(bench, nodes, only, calls) for calls in CALLS)
    return (many - few) / (CALLS[1] - CALLS[0]) / edges


def main() -> None:
    """Prints the table; exit status 1 if a cost grows by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", type=Path, default=Path("build/bench/csrc/bench/bench_kernels"))
    parser.add_argument("--nodes", type=int, nargs=2, default=(20_000, 200_000))
    args = parser.parse_args()
    small, large = args.nodes
    print(f"instructions per edge{small:>14,} nodes{large:>14,} nodes    change")
    apart = []
    for name, only in CASES.items():
        costs = [per_edge(args.bench, nodes, only) for nodes in (small, large)]
        change = costs[1] / costs[0] - 1
        print(f"{name:<21}{costs[0]:>20.1f}{costs[1]:>20.1f}{change:>+10.1%}", flush=True)
        if abs(change) > LIMIT:
            apart.append(name)
    if apart:
        sys.exit(f"more than {LIMIT:.0%} apart: {', '.join(apart)}")


if __name__ == "__main__":
    main()
