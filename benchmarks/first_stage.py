"""What one macro-batch costs the CPU stage, phase by phase, with our own threads and with ParlayLib's.

    python benchmarks/first_stage.py --shape papers100M --scale 0.02 --threads 1,2
    python benchmarks/first_stage.py --device cuda --threads 16     # at full size the graph takes 14 GiB of host memory

Prints a table: *sample* draws the neighbours of all seeds, hop by hop, *write* makes one graph of them (local ids),
*slots* gives every node its place on the device; with ``--row-bytes``, *gather* copies the rows that are not hot, as
for features that are not page-locked. *pick*, instead of the first three, is what is left of them where a GPU tells
nodes apart and gives them their slots itself. Wall clock, the shortest of ``--repeats`` for each, and the time of all
threads.

The extension of this checkout is measured, and one built with ParlayLib, if ``--parlay`` names it or ``make
build/parlay/.built`` has made it (CMake's option ``JOESTAR_FETCH_PARLAY``, or a ParlayLib that CMake finds).
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ("threads by", "threads", "part", "seeds", "nodes", "edges", "sample ms", "write ms", "slots ms", "gather ms",
           "all ms", "CPU ms", "M edges/s", "pick ms", "pick CPU ms")  # fmt: skip


@dataclasses.dataclass
class Options:
    """What is measured."""

    shape: str
    scale: float
    device: str
    parts: list[int]
    threads: list[int]
    fanouts: list[int]
    hot: float
    row_bytes: int
    repeats: int


def best(repeats: int, *phases: Callable) -> tuple[list[float], float, object]:
    """(milliseconds of each phase, of all threads together, what the last phase returned): the least of all rounds.

    A phase is given what the one before it returned.
    """
    rounds = []
    for _ in range(repeats + 1):
        clocks, cpu, made = [time.perf_counter()], time.process_time(), None
        for phase in phases:
            made = phase(made)
            clocks.append(time.perf_counter())
        cpu = time.process_time() - cpu
        rounds.append([*(end - start for start, end in itertools.pairwise(clocks)), cpu])
    *times, cpu = (1e3 * min(column) for column in zip(*rounds[1:], strict=True))  # the first one is a warm-up
    return times, cpu, made


class Stage:
    """The phases of the first stage, on a planted graph; each takes what the one before returned."""

    def __init__(self, options: Options):
        import torch

        from joestar.bench.epoch import on_host
        from joestar.bench.planted import planted
        from joestar.data.planted import shape_of
        from joestar.stages.large_batch import Recycled, in_huge_pages
        from joestar.stages.slots import Slots
        from joestar.stages.union import FirstStageContext
        from joestar.store import choose_hot
        from joestar.store.hot import inclusion_probabilities

        _, shape = shape_of(options.shape, options.scale)
        self.graph = graph = on_host(planted(dataclasses.replace(shape, features=1), options.device))
        in_huge_pages(graph)
        self.options, self.room, self.seeds = options, Recycled(), graph.train_idx.to(graph.indices.dtype)
        number, few = self.seeds.numel() // max(options.parts), 16
        score = inclusion_probabilities(graph.indptr, graph.indices, options.fanouts, self.seeds, number, every=few)
        hot = choose_hot(score, int(options.hot * graph.num_nodes))
        self.book = Slots(hot.to(graph.indices.dtype), 2 * graph.num_nodes, graph.num_nodes)
        self.x = torch.zeros(graph.num_nodes, options.row_bytes, dtype=torch.uint8)
        context = FirstStageContext((0, 0, 0))
        self.key, self.sites = context.key, [context.next_site() for _ in options.fanouts]

    def phases(self, part: int) -> list[Callable]:
        """For the first of ``part`` macro-batches of an epoch."""
        chosen = self.seeds[: self.seeds.numel() // part]
        found = [lambda _: self.sample(chosen), self.write, self.slots]
        return [*found, self.gather] if self.options.row_bytes else found

    def task(self, seeds) -> tuple:
        """What is to be drawn."""
        self.room.again()
        return self.graph.indptr, self.graph.indices, seeds, self.options.fanouts, False, self.key, self.sites, None

    def sample(self, seeds):
        """Draws."""
        from joestar import _native
        from joestar.kernels.race import table

        return seeds, _native.large_batch(*self.task(seeds), table(), False)

    def pick(self, part: int):
        """The edges of the same macro-batch in the graph's ids."""
        from joestar.kernels.cpu_stages import pick_large_batch

        return pick_large_batch(*self.task(self.seeds[: self.seeds.numel() // part]), False, self.room)

    def write(self, made):
        """One graph of the draws."""
        from joestar.kernels.cpu_stages import written

        seeds, parts = made
        return written(parts, seeds, False, self.room)

    def slots(self, made):
        """A slot for every node, and which rows have to be loaded, if none of an earlier macro-batch is there."""
        self.book.begin()
        self.book.clear()
        taken = self.book.take(made[1], self.room)
        self.book.loaded(taken)
        return *made, taken.fresh

    def gather(self, made):
        """Rows of nodes that are not hot."""
        import torch

        from joestar.store import host_gather

        cold, width = made[-1], self.options.row_bytes
        host_gather(self.x, cold, self.room(cold.numel() * width, torch.uint8).view(-1, width))
        return made


def measure(options: Options) -> list[dict]:
    """The rows of one extension."""
    from joestar import _native
    from joestar.kernels.machine import set_num_threads

    stage, pool, rows = Stage(options), _native.build_info()["parallel"], []
    for part in options.parts:
        for threads in options.threads:
            set_num_threads(threads)
            times, cpu, made = best(options.repeats, *stage.phases(part))
            (seeds, ids, _, indices, *_), total = made, sum(times)
            cells = [pool, threads, f"1/{part}", seeds.numel(), ids.numel(), indices.numel(), *times]
            cells += [None] * (10 - len(cells))
            (picked,), picked_cpu, _ = best(options.repeats, lambda _, part=part: stage.pick(part))
            cells += [total, cpu, indices.numel() / total / 1e3, picked, picked_cpu]
            rows.append(dict(zip(HEADERS, cells, strict=True)))
    return rows


def use(extension: str) -> None:
    """Makes ``joestar._native`` this file.

    Behind PyTorch, as everywhere in the package: with an extension that was loaded first, ``import torch`` ended in a
    segmentation fault (2.11, CUDA 13).
    """
    importlib.import_module("torch")
    spec = importlib.util.spec_from_file_location("joestar._native", extension)
    module = sys.modules["joestar._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def line(cells: list) -> str:
    """A row of the table."""
    shown = ["-" if c is None else f"{c:,.1f}" if isinstance(c, float) else f"{c:,}" if isinstance(c, int) else c
             for c in cells]  # fmt: skip
    return f"| {' | '.join(shown)} |"


def numbers(text: str) -> list[int]:
    """``"12,24"`` as integers."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measures every extension in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="papers100M")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many nodes and training nodes")
    parser.add_argument("--device", default="cpu", help="where the graph is made: cuda is quicker")
    parser.add_argument("--parts", type=numbers, default=[12, 24, 48], help="macro-batches per epoch, by commas")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="by commas")
    parser.add_argument("--fanouts", type=numbers, default=[15, 10, 5])
    parser.add_argument("--hot", type=float, default=0.1, help="share of the nodes that stay on the device")
    parser.add_argument("--row-bytes", type=int, default=0, help="of features that the host gathers; 0: it does not")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parlay", help="an extension built with ParlayLib")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--extension", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Options)})
    if given.extension is not None:
        sys.path.insert(0, str(ROOT))
        if given.extension:
            use(given.extension)
        print(json.dumps(measure(options)))
        return
    built = sorted(map(str, (ROOT / "build" / "parlay").glob("_native*.so")))[:1]
    print("| " + " | ".join(HEADERS) + " |\n" + "|---" * len(HEADERS) + "|")
    rows = []
    for extension in ["", *([given.parlay] if given.parlay else built)]:
        command = [sys.executable, __file__, *sys.argv[1:], "--extension", extension]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row)
            print(line(list(row.values())), flush=True)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
