"""The machine and the versions that a report's numbers belong to."""

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

import joestar


@dataclass
class Environment:
    """Versions and machine that the numbers belong to.

    Attributes:
        threads: that PyTorch uses; processors: that this process may use; memory: of the machine, bytes; 0: not known.
        cpu: its model, as the system calls it.
    """

    joestar: str
    torch: str
    python: str
    device: str
    threads: int
    cpu: str = ""
    processors: int = 0
    memory: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "Environment":
        """The environment of this process."""
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
        )
        return cls(
            joestar.__version__, torch.__version__, platform.python_version(), f"{device.type} ({name})",
            torch.get_num_threads(), _cpu_model(), _processors(), _memory(),
        )  # fmt: skip


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _memory() -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0
