"""Processes that work together, as torchrun would start them, forked from a server that imported everything once.

On GPUs each is started by itself: a process that has asked for GPUs, as imports do, leaves forked ones without. So it
is before PyTorch 2.13, which on some machines leaves forked ones without its pool of threads.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from lowering.harness import OLDER

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["tests.distributed.warmed"])
_STARTED = multiprocessing.get_context("spawn")


@dataclass
class Outcome:
    """What became of a rank: what its function returned, its exit code, what it wrote."""

    result: Any
    code: int | None
    text: str


def run(world: int, scenario: Callable, *args, folder, seconds: float = 120.0) -> list[Outcome]:
    """Runs ``scenario(*args)`` on so many ranks; what is still alive after ``seconds`` is killed (code ``None``)."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    alone = OLDER or os.environ.get("JOESTAR_TEST_DEVICE", "").startswith("cuda")
    context = _STARTED if alone else _FORKED
    if context is _FORKED:
        _start_server()
    started, given = [], {name: value for name, value in os.environ.items() if name.startswith("JOESTAR_")}
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        path = os.path.join(folder, f"rank-{rank}.txt")
        child = context.Process(target=_rank, args=(scenario, args, rank, world, port, sender, path, given))
        child.start()
        sender.close()
        started.append((child, receiver, path))
    return [_outcome(*each, seconds) for each in started]


def results(world: int, scenario: Callable, *args, **options) -> list:
    """What the ranks of ``run`` return; all must have ended well."""
    outcomes = run(world, scenario, *args, **options)
    assert all(outcome.code == 0 for outcome in outcomes), "\n".join(outcome.text for outcome in outcomes)
    return [outcome.result for outcome in outcomes]


def _start_server() -> None:
    """The server finds the modules that this process finds (of itself it does from Python 3.13 on)."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _outcome(child, receiver, path, seconds: float) -> Outcome:
    result = None
    with contextlib.suppress(EOFError):
        if receiver.poll(seconds):
            result = receiver.recv()
    child.join(seconds)
    code = child.exitcode
    if code is None:
        child.kill()
        child.join()
    with open(path) as file:
        return Outcome(result, code, file.read())


def _rank(scenario, args, rank, world, port, sender, path, environment) -> None:
    """As a script under torchrun: an uncaught error goes to ``sys.excepthook`` and ends it with code 1."""
    import joestar

    os.environ |= environment
    words = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in words.items()} | {"MASTER_ADDR": "127.0.0.1"}
    file = open(path, "w", buffering=1)  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    sys.excepthook = lambda kind, error, trace: traceback.print_exception(kind, error, trace, file=file)
    code = 0
    try:
        result = scenario(*args)
        joestar.distributed.shutdown()
        sender.send(result)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        joestar.distributed.shutdown()
        code = 1
    print(f"{time.process_time():.1f} s of CPU", file=file, flush=True)
    os._exit(code)
