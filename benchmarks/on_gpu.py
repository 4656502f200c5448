"""Everything that is measured or checked on a GPU, in stages: each in a process of its own, under its own time limit.

A stage that fails or runs too long does not stop the others. Logs, JSON and CSV go to the folder ``--out``; the table
at the end says what came of each stage and names every test that failed. The package is used from this checkout, built
or not.

    make bench-gpu                                                     # all stages but the tests, in build/on-gpu
    python benchmarks/on_gpu.py --out results                          # all stages
    python benchmarks/on_gpu.py --out results --stages tests,kernels
    python benchmarks/on_gpu.py --out dry --device cpu --shape tiny    # without a GPU, for this script's own sake
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = {"products": (1_000, 14_700, 120_600), "papers": (1_000, 12_800, 120_600)}
"""Nodes per hop of a batch of 1,000 with fanouts 15, 10, 5, as on the public graphs."""
DISAGREEMENT = 1e-3
"""Largest relative difference of losses between executions."""


@dataclass
class Stage:
    """A command, its limit in seconds, and how its log and files become lines of the summary, or a ``CheckError``."""

    name: str
    seconds: int
    command: list[str]
    summary: Callable[[Path], list[str]] = lambda log: []
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT


@dataclass
class Outcome:
    """What came of a stage: ``status`` is ok, failed or timed out."""

    name: str
    status: str
    seconds: float
    lines: list[str]


class CheckError(Exception):
    """A stage ran, but its results are not as expected."""


def run(stage: Stage, out: Path) -> Outcome:
    """Runs a stage, its output in ``out/NAME.log``; kills whatever it started when its time is up."""
    log, start = out / f"{stage.name}.log", time.perf_counter()
    environment = {"PYTHONPATH": str(stage.folder), **stage.environment, "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=stage.folder,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(stage.seconds)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _end(process)
    lines = []
    try:
        lines = stage.summary(log)
    except CheckError as error:
        status, lines = "failed" if status == "ok" else status, [*error.args[1:], error.args[0]]
    except Exception as error:  # a file that a failed stage did not write, or wrote in part
        if status == "ok":
            status, lines = "failed", [f"no summary: {type(error).__name__}: {error}"]
    if status != "ok" and not lines:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    return Outcome(stage.name, status, time.perf_counter() - start, lines)


def _end(process: subprocess.Popen) -> None:
    """Ends the stage's processes, which share a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- summaries ---


def read_tests(results: Path, must_run: bool = False) -> Callable[[Path], list[str]]:
    """Counts, and every failing test with its message; from the log if the run did not end.

    ``must_run``: tests that are all skipped, as without a GPU, are a failure.
    """

    def read(log: Path) -> list[str]:
        if not results.exists():
            text = log.read_text(encoding="utf-8", errors="replace")
            failed = dict.fromkeys(re.findall(r"(?:FAILED|ERROR) (tests/\S+(?: [^\n]*?\])?)", text))
            raise CheckError(
                f"the run did not end; {len(failed)} failures until then", *map("FAILED {}".format, failed)
            )
        suites = ElementTree.parse(results).getroot().iter("testsuite")
        totals, failed = {}, []
        for suite in suites:
            for key in ("tests", "failures", "errors", "skipped"):
                totals[key] = totals.get(key, 0) + int(suite.get(key, 0))
            for case in suite.iter("testcase"):
                for kind in ("failure", "error"):
                    found = case.find(kind)
                    if found is not None:
                        message = (found.get("message") or "").splitlines()
                        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                        failed.append(f"FAILED {name}: {message[0][:160] if message else ''}")
        text = ", ".join(f"{count} {key}" for key, count in totals.items())
        if failed:
            raise CheckError(text, *failed)
        if must_run and totals.get("tests", 0) == totals.get("skipped", 0):
            raise CheckError(f"no test ran: {text}")
        return [text]

    return read


def step_summary(results: Path, counts: tuple[int, ...] | None) -> Callable[[Path], list[str]]:
    """A line per row; nodes per hop must be within 2 % of ``counts``."""

    def read(_log: Path) -> list[str]:
        found = json.loads(results.read_text(encoding="utf-8"))
        base = {(row["model"], row["ids"]): row["step"]["median"] for row in found["rows"] if row["how"] == "eager"}
        lines = []
        for row in found["rows"]:
            of = row["model"], row["ids"]
            ratio = f"{base[of] / row['step']['median']:6.2f} x" if of in base else " " * 8
            launches = row["launches"].get("launches")
            lines.append(
                f"{row['model']:5}{row['how']:8}{row['ids']:12}{row['step']['median']:9.3f} ms/step {ratio}"
                f"{row['memory'] / 2**30:8.2f} GiB  first {row['first_step_seconds']:.0f} s"
                + (f"  {launches:.0f} launches" if launches else "")
            )
            if row["epochs"] is not None:
                whole = row["epochs"]
                lines.append(
                    f"{'':13}{'epochs':12}{whole['ms_per_step']:9.3f} ms/step, {whole['seconds']:.5f} s/epoch, "
                    f"set-up {whole['set_up_ms']:.3f} ms, of one step {whole['one_step_ms']:.3f} ms"
                )
        lines += found["absent"].values()
        if counts is not None:
            ours = found["rows"][0]["counts"][: len(counts)]
            lines.append("nodes per hop " + " / ".join(f"{count:,}" for count in ours))
            if any(abs(count - good) > 0.02 * good for count, good in zip(ours, counts, strict=True)):
                raise CheckError(f"nodes per hop differ by more than 2 % from {counts}", *lines)
        return lines

    return read


