"""``joestar bench epoch --gpus 1,2,4``: the same epochs on more and more processes, which are started here.

A step takes ``batch_size`` seeds per process. Every number of processes is a job of its own; what they do before the
first step, and the first epoch, which compiles, are not in the times, but shown.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from joestar.bench.measure import check_words
from joestar.bench.ranks import Row, Task
from joestar.bench.setting import PRECISIONS, Setting
from joestar.errors import ConfigError, DistributedError
from joestar.profile.numbers import human_bytes

ENDED_WITHIN = 90.0
"""Seconds that the other processes of a job have to end once one has failed: they do so by themselves."""
_SHOWN = 400


def run(
    setting: Setting, worlds: tuple[int, ...], backend: str = "inductor",
    say: Callable[[str], None] = lambda text: None, keep: Callable[[dict], None] = lambda result: None,
    launch: Callable[[int, Task], list[dict]] | None = None,
) -> dict:  # fmt: skip
    """Measures every model on every number of processes; a dictionary that is JSON.

    Args:
        worlds: numbers of processes, on a GPU each, or on CPUs if that is the setting's device.
        say: called with a line for every row; keep: called with what there is so far after every job.
        launch: (processes, task) -> rows; by default ``started``.

    Raises:
        ConfigError: for unusable numbers, unknown words, widths that cannot be, or fewer GPUs.
    """
    _check(setting, worlds, backend)
    task, rows, result = Task(setting, backend), [], {"setting": asdict(setting), "backend": backend, "rows": []}
    for world in worlds:
        for found in _rows(launch or started, world, task):
            rows.append(found)
            first = next(row for row in rows if row.model == found.model)
            if not (found.note or first.note):
                found.speedup = first.median / found.median
            say(line(found))
        result["rows"] = [asdict(row) for row in rows]
        keep(result)
    return result


def _check(setting: Setting, worlds: tuple[int, ...], backend: str) -> None:
    if not worlds or min(worlds) < 1 or len(set(worlds)) < len(worlds):
        raise ConfigError(f"numbers of processes must be positive, and differ; got {','.join(map(str, worlds))}.")
    setting.check()
    if setting.dataset is None and len(setting.ids) > 1:
        raise ConfigError(f"one order of ids is measured on several processes; got {', '.join(setting.ids)}.")
    check_words(precision=([setting.precision], (*PRECISIONS, "fp16")), backend=([backend], ("inductor", "eager")))
    there = torch.cuda.device_count() if setting.device == "cuda" else None
    if there is not None and max(worlds) > there:
        raise ConfigError(
            f"{max(worlds)} GPUs are wanted, and PyTorch finds {there} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}): for processes on the CPU give --processes."
        )


def _rows(launch: Callable, world: int, task: Task) -> list[Row]:
    try:
        return [Row(**values) for values in launch(world, task)]
    except DistributedError as error:
        return [Row(model, world, note=str(error)) for model in task.setting.models]


def line(row: Row) -> str:
    """A row as text."""
    name = f"{row.model:5} on {row.world}"
    if row.note:
        return f"{name}: {row.note}"
    speedup = "" if row.speedup is None else f", {row.speedup:.2f}x"
    return (
        f"{name}: {row.median:.3f} s/epoch{speedup}, {row.seeds_per_second:,.0f} seeds/s, sums {row.share:.1%} of a "
        f"step, {human_bytes(row.link_bytes)} per link and step, set-up {row.setup:.1f} s, first epoch "
        f"{row.seconds[0]:.1f} s"
    )


# --- processes ---


def started(world: int, task: Task) -> list[dict]:
    """What ``bench.ranks`` finds on so many processes of this machine.

    Raises:
        DistributedError: if one of them fails, with what it wrote last.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        with _processes(world, task, Path(folder)) as processes:
            failed = _wait(processes)
        if failed is not None:
            text = (Path(folder) / f"rank-{failed}.txt").read_text().strip()
            said = [part for part in text.splitlines() if part.strip()] or ["it wrote nothing"]
            code = processes[failed].returncode
            raise DistributedError(f"rank {failed} of {world} ended with code {code}: {said[-1].strip()[:_SHOWN]}")
        return json.loads(file.read_text())


@contextlib.contextmanager
def _processes(world: int, task: Task, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Starts them; ends those that are left."""
    port, running = _free_port(), []
    command = [sys.executable, "-m", "joestar.bench.ranks", task.text(), str(folder / "rows.json")]
    try:
        for rank in range(world):
            with open(folder / f"rank-{rank}.txt", "w") as out:
                environment = environment_of(rank, world, port)
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set; nothing of the kind for one process."""
    words = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in words}
    if world == 1:
        return kept
    values = (rank, rank, world, world, "127.0.0.1", port)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {name: str(value) for name, value in zip(words, values, strict=True)}
    return {"OMP_NUM_THREADS": str(max(1, cores // world)), **kept, **own}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(processes: list[subprocess.Popen]) -> int | None:
    """Until all have ended; the first that failed."""
    failed, since = None, 0.0
    while any(process.poll() is None for process in processes):
        if failed is None:
            failed, since = _first_failed(processes), time.monotonic()
        elif time.monotonic() - since > ENDED_WITHIN:
            break
        time.sleep(0.05)
    return _first_failed(processes) if failed is None else failed


def _first_failed(processes: list[subprocess.Popen]) -> int | None:
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)
