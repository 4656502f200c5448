"""What ``joestar doctor`` looks at. Every function returns (name, status, found, advice)."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from joestar import torch_private
from joestar.cache import cache_folder
from joestar.cli.console import human_bytes
from joestar.runtime import compiler

Finding = tuple[str, str, str, str]
LOW_MEMORY = 2 << 30
LOW_DISK = 2 << 30


def python() -> Finding:
    """The interpreter."""
    return "Python", "ok", f"{platform.python_version()} ({sys.executable})", ""


def pytorch() -> Finding:
    """PyTorch; 2.11 or later."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return "PyTorch", "missing", torch.__version__, "pip install --upgrade torch"
    return "PyTorch", "ok", torch.__version__, ""


def native_extension() -> Finding:
    """The C++ kernels, and which parallel primitives they use."""
    try:
        from joestar import _native
    except ImportError as error:
        advice = "Reinstall Joestar: a wheel brings them; from source they take a C++20 compiler and CMake."
        return "C++ kernels", "missing", f"cannot be imported ({error})", advice
    info = _native.build_info()
    standard = str(info["cpp_std"])[2:4]
    found = f"C++{standard} by {info['compiler']}; parallel primitives: {info['parallel']}, {info['threads']} threads"
    return "C++ kernels", "ok", found, ""


def threads() -> Finding:
    """Threads of PyTorch against processors that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = torch.get_num_threads()
    found = f"PyTorch uses {used}; {usable} processors may be used"
    if used > usable:
        return "threads", "warn", found, f"export OMP_NUM_THREADS={usable}"
    return "threads", "ok", found, ""


def inductor_compiler() -> Finding:
    """The C++ compiler and headers that Inductor needs on a CPU."""
    missing = compiler.problem()
    if missing is None:
        return "compiler for Inductor", "ok", str(compiler.found()), ""
    what, advice = missing
    return "compiler for Inductor", "missing", what, f"{advice} Until then the CPU runs --backend eager."


def triton() -> Finding:
    """Triton, which GPU kernels are written in."""
    if importlib.util.find_spec("triton") is not None:
        return "Triton", "ok", importlib.metadata.version("triton"), ""
    if torch.cuda.is_available():
        return "Triton", "missing", "not installed", "pip install triton (kernels on the GPU need it)"
    return "Triton", "ok", "not installed (used on GPUs only)", ""


def cuda() -> Finding:
    """The version of CUDA that PyTorch was built for, against that of the driver."""
    built = torch.version.cuda
    if built is None:
        return "CUDA", "absent", "PyTorch is built without it", ""
    driver = _driver_version()
    found = f"PyTorch is built for {built}; " + (f"the driver is for {driver}" if driver else "no driver was found")
    if driver is None:
        return "CUDA", "warn", found, "A GPU needs NVIDIA's driver; without a GPU nothing is wrong."
    if int(driver.split(".")[0]) < int(built.split(".")[0]):
        return "CUDA", "warn", found, f"Update the driver, or install a PyTorch built for CUDA {driver}."
    return "CUDA", "ok", found, ""


def _driver_version() -> str | None:
    """The newest CUDA that the driver can do, or ``None`` where there is no driver."""
    try:
        number = torch_private.driver_version()
    except (AttributeError, RuntimeError):
        return None
    return f"{number // 1000}.{number % 1000 // 10}" if number > 0 else None


def gpus() -> Finding:
    """GPUs that PyTorch can use, and their memory."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        found = f"none (PyTorch is built for CUDA {built})" if built else "none (PyTorch is built for the CPU only)"
        return (
            "GPU",
            "warn",
            found,
            "Everything runs on the CPU; a GPU needs its driver and a CUDA build of PyTorch.",
        )
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(f"{index}: {name}, {human_bytes(free)} of {human_bytes(total)} free")
    return "GPU", "ok", "; ".join(found), ""


def host_memory() -> Finding:
    """Memory of the machine, or of the container if that is less."""
    facts = _meminfo()
    if facts is None:
        return "host memory", "warn", "unknown on this system", "See that the graph and its features fit."
    available, total = facts
    found = f"{human_bytes(available)} of {human_bytes(total)} available"
    if available < LOW_MEMORY:
        return "host memory", "warn", found, "Close other programs; building and compiling want 2 GiB."
    return "host memory", "ok", found, ""


def disk() -> Finding:
    """Free space where compiled programs are kept: Inductor's folder, and Joestar's own."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    places = {folder: shutil.disk_usage(folder).free for folder in map(_existing, (inductor, str(cache_folder())))}
    found = "; ".join(f"{human_bytes(free)} free for {folder}" for folder, free in places.items())
    if min(places.values()) < LOW_DISK:
        return (
            "disk",
            "warn",
            found,
            "Free some space, or set TORCHINDUCTOR_CACHE_DIR and JOESTAR_CACHE to a larger disk.",
        )
    return "disk", "ok", found, ""


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder).absolute()
    return str(next(place for place in (path, *path.parents) if place.is_dir()))


def optional(package: str, module: str, use: str) -> Finding:
    """A package that Joestar can do without."""
    if importlib.util.find_spec(module) is None:
        return package, "absent", f"not installed; only for {use}", ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "installed"
    return package, "ok", version, ""


def _meminfo() -> tuple[int, int] | None:
    """(available, total) bytes, within the control group's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    facts = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    if "MemAvailable" not in facts or "MemTotal" not in facts:
        return None
    available, total = facts["MemAvailable"], facts["MemTotal"]
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        return min(available, max(limit - (used or 0), 0)), limit
    return available, total


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
