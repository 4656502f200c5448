"""``joestar.distributed.init``: from a launcher's environment to a group of ranks, and its end."""

import atexit
import contextlib
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from joestar import __version__
from joestar.distributed.board import Board, Watch
from joestar.distributed.group import Group
from joestar.distributed.place import (
    Found,
    Place,
    check_address,
    check_devices,
    early_word,
    find_device,
    rank_sum,
    read_place,
    said_sum,
    said_word,
)
from joestar.errors import ConfigError, DistributedError, JoestarError

TIMEOUT = 40.0
"""Seconds that ranks wait for one that is not known to be at work on something long."""
JOINING = 60.0
"""Least seconds that processes wait for one another to start."""
GRACE = 15.0
"""Seconds that a process has to end by itself once the job has failed."""
_DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}
"""Multicast stays off unless asked for; captured collectives register no buffers."""

_jobs = itertools.count()
"""Of these processes, one after the other: the store of an earlier one may still be there, with what was left in it."""
_group: Group | None = None
_watch: Watch | None = None


def current() -> Group | None:
    """The group, if this process is one of several and ``init`` was called."""
    return _group


def rank() -> int:
    """Number of this process; 0 if it is alone."""
    return 0 if _group is None else _group.rank


def world_size() -> int:
    """Number of processes; 1 without ``init``."""
    return 1 if _group is None else _group.world


def is_first() -> bool:
    """Whether this process is the one that prints and writes: rank 0."""
    return rank() == 0


def init(timeout: float = TIMEOUT, device: str | None = None) -> Group | None:
    """Joins the processes that torchrun started; call it once, before anything is put on a GPU.

    Without torchrun, or with one process, nothing happens and nothing costs anything. Otherwise ``cuda:LOCAL_RANK`` (or
    the only GPU that the process is shown) becomes the current device, so that ``"cuda"`` in the script means it;
    without GPUs, processes work on CPUs, by gloo.

    Args:
        timeout: seconds that ranks wait for one that is not known to be loading or compiling, before the job ends;
            for one that is only started, a minute at least.
        device: ``"cpu"`` or ``"cuda"`` to insist on it.

    Returns:
        The group (``rank``, ``world``, ``device``); ``None`` for a process that is alone.

    Raises:
        ConfigError: if the environment or the devices do not fit; on every rank.
        DistributedError: if versions differ, or a rank does not come.
    """
    global _group, _watch
    if _group is not None:
        return _group
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"timeout must be a positive number of seconds; got {timeout!r}.")
    place = read_place()
    if place.world == 1:
        _check_alone()
        return None
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    found = find_device(place, device)
    store = dist.PrefixStore(f"job {next(_jobs)}", _own_store(place, timeout))
    board = Board(dist.PrefixStore("joestar", store), place.rank, place.world, timeout)
    _watch = Watch(board, board.store.clone(), _leave, grace=max(2.0, min(GRACE, timeout)))
    _watch.start()
    _tell_failures(board)
    try:
        all_found = [Found(**each) for each in board.exchange("joestar.distributed.init", found.facts())]
        check_devices(all_found)
        board.agree("joestar.distributed.init (versions)", {
            "joestar": __version__, "torch": torch.__version__, "Python": platform.python_version(),
            "timeout": f"{timeout:g} s", "JOESTAR_EARLY_WORD": said_word(), "JOESTAR_RANK_SUM": said_sum(),
        })  # fmt: skip
        early_word()
        rank_sum()
    except JoestarError:  # the same on all ranks: none goes before all have read why
        _watch.refused()
        raise
    own = torch.device(found.device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    process_group = _process_group(place, own, store, timedelta(seconds=timeout))
    atexit.register(shutdown)
    _group = Group(place, own, board, [each.host for each in all_found], process_group)
    return _group


def _process_group(place: Place, own: torch.device, store, timeout: timedelta):
    """Ours, of all ranks: the first one, or one beside the script's own, which waits for as long as the script said."""
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    if dist.is_initialized():
        return dist.new_group(timeout=timeout, backend=backend)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout,
        device_id=own if own.type == "cuda" else None,
    )  # fmt: skip
    return dist.group.WORLD