def losses_summary(results: Path) -> Callable[[Path], list[str]]:
    """The largest relative differences between the executions."""

    def read(_log: Path) -> list[str]:
        found = json.loads(results.read_text(encoding="utf-8"))["largest_relative_difference"]
        lines = [f"{pair}: {value:.2e}" for pair, value in found.items()]
        if not all(value <= DISAGREEMENT for value in found.values()):
            raise CheckError(f"losses differ by more than {DISAGREEMENT:g}", *lines)
        return lines

    return read


def last_lines(count: int) -> Callable[[Path], list[str]]:
    """The end of the log."""
    return lambda log: log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]


# --- stages ---


def stages(options: argparse.Namespace, out: Path, copy: Path) -> list[Stage]:
    """Every stage in order; ``copy`` is where the tests run."""
    python, device = [sys.executable], options.device
    on_gpu = device == "cuda"
    cli = [*python, "-m", "joestar.cli.main", "bench"]
    products, papers = (options.shape or name for name in ("products", "papers"))
    size = ["--batch-size", str(options.batch_size), "--steps", str(options.steps), "--device", device]

    def step(name: str, seconds: int, shape: str, precision: str, model: str, baselines: str, *more: str) -> Stage:
        file = out / f"{name}.json"
        as_published = model == "sage" and options.batch_size == 1000 and "--dataset" not in more
        counts = COUNTS.get(shape) if as_published else None
        command = [*cli, "step", "--shape", shape, "--precision", precision, "--models", model, *size, *more]
        return Stage(
            name, seconds, [*command, "--baselines", baselines, "--json", str(file)], step_summary(file, counts)
        )

    def inference(name: str, seconds: int, shape: str, precision: str, models: str) -> Stage:
        command = [*cli, "inference", "--shape", shape, "--device", device, "--precision", precision]
        command += ["--models", models, "--json", str(out / f"{name}.json")]
        return Stage(name, seconds, command, last_lines(8 + models.count(",")))

    def epochs(name: str, shape: str, precision: str, *more: str) -> Stage:
        command = [*cli, "epoch", "--shape", options.shape or shape, "--precision", precision, "--epochs", "2", *more]
        command += ["--device", device, "--batch-size", str(options.batch_size), "--json", str(out / f"{name}.json")]
        return Stage(name, 560, command, last_lines(30))

    def scaling(name: str, shape: str, *more: str) -> Stage:
        where = ["--gpus", "1"] if on_gpu else ["--processes", "1", "--backend", "eager", "--device", device]
        command = [*cli, "epoch", *where, "--shape", options.shape or shape, "--epochs", "2", *more]
        return Stage(name, 560, [*command, "--json", str(out / f"{name}.json")], last_lines(10))

    def check(name: str, seconds: int, shape: str) -> Stage:
        file = out / f"{name}.json"
        command = [*python, "benchmarks/gpu_checks.py", name, "--shape", shape, *size, "--json", str(file)]
        return Stage(name, seconds, command, losses_summary(file) if name == "losses" else last_lines(5))

    results = out / "tests.xml"
    pytest = [*python, "-m", "pytest", "tests/gpu", "-rf", "-v", "--tb=short", "--show-capture=no"]
    pytest += [*options.pytest_options.format(root=copy).split(), "-n", str(options.workers), f"--junitxml={results}"]
    searched = os.pathsep.join(map(str, (copy, copy / "tests")))
    if on_gpu:
        kernels = [*python, "-m", "joestar.bench.kernels_gpu", "--shape", products]
    else:
        kernels = [*cli, "kernels", "--device", device]
    fuse = [*python, "benchmarks/fuse_sample_agg.py", "--device", device, "--shape", products]
    fuse += ["--csv", str(out / "fuse_sample_agg.csv")]
    if not on_gpu:
        fuse += ["--batch", "64", "--steps", "2", "--warm-up", "1", "--repeats", "1"]
    attention = ["--models", "gat", "--heads", "4", "--hidden", "512", "--features", "1024", "--precision", "fp16"]
    attention += ["--batch-size", str(2048 if on_gpu else options.batch_size)]
    wide, quarter = ["--fanouts=30,30,30", "--hidden", "256"], "1" if options.shape else "0.25"
    both = f"eager,compile{',loader' if options.loader else ''}"
    small = ["--dataset", "cora", "--fanouts=-1,-1", "--hidden", "16"]
    kernel_list = ["--kernels"] if on_gpu else []
    return [
        Stage("tests", 420, pytest, read_tests(results, on_gpu), {"PYTHONPATH": searched}, copy),
        Stage("kernels", 150, [*kernels, "--json", str(out / "kernels.json")], last_lines(60)),
        step("products-tf32-sage", 240, products, "tf32", "sage", both, "--ids", "both", *kernel_list),
        step("products-bf16-sage", 120, products, "bf16", "sage", "eager", *kernel_list),
        step("papers-tf32-sage", 240, papers, "tf32", "sage", "eager", "--ids", "both"),
        step("products-tf32-gcn", 150, products, "tf32", "gcn", both),
        step("products-tf32-gin", 150, products, "tf32", "gin", both),
        step("products-tf32-gat", 180, products, "tf32", "gat", both),
        step("cora", 180, "tiny", "fp32", "sage,gcn,gat", "eager", *small),
        inference("inference-tf32", 240, products, "tf32", "sage,gcn,gin,gat"),
        inference("inference-papers", 240, papers, "bf16", "sage"),
        Stage("fuse_sample_agg", 180, fuse, last_lines(20)),
        check("losses", 240, "tiny" if options.shape == "tiny" else "small"),
        check("memory", 120, products),
        epochs("epochs-papers-1", "papers100M", "tf32", "--modes", "large-batch,resident,pinned,cached"),
        epochs("epochs-papers-2", "papers100M", "tf32", "--modes", "match,match-reorder,cached-match,cpu"),
        epochs("epochs-papers-30", "papers100M", "tf32", "--modes", "resident,large-batch", *wide),
        epochs("epochs-mag", "mag240m-c", "fp16", "--scale", quarter, "--fanouts=25,15", "--hidden", "1024"),
        scaling("epochs-gat", "papers", "--scale", quarter, *attention),
    ]  # fmt: skip


