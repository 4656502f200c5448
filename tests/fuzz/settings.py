"""Settings of the process, under which programs are built, captured, run and trained, and the plain loops as well."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator

import torch
from where import DEVICE

from .generate import PER_PACK, PER_SHARD


def _set(read: Callable, write: Callable, value) -> Callable[[], contextlib.AbstractContextManager]:
    @contextlib.contextmanager
    def within() -> Iterator[None]:
        before = read()
        write(value)
        try:
            yield
        finally:
            write(before)

    return within


_DTYPE = torch.get_default_dtype, torch.set_default_dtype
SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "": contextlib.nullcontext,
    "default dtype float64": _set(*_DTYPE, torch.float64),
    "default dtype bfloat16": _set(*_DTYPE, torch.bfloat16),
    "default device": lambda: torch.device(DEVICE.type),
    "deterministic algorithms": _set(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "anomalies are looked for": lambda: torch.autograd.set_detect_anomaly(True),
    "backward passes in one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "two threads": _set(torch.get_num_threads, torch.set_num_threads, 2),
    "products in less precision": _set(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "no oneDNN": _set(lambda: torch.backends.mkldnn.enabled, lambda on: torch.backends.mkldnn.set_flags(on), False),
}
"""By what they are called in messages; deterministic algorithms fill new memory with NaN."""


def setting_of(pack: int) -> str:
    """Under which one the programs of a pack run: half of those of a shard under none, the others under each."""
    packs = PER_SHARD // PER_PACK
    shard, place = divmod(pack, packs)
    names = itertools.cycle(name for name in SETTINGS if name)
    given = [*itertools.islice(names, packs // 2), *[""] * (packs - packs // 2)]
    return random.Random(f"settings of shard {shard}").sample(given, packs)[place]