def _check_alone() -> None:
    """Raises ``ConfigError`` if ``torch.distributed`` has joined processes of which the environment does not know."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, and the "
            "environment names no other processes. Every process sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, as torchrun does, and calls joestar.distributed.init() instead of "
            "torch.distributed.init_process_group()."
        )


def _own_store(place: Place, timeout: float):
    """The store of the job, which all ranks have reached."""
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world):
            raise ConfigError(
                f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, the "
                f"environment says {place.rank} of {place.world}: call joestar.distributed.init() instead."
            )
        return dist.distributed_c10d._get_default_store()
    check_address(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    from torch.distributed.rendezvous import rendezvous  # not every build of PyTorch has it

    seconds, start = max(JOINING, timeout), time.monotonic()
    try:
        store, *_ = next(rendezvous("env://", place.rank, place.world, timeout=timedelta(seconds=seconds)))
    except RuntimeError as error:
        raise _not_met(place, error, seconds if time.monotonic() - start > 0.9 * seconds else None) from error
    return store


def _not_met(place: Place, error: RuntimeError, waited: float | None) -> DistributedError:
    """What to raise where the store cannot be made or reached; ``waited``: for so many seconds, if in vain."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if "failed to listen" in first:
        why = "another process has it" if "EADDRINUSE" in first else first
        return DistributedError(
            f"rank {place.rank} of {place.world} cannot listen at port {port}, where others are to find it: {why}. "
            "Set MASTER_PORT to another one, the same on all ranks, or end what has it."
        )
    came = f"waited {waited:g} s to meet" if waited is not None else "could not meet"
    return DistributedError(
        f"rank {place.rank} of {place.world} {came} the others at {host}:{port}, and not all came ({first}). Start "
        "WORLD_SIZE processes that call joestar.distributed.init(), with this address; if they only take longer: "
        "init(timeout=...)."
    )


def _tell_failures(board: Board) -> None:
    """What ends this process unexpectedly is told to the other ranks, and to torchrun, which shows it last."""
    before = sys.excepthook

    def told(kind, error, trace) -> None:
        _tell(board, error)
        before(kind, error, trace)

    sys.excepthook = told


def _tell(board: Board, error: BaseException) -> None:
    first = str(error).strip().splitlines()
    board.fail(f"{type(error).__name__}{': ' + first[0] if first else ''}")
    _tell_launcher(error)


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """An error that leaves the block is told to the other ranks, as an uncaught one is: for code that catches it later.

    ``sys.exit()`` without an error is none.
    """
    try:
        yield
    except BaseException as error:
        harmless = isinstance(error, SystemExit) and error.code in (None, 0)
        if _group is not None and not harmless:
            _tell(_group.board, error)
        raise


def _tell_launcher(error: BaseException) -> None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)


def _leave(text: str) -> None:
    """Ends a process that does not end by itself."""
    print(f"joestar: {text}\njoestar: this is rank {rank()}, which is ended.", file=sys.stderr, flush=True)
    os._exit(1)


def shutdown() -> None:
    """Leaves the group: frees captured steps, then shared memory, then communicators. A script's end does it, too.

    A process group that the script has made by itself stays.
    """
    global _group, _watch
    group, watch, _group, _watch = _group, _watch, None, None
    if group is None:
        return
    if group.board.failed is not None:
        _leave_failed(group, watch)
        return
    group.free_graphs()
    group.free_memory()
    group.board.left = True
    watch.end()
    if _keeps_store(group):
        _wait_for_others(group, watch.store)
    group.part()


def _keeps_store(group: Group) -> bool:
    return group.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _leave_failed(group: Group, watch: Watch) -> None:
    """A device that waits for ranks which are gone cannot be waited for: no communicator is taken down in order."""
    if _keeps_store(group):
        watch.wait_for_others()
    if group.device.type == "cuda":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _wait_for_others(group: Group, store) -> None:
    """Rank 0 keeps the store until the others have left it."""
    deadline = time.monotonic() + group.timeout
    with contextlib.suppress(Exception):
        while time.monotonic() < deadline:
            said = [store.get(f"beat/{r}") for r in range(1, group.world) if store.check([f"beat/{r}"])]
            if len(said) == group.world - 1 and all(b'"done": true' in each for each in said):
                return
            time.sleep(0.02)
