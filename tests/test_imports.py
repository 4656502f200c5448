"""Imports point one way, along the levels of the architecture."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import joestar

PACKAGE = Path(joestar.__file__).parent

ALLOWED = {
    "errors": set(),
    "cache": set(),
    "interrupts": set(),
    "whole_numbers": set(),
    "torch_private": set(),
    "garbage": set(),
    "locks": {"garbage"},
    "streams": set(),
    "cuda_driver": set(),
    "host": {"_native"},
    "distributed": {"errors", "locks", "cuda_driver", "host", "kernels"},
    "metrics": {"errors"},
    "kernels": {"errors", "locks", "_native"},
    "ops": {"errors", "kernels", "streams", "_native"},
    "graph_api": {"errors", "ops"},
    "sampling": {"errors", "graph_api", "ops"},
    "nn": {"errors", "graph_api", "ops"},
    "data": {"errors", "distributed", "graph_api", "ops"},
    "partitioning": {"errors", "graph_api", "kernels", "ops"},
    "pyg": {"errors", "graph_api", "ops"},
    "lowering": {"errors", "host", "metrics", "pyg", "sampling", "nn", "data", "graph_api", "ops"},
    "fusion": {"errors", "lowering", "graph_api", "ops", "kernels"},
    "profile": {"errors", "locks", "lowering", "fusion", "graph_api", "ops"},
    "store": {
        "errors",
        "locks",
        "distributed",
        "profile",
        "lowering",
        "sampling",
        "data",
        "graph_api",
        "ops",
        "kernels",
    },
    "stages": {
        "errors",
        "locks",
        "partitioning",
        "store",
        "profile",
        "lowering",
        "sampling",
        "data",
        "graph_api",
        "ops",
        "kernels",
    },
    "runtime": {
        "errors",
        "locks",
        "streams",
        "cuda_driver",
        "host",
        "distributed",
        "garbage",
        "metrics",
        "stages",
        "store",
        "profile",
        "fusion",
        "lowering",
        "pyg",
        "graph_api",
        "ops",
    },
    "step": {
        "errors",
        "metrics",
        "pyg",
        "distributed",
        "runtime",
        "stages",
        "store",
        "profile",
        "fusion",
        "lowering",
        "graph_api",
        "ops",
    },
    "staged": {
        "errors",
        "distributed",
        "locks",
        "step",
        "runtime",
        "stages",
        "store",
        "profile",
        "lowering",
        "sampling",
        "graph_api",
        "ops",
    },
    "api": {
        "errors",
        "pyg",
        "distributed",
        "metrics",
        "staged",
        "step",
        "runtime",
        "stages",
        "store",
        "profile",
        "fusion",
        "lowering",
        "graph_api",
        "ops",
    },
    "bench": {
        "errors",
        "locks",
        "distributed",
        "api",
        "staged",
        "stages",
        "store",
        "streams",
        "step",
        "runtime",
        "profile",
        "fusion",
        "lowering",
        "data",
        "nn",
        "sampling",
        "graph_api",
        "ops",
        "kernels",
        "_native",
    },
    "__main__": {"cli"},
    "cli": {
        "errors",
        "distributed",
        "metrics",
        "bench",
        "staged",
        "api",
        "step",
        "runtime",
        "store",
        "profile",
        "data",
        "partitioning",
        "nn",
        "sampling",
        "graph_api",
        "ops",
        "kernels",
        "_native",
    },
}

ANYWHERE = {"__version__", "cache", "interrupts", "torch_private", "whole_numbers"}
"""What modules of all levels may import."""


def _imports(path: Path) -> set[str]:
    """Parts of the package that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" if node.module == "joestar" else node.module for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("joestar.")}
    return found


def test_every_module_imports_only_lower_levels():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in ALLOWED, f"{path}: say in ALLOWED at which level {part} stands"
        wrong += [
            f"{path.relative_to(PACKAGE)} -> {name}" for name in _imports(path) - ALLOWED[part] - {part, *ANYWHERE}
        ]
    assert not wrong, wrong


def test_only_the_bindings_know_python_and_nothing_links_against_torch():
    root = PACKAGE.parent
    if not (root / "csrc").exists():
        return
    for path in (root / "csrc").rglob("*.?pp"):
        text = path.read_text()
        assert "torch/" not in text and "ATen" not in text, path
        assert path.parent.name == "bindings" or "pybind11" not in text, path


@pytest.mark.parametrize(
    "first", ["from joestar.kernels import has_native; has_native()", "import joestar.kernels.cpu"]
)
def test_the_extension_is_loaded_behind_pytorch(first):
    """Loaded before, it has made ``import torch`` end in a segmentation fault."""
    seen = "import sys; names = list(sys.modules); print(names.index('torch') < names.index('joestar._native'))"
    done = subprocess.run([sys.executable, "-c", f"{first}; {seen}"], capture_output=True, text=True, timeout=100)
    assert done.stdout == "True\n", done.stderr
