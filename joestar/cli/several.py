"""``joestar train`` on several GPUs: the same command once per process, started by torchrun."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from joestar.errors import ConfigError


def processes_of(gpus: int | None, processes: int | None, device: str) -> int:
    """How many processes are wanted.

    Raises:
        ConfigError: for contradictions.
    """
    if gpus is not None and processes is not None:
        raise ConfigError("give --gpus (one process each) or --processes, not both.")
    name, number = ("--gpus", gpus) if gpus is not None else ("--processes", processes)
    if number is not None and number < 1:
        raise ConfigError(f"{name} must be at least 1; got {number}.")
    if gpus is not None and device == "cpu":
        raise ConfigError("--gpus and --device cpu contradict each other: for processes on the CPU give --processes.")
    return 1 if number is None else number


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def check_launched(number: int) -> None:
    """Raises ``ConfigError`` if a launcher has started another number of processes than the command wants."""
    if number > 1 and int(os.environ["WORLD_SIZE"]) != number:
        raise ConfigError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, the command wants {number}: leave --gpus and "
            "--processes out."
        )


def launch(number: int) -> None:
    """Goes on as torchrun, which starts this command so many times; never returns."""
    words = sys.argv[1:]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // number)), **os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*command, "-m", "joestar", *words], environment)


@contextlib.contextmanager
def joined(console: Console, device: str, gpus: bool) -> Iterator[Console]:
    """This process as one of those that were started, or alone; where it prints: rank 0 alone does."""
    if not is_launched():
        if gpus:
            _check_gpu()
        yield console
        return
    from joestar import distributed

    wanted = "cuda" if gpus else None if device == "auto" else device
    group = distributed.init(device=wanted)
    with distributed.announced():
        yield console if group.rank == 0 else Console(quiet=True)


def _check_gpu() -> None:
    """Raises ``ConfigError`` where ``--gpus 1`` finds none: training on the CPU is not what was asked for."""
    import torch

    if not torch.cuda.is_available():
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"--gpus 1 wants a GPU, and PyTorch {torch.__version__} finds none (CUDA_VISIBLE_DEVICES={shown!r}): leave "
            "--gpus out to train on the CPU; joestar doctor says what is missing."
        )
