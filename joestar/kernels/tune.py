"""Launch settings chosen by timing, and remembered on disk.

``choose`` times the candidates of a kernel once per (kernel, device, shape class) with CUDA events, outside of CUDA
graph captures, and stores the best in ``tune.json`` in the cache folder (``JOESTAR_CACHE``, else ``XDG_CACHE_HOME`` or
``~/.cache``, there in ``joestar``), under the code of the kernels and the versions of PyTorch and Triton. Candidates
are compiled side by side before. Within a capture, in Triton's interpreter, for work too small to matter, and with
``JOESTAR_TUNE=0``, what is known is used, else the first candidate. Where sums must have a fixed order
(``deterministic``) it is always the first: settings change it.
"""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton

from joestar.cache import cache_folder
from joestar.kernels.compile_ahead import compile_all, is_compiling
from joestar.kernels.determinism import deterministic, is_deterministic
from joestar.kernels.digest import source_digest
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.locks import synchronize
from joestar.torch_private import gpu_sleep

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["cache_file", "choose", "deterministic", "forget", "is_deterministic", "size_class"]

Config = dict[str, int]

SMALL = 2**22
"""Work in bytes below which a kernel is not worth timing."""
REPEATS = 7
_QUEUEING = 400_000
"""Clock cycles, some 0.2 ms, in which the host queues a launch."""
_FORMAT = 2
_KEPT = 8
"""Versions of the code whose choices stay in the file."""

_known: dict[str, Config] | None = None


def cache_file() -> Path:
    """Where the choices are stored."""
    return cache_folder() / "tune.json"


def _code() -> str:
    """What measured: our kernels, PyTorch, Triton."""
    return f"joestar {source_digest('kernels')} torch {torch.__version__} triton {triton.__version__}"


def _read() -> dict[str, dict[str, Config]]:
    """Code -> its choices; nothing if the file is missing, damaged or of another format."""
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("best"), dict):
        return {}
    return {code: best for code, best in content["best"].items() if isinstance(best, dict)}


def _load() -> dict[str, Config]:
    """What the file holds for this code."""
    return _read().get(_code(), {})


def _store(name: str, config: Config) -> None:
    """Adds one choice to the file, written beside and renamed; if that fails, the choice lasts for this process.

    Processes that store at the same time wait for one another: nobody's choice is lost.
    """
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            best = _read()
            best[_code()] = {**best.pop(_code(), {}), name: config}  # the last written comes last
            write_beside(path, {"format": _FORMAT, "best": dict(list(best.items())[-_KEPT:])})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


def write_beside(path: Path, content: dict) -> None:
    """JSON, written beside and renamed: readers find all or nothing.

    Raises:
        OSError: if it cannot be written; nothing is left behind then.
    """
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".json")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(beside, path)
    except OSError:
        os.unlink(beside)
        raise


def forget() -> None:
    """Reads the file again at the next choice."""
    global _known
    _known = None


def size_class(n: int) -> int:
    """Sizes within a factor of two share their settings."""
    return max(0, n - 1).bit_length()


def _times() -> bool:
    return not INTERPRETED and os.environ.get("JOESTAR_TUNE", "1") != "0"


def _may_time(device: torch.device) -> bool:
    if device.type != "cuda" or not _times() or is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _milliseconds(launch: Callable[[Config], None], config: Config) -> float:
    """Shortest time of a launch, compiled and warm; infinite if the settings do not fit the device.

    The device sleeps while the launch is queued: what passes between the events is then the kernel, not the host.
    """
    synchronize()  # another stream may be at work
    try:
        launch(config)
        times = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            gpu_sleep(_QUEUEING)
            start.record()
            launch(config)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    except Exception as error:
        if "out of resource" in str(error).lower() or isinstance(error, torch.cuda.OutOfMemoryError):
            return float("inf")
        raise
    return min(times)


def choose(
    kernel: str, shape: tuple, candidates: list[Config], launch: Callable[[Config], None], work: int,
    device: torch.device, reset: Callable[[], object] | None = None,
) -> Config:  # fmt: skip
    """The best of the candidates for a kernel at a shape class.

    Args:
        kernel: its name; shape: whatever the best settings depend on, made of numbers, strings and dtypes.
        candidates: settings, the default first. launch: runs the kernel with some settings; may be called many times.
        work: bytes that a launch moves, roughly. reset: undoes what launches add up, after the timing.

    Returns:
        The first candidate where sums must have a fixed order.
    """
    global _known
    ahead = device.type == "meta" and is_compiling()
    if len(candidates) == 1 or work < SMALL or not (device.type == "cuda" or ahead) or is_deterministic():
        return candidates[0]
    if _known is None:
        _known = _load()
    name = " ".join(str(part) for part in (kernel, torch.cuda.get_device_name(None if ahead else device), *shape))
    found = _known.get(name)
    if found in candidates:
        return found
    if ahead and _times():  # each of them will be launched
        for config in candidates[1:]:
            with contextlib.suppress(Exception):
                launch(config)
    if not _may_time(device):
        return candidates[0]
    compile_all(functools.partial(launch, config) for config in candidates)
    times = [_milliseconds(launch, config) for config in candidates]
    if reset is not None:
        reset()
    best = candidates[times.index(min(times))]
    _known[name] = best
    _store(name, best)
    return best