def copied(folder: Path) -> Path:
    """What the tests need, away from this checkout and its settings."""
    for name in ("joestar", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def has_gpu() -> bool:
    """Asked in a process of its own, which leaves nothing on the GPU."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> int:
    """Runs the stages that were asked for; 1 if any is not ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--stages", default="all", help="names or beginnings of names, by commas")
    parser.add_argument("--skip", default="", help="names or beginnings of names to leave out, by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", help="a planted graph in place of products and papers")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=6, help="of pytest")
    parser.add_argument("--pytest-options", default="-c /dev/null --rootdir {root} -p no:cacheprovider")
    parser.add_argument("--loader", action="store_true", help="PyG's NeighborLoader as a further baseline")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds after which no stage is started")
    parser.add_argument("--pack", action="store_true", help="leave only summary.json and an archive of the rest")
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu():
        parser.error(
            "PyTorch sees no GPU here: every stage would fail. --device cpu --shape tiny tries this script out."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return run_all(options, options.out.resolve(), Path(folder))


def run_all(options: argparse.Namespace, out: Path, copy: Path) -> int:
    """The chosen stages, one after the other, and the summary."""
    every = stages(options, out, copy)
    wanted, unwanted = (tuple(filter(None, text.split(","))) for text in (options.stages, options.skip))
    chosen = [s for s in every if options.stages == "all" or s.name.startswith(wanted)]
    chosen = [s for s in chosen if not (unwanted and s.name.startswith(unwanted))]
    if not chosen:
        sys.exit(f"no stage is called {options.stages}: choose from {', '.join(s.name for s in every)}")
    begin, outcomes = time.perf_counter(), []
    for stage in chosen:
        if time.perf_counter() - begin > options.total:
            outcomes.append(Outcome(stage.name, "not started", 0.0, [f"{options.total:.0f} s were over"]))
            continue
        if stage.name == "tests":
            copied(copy)
        stage.seconds = int(stage.seconds * options.scale)
        outcomes.append(run(stage, out))
        print(f"{stage.name}: {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s", flush=True)
        (out / "summary.json").write_text(json.dumps([asdict(o) for o in outcomes], indent=1), encoding="utf-8")
    if options.pack:
        pack(out)
    print()
    for outcome in outcomes:
        print(f"{outcome.name:22}{outcome.status:12}{outcome.seconds:7.0f} s")
        for line in outcome.lines:
            print(f"    {line}")
    bad = [outcome.name for outcome in outcomes if outcome.status != "ok"]
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} stages ok" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def pack(out: Path) -> None:
    """Moves every file but the summary into one archive."""
    files = [file for file in out.iterdir() if file.suffix in (".log", ".json", ".csv", ".xml")]
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for file in files:
            archive.add(file, file.name)
    for file in files:
        if file.name != "summary.json":
            file.unlink()


if __name__ == "__main__":
    sys.exit(main())
