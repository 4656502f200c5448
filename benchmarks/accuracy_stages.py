"""Test accuracy of training in stages against training on the whole graph, over paired seeds, with 95 % intervals.

    python benchmarks/accuracy_stages.py --data FOLDER --out results [--seeds 20] [--device cuda --jobs 16]
    python benchmarks/accuracy_stages.py --out results --table [--within 20 30 40]

FOLDER has dblp.npz, amazon-computers.npz and coauthor-physics.npz; "planted" is made (1 M nodes). A pair has the same
initial weights, training order and validation, and differs in what mini-batches are drawn from. Every combination of
graph, model and mode is a process of its own and writes a JSON file after every seed: what is there is not run again,
so that more seeds (--seeds 40) or the rest (after --limit) are a second call. --within: the tables
of runs that end after so many epochs, both of a pair: the first ones of those that are there.

Verdicts, for the least difference that is allowed (-0.15 points for large batches, -0.6 for partitions): "holds": the
whole interval is above; "worse": the whole interval is below; "open": more seeds are needed, about as many as "need"
says for four of five such experiments to hold if there is no difference.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

COST = ("planted", "coauthor-physics", "amazon-computers", "dblp")
"""Data sets, those that take longest first: they are begun first."""
FIRST = "single"


# --- statistics ---


def interval(differences: list[float], share: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of paired differences, by Student's t."""
    from scipy.special import stdtrit

    number, mean = len(differences), statistics.fmean(differences)
    if number < 2:
        return mean, -math.inf, math.inf
    half = stdtrit(number - 1, 0.5 + share / 2) * statistics.stdev(differences) / math.sqrt(number)
    return mean, mean - half, mean + half


def seeds_needed(spread: float, limit: float, share: float = 0.95, power: float = 0.8) -> int:
    """Pairs with which the interval lies above ``-limit`` in a share ``power`` of experiments without a difference."""
    from scipy.special import stdtrit

    number = 2
    while (stdtrit(number - 1, 0.5 + share / 2) + stdtrit(number - 1, power)) * spread > limit * math.sqrt(number):
        number += 1
    return number


def verdict(low: float, high: float, limit: float) -> str:
    """What an interval says about a difference of at most ``-limit``."""
    return "holds" if low >= -limit else "worse" if high < -limit else "open"


def paired(base: dict, other: dict, key: str = "test") -> list[float]:
    """Differences of the seeds that both have."""
    first = {run["seed"]: run[key] for run in base["runs"]}
    return [run[key] - first[run["seed"]] for run in other["runs"] if run["seed"] in first]


# --- the table ---


def compare(base: dict, other: dict, limit: float) -> dict:
    """A row of the table."""
    differences = paired(base, other)
    mean, low, high = interval(differences)
    spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
    need = seeds_needed(spread, limit) if spread < 100 * limit else None
    return {
        **{key: other["task"][key] for key in ("data", "model", "mode")},
        "seeds": len(differences),
        "single": statistics.fmean(run["test"] for run in base["runs"]),
        "difference": mean, "low": low, "high": high, "spread": spread, "limit": limit, "need": need,
        "sampled": statistics.fmean(paired(base, other, "sampled")) if "sampled" in base["runs"][0] else None,
        "verdict": verdict(low, high, limit),
    }  # fmt: skip


def shortened(found: dict, epochs: int) -> dict:
    """A file's runs as if they had ended after so many epochs; those that had fewer are left out."""
    from stage_runs import chosen

    long_enough = [run for run in found["runs"] if len(run.get("curve", ())) >= epochs]
    return found | {"runs": [{"seed": run["seed"], **chosen(run["curve"][:epochs])} for run in long_enough]}


