"""Every launcher switches to the device of its tensors: a graph on ``cuda:1`` while the current device is 0."""

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_fill, gpu_grad, gpu_heads, gpu_launch, gpu_optimizer, gpu_place

OTHERS = {
    function.__name__: function
    for function in (
        gpu_optimizer.adam, gpu_optimizer.sgd, gpu_fill.fill_rows, gpu_place.place_structure, gpu_heads.block_diagonal,
        gpu_grad.spmm_grad_x_transposed, gpu_grad.scatter_src_transposed,
    )
}  # fmt: skip
"""What is launched besides ops."""
FOLDER = Path(gpu.__file__).parent


def _decorated(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id in ("op", "on_device") for d in function.decorator_list)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(d) for d in function.decorator_list)


def _functions() -> dict[str, ast.FunctionDef]:
    """Every function at module level in the GPU kernels' files, kernels left out."""
    found = {}
    for path in sorted(FOLDER.glob("gpu*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not _is_kernel(node):
                found[node.name] = node
    return found


def _launches(function: ast.FunctionDef) -> bool:
    """Whether the function's own text launches a kernel: ``kernel[grid](...)``."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
        for node in ast.walk(function)
    )


def _called(function: ast.FunctionDef, functions: dict) -> set[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names & functions.keys() - {function.name}


def test_everything_that_launches_switches_or_is_called_by_what_does():
    functions = _functions()
    reaching = {name for name, function in functions.items() if _launches(function)}
    assert len(reaching) > 30
    while grown := {n for n, f in functions.items() if n not in reaching and _called(f, functions) & reaching}:
        reaching |= grown
    offered = {getattr(gpu, name).__name__ for name in gpu.__all__} | OTHERS.keys()
    wrong = sorted(name for name in reaching & offered if not _decorated(functions[name]))
    assert not wrong, f"these launch kernels and lack @op or @on_device: {wrong}"


def test_every_op_of_the_gpu_says_that_it_switches():
    offered = {name: getattr(gpu, name) for name in gpu.__all__} | OTHERS
    assert not [name for name, function in offered.items() if not getattr(function, "switches_device", False)]


def test_the_device_is_that_of_the_first_tensor(monkeypatch):
    seen, current = [], 0

    class Switched:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            seen.append(self.device)

        def __exit__(self, *args):
            seen.append("back")

    class OnSecond(torch.Tensor):
        device = torch.device("cuda", 1)

        def contiguous(self):
            return self

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Switched)
    tensor = torch.zeros(2).as_subclass(OnSecond)
    for decorate in (gpu_launch.op, gpu_launch.on_device):
        for arguments in ((tensor, 3), (3, [tensor]), ("text", None, tensor)):
            seen.clear()
            assert decorate(lambda *args: len(args))(*arguments) == len(arguments)
            assert seen == [torch.device("cuda", 1), "back"]
    current = 1
    seen.clear()
    gpu_launch.op(lambda *args: None)(tensor)
    assert not seen
