"""The C++ compiler that Inductor needs on a CPU: whether it is there, and what to do where it is not."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from joestar.errors import say


def found() -> str | None:
    """Path of the compiler that Inductor takes: ``$CXX``, else g++ (clang++ on a Mac)."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def problem() -> tuple[str, str] | None:
    """What is missing, and what to do; ``None`` where Inductor can compile for the CPU."""
    path = found()
    if path is None and os.environ.get("CXX"):
        return f"$CXX is {os.environ['CXX']}, which is not found", "Set CXX to a C++ compiler, or unset it."
    if path is None:
        other = shutil.which("clang++")
        advice = f"export CXX={other}" if other else "Install g++ (or another compiler, and set CXX)."
        return "no C++ compiler (g++ or $CXX)", advice
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"{path}, but not {header}", "Install Python's development headers (python3-dev)."
    return None


def usable_backend(backend: str, device: torch.device) -> str:
    """The backend, or ``"eager"`` with a warning where Inductor has no compiler: a wheel's user may have none."""
    if backend != "inductor" or device.type != "cpu":
        return backend
    missing = problem()
    if missing is None:
        return backend
    what, advice = missing
    say(
        f"Inductor cannot compile for the CPU here: {what}. The step runs with backend='eager': the results are the "
        f"same up to rounding, at less speed. {advice}"
    )
    return "eager"
