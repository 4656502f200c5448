"""Which order of aggregation and product is faster, over a grid of sizes, and how often the estimate knows.

A cell is a training step of one layer that reads features, or of two, where the second one's order is varied: GCN, SAGE
or GAT, F features to C columns, k sampled neighbours. Both orders are timed in turn as the tuner times them: the whole
step without Inductor, on a GPU as one CUDA graph. Cells are drawn from the grid, the same ones every time. ``--jobs``
processes build them beside each other; they take turns at being timed, and the shortest of several rounds counts.

    JOESTAR_TUNE=0 python benchmarks/order_grid.py --out order_cuda.csv                      # 100 cells on a GPU
    JOESTAR_TUNE=0 python benchmarks/order_grid.py --device cpu --jobs 1 --out order_cpu.csv
    python benchmarks/order_grid.py --read order_cuda.csv                                    # today's estimate
    python benchmarks/order_grid.py --fit order_cuda.csv                                     # speeds for order_cost

``--fit`` prints speeds that fit a CSV, to be put into ``joestar/fusion/order/order_cost.py``, and what share of cells
that a fit to three quarters had not seen it gets right.
"""

import argparse
import contextlib
import csv
import dataclasses
import fcntl
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from joestar.fusion.order import order_cost
from joestar.fusion.order.order_cost import AGGREGATE, UPDATE, Exchange, Speeds

ROOT = Path(__file__).resolve().parents[1]
WIDTHS, COLUMNS, FANOUTS = (16, 64, 128, 256, 602, 1024, 2048, 4096, 8192), (16, 64, 128, 256, 512), (2, 5, 10, 25, 50)
LAYERS = (("gcn", 1), ("sage", 1), ("gat", 1), ("gat", 4), ("gat", 8))
WIDEST_INNER = 1024
ROUNDS, PARTS = 6, 4
NEAR = 1.1
"""A default within so much of the better order is right."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A layer: kind, heads, whether it reads features (``first``) or rows of another layer (``inner``), and sizes."""

    kind: str
    heads: int
    where: str
    width: int
    columns: int
    fanout: int


