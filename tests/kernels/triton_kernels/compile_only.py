"""In the place of a GPU: launches of Triton's kernels are compiled for an H100/H200 (sm_90), and nothing runs.

To be imported before kernels are, in a process of its own without ``TRITON_INTERPRET``.
"""

import contextlib
import inspect
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

compiled, launched = {}, set()


class Device:
    """What Triton asks of a driver until a kernel is loaded."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def compile_only(function: JITFunction, grid):
    """In place of ``function[grid]``."""

    def launch(*args, **kwargs):
        assert all(size > 0 for size in grid) and all(size < 2**16 for size in grid[1:]), (function.__name__, grid)
        binary = function.run(*args, grid=grid, warmup=True, **kwargs)
        launched.add(function)
        settings = {name: value for name, value in kwargs.items() if isinstance(value, (int, bool))}
        dtypes = sorted({str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)})
        compiled.setdefault(binary.hash, (function, {"dtypes": "/".join(dtypes), **settings}, binary))

    return launch


driver.set_active(Device())
JITFunction.__getitem__ = compile_only


@contextlib.contextmanager
def zeroed():
    """``torch.empty`` gives zeros: sizes that are read back from kernels that did not run must not be garbage."""
    names = {(torch, "empty"): torch.zeros, (torch, "empty_like"): torch.zeros_like,
             (torch.Tensor, "new_empty"): torch.Tensor.new_zeros}  # fmt: skip
    before = {place: getattr(*place) for place in names}
    for (owner, name), made in names.items():
        setattr(owner, name, made)
    try:
        yield
    finally:
        for (owner, name), made in before.items():
            setattr(owner, name, made)


def reached(function: JITFunction, seen: set[JITFunction]) -> set[JITFunction]:
    """The function and every ``@triton.jit`` function that its source names."""
    if function not in seen:
        seen.add(function)
        for name in set(re.findall(r"\w+", inspect.getsource(function.fn))):
            called = function.fn.__globals__.get(name)
            if isinstance(called, JITFunction):
                reached(called, seen)
    return seen


def _register_products(text: str) -> int:
    """How many products of groups of warps read their left operand from registers, after the instruction."""
    operands = [line.split(" : ")[-1].split(" * ")[0] for line in text.splitlines() if "warp_group_dot " in line]
    return sum("dot_op" in operand for operand in operands)


def _floats(binary) -> list[str]:
    """Arguments that are float32 numbers: what Triton makes of Python's, which have more digits."""
    return [str(name) for name, kind in binary.src.signature.items() if kind == "fp32"]


def resources() -> list[dict]:
    """Registers, stack and shared memory of every binary, as ``cuobjdump`` reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        for function, settings, binary in compiled.values():
            file.write_bytes(binary.asm["cubin"])
            text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
            used = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text.stdout)}
            module = function.fn.__module__.rpartition(".")[2]
            rows.append({"kernel": f"{module}.{function.__name__}", "registers": used["REG"], "stack": used["STACK"],
                         "shared": used["SHARED"], "ptx": len(binary.asm["ptx"]),
                         "register_products": _register_products(binary.asm["ttgir"]), "floats": _floats(binary),
                         "vectors": len(re.findall(r"ld\.global\.v4", binary.asm["ptx"])), **settings})  # fmt: skip
    return rows
