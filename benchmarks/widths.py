"""Training at any width of the features: seconds to the first step with empty caches, then milliseconds per step.

A two-layer GraphSAGE (fanouts 15, 10, hidden 128, batch 1000) on a planted graph of 200,000 nodes. Every width has a
process and cache folders (Triton's, Inductor's, Joestar's) of its own. ``--jobs`` processes compile beside each other,
which the seconds to the first step include; steps are timed one process after the other. A width that fails is a row.

    python benchmarks/widths.py --out widths.json
    python benchmarks/widths.py --widths 100,6805 --jobs 1              # nothing else runs while a width compiles
    python benchmarks/widths.py --device cpu --nodes 2000 --widths 1,37 # for this script's own sake

Columns: ``first``, seconds from ``joestar.compile`` until the first loss is there (imports and graph not included);
``ms/step``, the median, and its percentiles in the JSON; ``MB``, of a step by ``joestar.bench.step.logical_bytes``, and
as ``TB/s``; ``share``, the time of a device copy of as many bytes over that of a step (rows that several destinations
read count every time, though they come from the cache then: more than 100 % is possible); ``order``, of the layers.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = "1,3,10,100,602,745,4714,6805,8189,20000"
FANOUTS, HIDDEN, BATCH = [15, 10], 128, 1000
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "JOESTAR_CACHE": "joestar"}


# --- a process of one width ---


def measure(width: int, options: argparse.Namespace) -> None:
    """Prints a line once the first step is done, waits for a line, and prints what the timed steps took."""
    import torch
    from torch.nn import functional as F

    import joestar
    from joestar.bench.measure import time_steps
    from joestar.bench.planted import Shape, planted

    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    classes = 47
    shape = Shape(options.nodes, 50.5, 0.88, 128, 0.78, 1.5, width, classes, options.nodes // 2)
    graph = planted(shape, device)
    _wait(device)
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(width, HIDDEN, 2, classes, dropout=0.5).to(device)
    start = time.perf_counter()
    sampler = joestar.NeighborSampler(graph, FANOUTS)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3))
    losses = _losses(step, graph.train_idx)
    first_loss = float(next(losses))
    _wait(device)
    _say({"first_seconds": time.perf_counter() - start, "first_loss": first_loss})
    sys.stdin.readline()
    group = 10 if device.type == "cuda" else 1
    timing = time_steps(lambda: next(losses), options.steps, 2 * group, device, group)
    programs = step.report().programs
    orders = [site.taken for site in programs[0].sites if site.key.startswith("order:")] if programs else []
    found = {"ms": timing.median, "p20": timing.p20, "p80": timing.p80, "loss": float(next(losses)), "orders": orders}
    losses.close()
    _say({**found, **_floor(graph, sampler, width, device), "timing": asdict(timing)})


def _losses(step, seeds):
    full = seeds.numel() // BATCH * BATCH
    while True:
        yield from step.epoch(seeds[:full], BATCH)


def _floor(graph, sampler, width: int, device) -> dict:
    """Bytes of a step, and the seconds that a copy of them takes."""
    from joestar.bench.kernels_gpu import copy_bandwidth
    from joestar.bench.step import logical_bytes, mean_sizes

    seeds = graph.train_idx[: graph.train_idx.numel() // BATCH * BATCH].split(BATCH)[:10]
    counts, edges = mean_sizes(sampler, graph, seeds, 0)
    moved = logical_bytes(list(counts), list(edges), width, HIDDEN, 4)
    found = {"bytes": moved, "nodes": list(counts)}
    if device.type == "cuda":
        found["copy_bandwidth"] = copy_bandwidth(device)
    return found


def _wait(device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def _say(found: dict) -> None:
    print("RESULT " + json.dumps(found), flush=True)


# --- the process that starts them ---


class Worker:
    """A width's process; what it says is collected in ``row``."""

    def __init__(self, width: int, options: argparse.Namespace, folder: Path):
        self.row: dict = {"width": width}
        self.log = folder / f"{width}.log"
        caches = {name: str(folder / str(width) / place) for name, place in CACHES.items()}
        command = [sys.executable, __file__, "--worker", str(width), "--device", options.device]
        command += ["--nodes", str(options.nodes), "--steps", str(options.steps)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                env={**os.environ, **caches, "PYTHONPATH": path},
            )  # fmt: skip
        self.end = time.monotonic() + options.limit

    def read(self) -> bool:
        """Adds the next results to the row; false, with the reason in the row, if there are none in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, self.end - time.monotonic())):
                    return self._failed("out of time")
                line = self.process.stdout.readline().decode()
                if not line:
                    return self._failed(self._last_line())
                if line.startswith("RESULT "):
                    self.row |= json.loads(line[len("RESULT ") :])
                    return True

    def go_on(self, limit: float) -> None:
        """Lets the process time its steps."""
        self.end = time.monotonic() + limit
        self.process.stdin.write(b"\n")

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()

    def _last_line(self) -> str:
        self.process.wait()
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with {self.process.returncode}"

    def _failed(self, why: str) -> bool:
        self.row["error"] = why
        return False


def run(options: argparse.Namespace) -> list[dict]:
    """All widths, ``options.jobs`` at a time; a row each."""
    rows, widths = [], [int(width) for width in options.widths.split(",")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for first in range(0, len(widths), options.jobs):
            workers = [Worker(width, options, Path(folder)) for width in widths[first : first + options.jobs]]
            ready = [worker for worker in workers if worker.read()]
            for worker in ready:
                worker.go_on(options.limit)
                worker.read()
                worker.close()
            for worker in workers:
                worker.close()
                rows.append(worker.row)
                print(line(worker.row), flush=True)
    return rows


HEAD = f"{'width':>6}{'first s':>9}{'ms/step':>9}{'MB':>9}{'TB/s':>6}{'share':>7}  order"


def line(row: dict) -> str:
    """A row of the table."""
    text = f"{row['width']:>6}"
    text += f"{row['first_seconds']:>9.1f}" if "first_seconds" in row else f"{'-':>9}"
    if "ms" not in row:
        return f"{text}  {row.get('error', 'no result')}"
    share = "-"
    if "copy_bandwidth" in row:
        share = f"{row['bytes'] / row['copy_bandwidth'] * 1e3 / row['ms']:.0%}"
    rate = row["bytes"] / row["ms"] / 1e9
    return f"{text}{row['ms']:>9.3f}{row['bytes'] / 1e6:>9.0f}{rate:>6.2f}{share:>7}  {', '.join(row['orders'])}"


def main(argv: list[str] | None = None) -> int:
    """The table on the terminal, the rows as JSON in ``--out``; 1 if a width failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default=WIDTHS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=70, help="fewer than an epoch, half of the nodes, has")
    parser.add_argument("--jobs", type=int, default=2, help="widths that compile beside each other")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until the first step, and then again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        measure(options.worker, options)
        return 0
    print(HEAD, flush=True)
    rows = run(options)
    slowest = max((row for row in rows if "first_seconds" in row), key=lambda row: row["first_seconds"], default=None)
    if slowest is not None:
        print(f"slowest first step: {slowest['first_seconds']:.1f} s at width {slowest['width']}")
    if options.out:
        beside = options.out.with_suffix(".part")
        beside.write_text(json.dumps({"jobs": options.jobs, "nodes": options.nodes, "rows": rows}, indent=1))
        beside.replace(options.out)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