def rows(out: Path, limits: dict, within: int | None = None) -> list[dict]:
    """A row for every file of a mode whose single-stage file is there; ``within`` so many epochs."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*-*.json"))}
    if within is not None:
        found = {name: shortened(each, within) for name, each in found.items()}
    made = []
    for other in found.values():
        task = other["task"]
        base = found.get(f"{task['data']}-{task['model']}-{FIRST}")
        if task["mode"] != FIRST and base and paired(base, other):
            made.append(compare(base, other, limits[task["mode"]]))
    return made


def table(found: list[dict]) -> str:
    """80 columns."""
    head = f"{'graph':17}{'model':6}{'mode':12}{'n':>4}{'single':>7}{'diff':>7}{'95 % interval':>14}{'need':>5}"
    lines = [f"{head} verdict"]
    for row in found:
        need = "-" if row["need"] is None else str(row["need"])
        lines.append(
            f"{row['data']:17}{row['model']:6}{row['mode']:12}{row['seeds']:4}{row['single']:7.2f}"
            f"{row['difference']:+7.2f}{row['low']:+7.2f}{row['high']:+7.2f}{need:>5} {row['verdict']}"
        )
    return "\n".join(lines)


# --- a combination, in its own process ---


def work(task, folder: Path, out: Path, seeds: int, until: float) -> None:
    """All seeds of a task that its file lacks; the file is written anew after each."""
    import torch
    from stage_runs import Runs, load

    from joestar.errors import JoestarError

    path, setting = out / f"{task.name}.json", json.loads(json.dumps(asdict(task)))
    found = {"task": setting, "torch": torch.__version__, "machine": platform.processor(), "runs": []}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["task"] != setting:
            sys.exit(f"{path} is of another setting: choose another --out, or remove it.")
    missing = [seed for seed in range(seeds) if seed not in {run["seed"] for run in found["runs"]}]
    if not missing:
        return
    if task.device != "cpu":
        found["machine"] = torch.cuda.get_device_name()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    start, runs, failed = time.perf_counter(), Runs(task, load(task, folder)), []
    for seed in missing:
        if time.time() > until:
            print("time is up", flush=True)
            break
        try:
            found["runs"].append(runs.run(seed))
        except JoestarError as error:  # the other seeds are worth having
            print(f"{task.name} seed {seed}: {error}", flush=True)
            failed.append(seed)
            continue
        counters, traffic = runs.step.counters, getattr(runs.step, "traffic", None)
        found |= {"steps": counters.steps, "fallbacks": counters.fallbacks, "plan": str(runs.step.plan)}
        found["traffic"] = None if traffic is None else asdict(traffic)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(found, indent=1), encoding="utf-8")
        beside.replace(path)
        print(f"{time.perf_counter() - start:7.1f} s  {task.name} {found['runs'][-1]}", flush=True)
    if failed:
        sys.exit(f"{task.name}: seeds {failed} failed")


# --- all of them ---


def processes(tasks: list[list[str]], jobs: int, out: Path, until: float) -> list[str]:
    """Runs this script for every task, so many at a time, no seed after ``until``; names of those that failed."""
    waiting, running, failed = list(tasks), {}, []
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, *given = waiting.pop(0)
                log = (out / f"{name}.log").open("a", encoding="utf-8")
                left = ["--limit", str(until - time.time())]  # the last one counts
                command = [sys.executable, str(Path(__file__).resolve()), *given, *left]
                many = {"OMP_NUM_THREADS": "4"} if name.startswith(COST[0]) and jobs > 8 else {}
                environment = {**threads, **os.environ, **many}
                running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                log.close()
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                end = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                print(f"{name}: {'done' if code == 0 else f'failed ({code})'}; {' '.join(end)[:200]}", flush=True)
                failed += [name] * (code != 0)
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.kill()
    return failed


def parsed() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("dataset"), help="folder of the .npz files")
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON files and logs")
    parser.add_argument("--graphs", nargs="+", default=list(COST), choices=COST)
    parser.add_argument("--models", nargs="+", default=["sage", "gat"])
    parser.add_argument("--modes", nargs="+", default=None, help="besides single-stage (default: all)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, help="in place of those of the recipes")
    parser.add_argument("--batch", type=int, help="likewise")
    parser.add_argument("--nodes", type=int, default=1_000_000, help="of the planted graph")
    parser.add_argument("--columns", type=int, default=0, help="at most so many features (0: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no seed is begun")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    parser.add_argument("--within", type=int, nargs="+", help="tables of runs that end after so many epochs")
    parser.add_argument("--one", nargs=3, metavar=("GRAPH", "MODEL", "MODE"), help="run this combination here")
    return parser.parse_args()


def main() -> int:
    """Runs what is missing, prints the table; 1 if a process failed or a difference is worse than allowed."""
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from stage_runs import LIMITS, MODES, RECIPES, Task

    if options.one:
        graph, model, mode = options.one
        changed = {key: getattr(options, key) for key in ("epochs", "batch") if getattr(options, key)}
        task = Task(
            graph, model, mode, replace(RECIPES[graph], **changed), options.device, options.backend, options.columns,
            options.nodes,
        )  # fmt: skip
        work(task, options.data, options.out, options.seeds, time.time() + options.limit)
        return 0
    failed = []
    if not options.table:
        modes = [FIRST, *(options.modes or [mode for mode in MODES if mode != FIRST])]
        names = [(g, m, k) for g in COST if g in options.graphs for m in options.models for k in modes]
        begin = time.time()
        tasks = [["-".join(name), *sys.argv[1:], "--one", *name] for name in names]
        failed = processes(tasks, options.jobs, options.out, begin + options.limit)
        print(f"{time.time() - begin:.0f} s")
    found = rows(options.out, LIMITS)
    (options.out / "table.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found))
    for epochs in options.within or []:
        print(f"\n{epochs} epochs\n{table(rows(options.out, LIMITS, epochs))}")
    return int(bool(failed) or any(row["verdict"] == "worse" for row in found))


if __name__ == "__main__":
    sys.exit(main())
