"""How programs are compiled, and how long its phases took."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Options:
    """How programs are compiled.

    Attributes:
        backend: ``inductor`` or ``eager``; autocast: dtype, or ``None``.
        disable_passes: names of passes to leave out; rewrite_limit: rewrites that may happen in all.
        choices: ``"kind:name" -> option`` at places where several forms are correct (``fusion.Site``).
        deterministic: fix the order of every sum.
        prefetch: cut training programs, so that the front of a step can run beside the one before (``lowering.split``).
        fitted: the choices are of a state, or of this program before something was frozen or thawed: those that no
            place has any more are left out. Else they are an error.
    """

    backend: str = "inductor"
    disable_passes: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    choices: dict[str, str] = field(default_factory=dict)
    rewrite_limit: int | None = None
    deterministic: bool = False
    prefetch: bool = False
    fitted: bool = False


@dataclass
class Phases:
    """Seconds spent per phase of compiling."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, work: Callable):
        """Runs ``work`` and adds its time to the phase."""
        start = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result