def cells(count: int, seed: int = 0) -> list[Cell]:
    """``count`` cells of the grid, without order."""
    every = [
        Cell(kind, heads, where, width, columns, fanout)
        for (kind, heads), where, width, columns, fanout in itertools.product(
            LAYERS, ("first", "inner"), WIDTHS, COLUMNS, FANOUTS
        )
        if where == "first" or width <= WIDEST_INNER
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


# --- timing ---


class Bench:
    """Builds and times cells; graphs are made once per number of nodes."""

    def __init__(self, device: str, lock: Path):
        import torch

        self.device, self.lock = torch.device(device), lock
        self.large = self.device.type == "cuda"
        self.structures: dict = {}
        torch.backends.cuda.matmul.allow_tf32 = True

    def graph(self, cell: Cell, features: int):
        """A planted graph whose features have the cell's width; fewer nodes for wide ones."""
        import torch

        from joestar.bench.planted import Shape, planted

        nodes = 1_000_000 if features < 1024 else 200_000 if features < 4096 else 100_000
        nodes = nodes if self.large else nodes // 20
        if nodes not in self.structures:
            self.structures[nodes] = planted(Shape(nodes, 50.5, 0.88, 128, 0.78, 1.5, 1, 16, nodes // 2), self.device)
        graph = self.structures[nodes]
        graph.ndata.pop("x", None)
        graph.ndata["x"] = torch.randn(nodes, features, device=self.device)
        graph.ndata["y"] = torch.arange(nodes, device=self.device) % 16
        return graph

    def milliseconds(self, cell: Cell) -> tuple[Exchange, dict[str, float]]:
        """(what the pass knew of the place, the step's time in either order)."""
        import torch
        from torch.nn import functional as F

        import joestar
        from joestar.profile.sizes import step_key
        from joestar.profile.tuner import Candidate
        from joestar.runtime.seeds import shuffled
        from joestar.runtime.tuning import StepTimer, Variants, state_restored

        graph = self.graph(cell, cell.width if cell.where == "first" else 16)
        torch.manual_seed(0)
        net = network(cell).to(self.device)
        batch = (16_384 if self.large else 1024) // (4 if cell.width * cell.fanout > 2**16 else 1)
        if cell.where == "inner":
            batch //= 4
        sampler = joestar.NeighborSampler(graph, [cell.fanout] if cell.where == "first" else [cell.fanout, 3])
        step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3), backend="eager")
        trainer = step._runner
        order = shuffled(graph.train_idx, trainer.seed, 0)
        with recorded() as seen:
            trainer.executor.program.trace(order[:batch], step_key(trainer.seed, 0, 0, graph.device))
        program = trainer.executor.program
        sites = [site for site in program.sites if site.kind == "order"]
        profile = trainer.executor.profile(order, batch, trainer.seed, 0)
        timer = StepTimer(trainer, Variants(program), order, batch, profile, "eager", texts=False)
        candidates = {
            taken: Candidate(((sites[-1].key, taken),), trainer.executor.slack) for taken in (UPDATE, AGGREGATE)
        }
        found = dict.fromkeys(candidates, math.inf)
        with state_restored(trainer):
            for candidate in candidates.values():
                timer.milliseconds(candidate, 0)
            with self.alone():
                for round, (taken, candidate) in itertools.product(range(ROUNDS), candidates.items()):
                    found[taken] = min(found[taken], timer.milliseconds(candidate, round))
            for candidate in candidates.values():
                timer.drop(candidate)
        return seen[-1], found

    @contextlib.contextmanager
    def alone(self):
        """No other process times meanwhile."""
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextlib.contextmanager
def recorded():
    """The places that the pass estimates, as it goes over them."""
    seen: list[Exchange] = []
    before = order_cost.seconds

    def seconds(exchange: Exchange, speeds: Speeds) -> dict[str, float]:
        seen.append(exchange)
        return before(exchange, speeds)

    order_cost.seconds = seconds
    try:
        yield seen
    finally:
        order_cost.seconds = before


def network(cell: Cell):
    """The model of a cell."""
    from torch import nn

    from joestar.nn import GATConv, GCNConv, SAGEConv

    def conv(width: int, columns: int):
        if cell.kind == "gat":
            return GATConv(width, columns // cell.heads, cell.heads, add_self_loops=False)
        return {"gcn": GCNConv, "sage": SAGEConv}[cell.kind](width, columns)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = SAGEConv(16, cell.width) if cell.where == "inner" else None
            self.conv = conv(cell.width, cell.columns)

        def forward(self, blocks, x):
            if self.before is not None:
                x = self.before(blocks[0], x).relu()
            return self.conv(blocks[-1], x)

    return Net()


def work(options: argparse.Namespace) -> None:
    """Times this process's share of the cells; a line of JSON each."""
    index, jobs = map(int, options.worker.split("/"))
    bench, end = Bench(options.device, options.lock), time.monotonic() + options.seconds
    for cell in cells(options.cells)[index::jobs]:
        if time.monotonic() > end:
            break
        row = {**dataclasses.asdict(cell)}
        try:
            exchange, found = bench.milliseconds(cell)
            row |= {**dataclasses.asdict(exchange), "update_ms": found[UPDATE], "aggregate_ms": found[AGGREGATE]}
        except Exception as error:  # a cell that fails is a row
            row["error"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        print("RESULT " + json.dumps(row), flush=True)


def collect(options: argparse.Namespace) -> list[dict]:
    """Starts the processes and gathers their rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{index}.log" for index in range(options.jobs)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        processes = []
        for index, log in enumerate(logs):
            command = [sys.executable, __file__, "--worker", f"{index}/{options.jobs}", "--device", options.device]
            command += ["--cells", str(options.cells), "--seconds", str(options.seconds), "--lock", f"{folder}/lock"]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
                    )
                )
        for process, log in zip(processes, logs, strict=True):
            try:
                process.wait(options.seconds + 120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            text = log.read_text(errors="replace")
            found = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
            if not found:
                print("\n".join(text.strip().splitlines()[-3:]), file=sys.stderr)
            rows += found
    return rows


# --- what came of it ---


def exchange_of(row: dict) -> Exchange:
    """The place of a row that came out of a CSV."""
    fields = {field.name: field.type for field in dataclasses.fields(Exchange)}
    return Exchange(**{name: str(row[name]) == "True" if kind in ("bool", bool) else int(row[name])
                       for name, kind in fields.items() if name in row})  # fmt: skip


def judged(rows: list[dict], speeds: Speeds) -> list[tuple[float, float, dict]]:
    """Per row (time of the default over that of the better order, of the worse over the better, row)."""
    found = []
    for row in rows:
        times = {UPDATE: float(row["update_ms"]), AGGREGATE: float(row["aggregate_ms"])}
        costs = order_cost.seconds(exchange_of(row), speeds)
        default = min(costs, key=costs.get)
        best = min(times.values())
        found.append((times[default] / best, max(times.values()) / best, row))
    return found


def report(rows: list[dict], speeds: Speeds, title: str) -> float:
    """Prints the share of cells whose default is near the better order, and those that lose most; returns the share."""
    found = judged(rows, speeds)
    share = sum(ratio <= NEAR for ratio, _, _ in found) / max(1, len(found))
    apart = sum(worse > NEAR for _, worse, _ in found)
    mean = math.exp(sum(math.log(ratio) for ratio, _, _ in found) / max(1, len(found)))
    print(f"{title}: {share:.1%} of {len(found)} cells within 10 % of the better order ({apart} have orders further")
    print(f"apart); a step of the default takes {mean:.3f} of the better one's time in the geometric mean")
    for ratio, _, row in sorted(found, key=lambda entry: -entry[0])[:8]:
        if ratio > NEAR:
            print(
                f"  {ratio:5.2f}x {row['kind']:4} {row['where']:5} F {row['width']:>4} C {row['columns']:>3} heads "
                f"{row['heads']} k {row['fanout']:>2}: {float(row['update_ms']):.3f} update first, "
                f"{float(row['aggregate_ms']):.3f} aggregate first"
            )
    return share


def loss(rows: list[dict], speeds: Speeds) -> float:
    """How far differences between the orders are from the measured ones, in units of the better time, and lost time."""
    total = 0.0
    for row in rows:
        update, aggregate = float(row["update_ms"]), float(row["aggregate_ms"])
        costs = order_cost.seconds(exchange_of(row), speeds)
        best = min(update, aggregate)
        measured, guessed = (update - aggregate) / best, (costs[UPDATE] - costs[AGGREGATE]) * 1e3 / best
        wrong = (measured > 0) != (guessed > 0)
        total += min(1.0, abs(measured - guessed)) * 0.2 + (min(abs(measured), 2.0) if wrong else 0.0)
    return total / len(rows)


def fit(rows: list[dict], speeds: Speeds, rounds: int = 30) -> Speeds:
    """Speeds by a random walk over factors, one or several at a time; the same for the same rows.

    They stay near where they began: a factor of ten costs as much as one cell in 50 that is off by its whole time.
    """
    names = [field.name for field in dataclasses.fields(Speeds)]

    def cost(tried: Speeds) -> float:
        far = sum(math.log10(getattr(tried, name) / getattr(speeds, name)) ** 2 for name in names)
        return loss(rows, tried) + 0.02 * far

    walk, best, least = random.Random(0), speeds, cost(speeds)
    for round in range(rounds):
        reach = 1.0 * 0.92**round
        for _ in range(30):
            changed = walk.sample(names, walk.choice((1, 1, 2, 3)))
            tried = dataclasses.replace(best, **{n: getattr(best, n) * math.exp(walk.gauss(0, reach)) for n in changed})
            found = cost(tried)
            if found < least:
                best, least = tried, found
    return dataclasses.replace(best, **{name: float(f"{getattr(best, name):.2g}") for name in names})


def read(path: Path) -> list[dict]:
    """The rows of a CSV that have times."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("update_ms") and row.get("aggregate_ms")]


def write(rows: list[dict], path: Path) -> None:
    """The rows as a CSV."""
    names = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    beside = path.with_suffix(".part")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)


def main(argv: list[str] | None = None) -> None:
    """Times, or reads and fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no cell is begun any more")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help="a CSV to judge today's estimate by")
    parser.add_argument("--fit", type=Path, help="a CSV to fit speeds to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(options)
        return
    path = options.fit or options.read
    rows = read(path) if path else collect(options)
    if not path:
        if options.out:
            write(rows, options.out)
        for row in rows:
            if "error" in row:
                print(f"{Cell(**{f.name: row[f.name] for f in dataclasses.fields(Cell)})}: {row['error']}")
        rows = [row for row in rows if "error" not in row]
    if not rows:
        sys.exit("no cell was timed")
    device = "cuda" if str(rows[0]["in_place"]) == "True" else "cpu"
    report(rows, order_cost.SPEEDS[device], "today's estimate")
    if options.fit:
        start, shares = order_cost.SPEEDS[device], []
        for part in range(PARTS):
            unseen = rows[part::PARTS]
            fitted = fit([row for row in rows if row not in unseen], start)
            shares += [ratio <= NEAR for ratio, _, _ in judged(unseen, fitted)]
        print(f"{sum(shares) / len(shares):.1%} of cells that a fit to the other {PARTS - 1}/{PARTS} had not seen")
        everything = fit(rows, start)
        report(rows, everything, "fitted to all")
        print(everything)


if __name__ == "__main__":
    main()
