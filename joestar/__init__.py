"""Joestar: an end-to-end compiler for sampling-based GNN training on PyTorch 2.

Importing the package imports neither PyTorch nor the compiler: every name below is looked up when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from joestar import errors, nn
    from joestar.api import compile
    from joestar.data import load
    from joestar.graph_api import Block, Graph, fn
    from joestar.partitioning import Partitioning, partition
    from joestar.runtime.checkpoint import Checkpoints
    from joestar.runtime.inference import infer as inference
    from joestar.sampling import LayerDependentSampler, NeighborSampler
    from joestar.stages import LargeBatch, Partitions
    from joestar.step import Step

__all__ = [
    "Block",
    "Checkpoints",
    "Graph",
    "LargeBatch",
    "LayerDependentSampler",
    "NeighborSampler",
    "Partitioning",
    "Partitions",
    "Step",
    "compile",
    "errors",
    "fn",
    "inference",
    "load",
    "nn",
    "partition",
]

_PLACES = {
    "Block": ("joestar.graph_api", "Block"),
    "Checkpoints": ("joestar.runtime.checkpoint", "Checkpoints"),
    "Graph": ("joestar.graph_api", "Graph"),
    "LargeBatch": ("joestar.stages", "LargeBatch"),
    "LayerDependentSampler": ("joestar.sampling", "LayerDependentSampler"),
    "NeighborSampler": ("joestar.sampling", "NeighborSampler"),
    "Partitioning": ("joestar.partitioning", "Partitioning"),
    "Partitions": ("joestar.stages", "Partitions"),
    "Step": ("joestar.step", "Step"),
    "compile": ("joestar.api", "compile"),
    "fn": ("joestar.graph_api", "fn"),
    "inference": ("joestar.runtime.inference", "infer"),
    "load": ("joestar.data", "load"),
    "partition": ("joestar.partitioning", "partition"),
}
"""Public name -> the module that has it, and its name there."""
_MODULES = frozenset({
    "api", "bench", "cache", "cli", "cuda_driver", "data", "distributed", "errors", "fusion", "garbage", "graph_api",
    "host", "interrupts", "kernels", "locks", "lowering", "metrics", "nn", "ops", "partitioning", "profile", "pyg",
    "runtime", "sampling", "staged", "stages", "step", "store", "streams", "torch_private", "whole_numbers",
})  # fmt: skip
"""Parts of the package, which need no import statement of their own."""


def __getattr__(name: str) -> Any:
    """A public name at its first use (PEP 562); from then on it is an ordinary attribute."""
    if name in _PLACES:
        module, there = _PLACES[name]
        value = getattr(_imported(module), there)
    elif name in _MODULES:
        value = _imported(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _imported(module: str) -> Any:
    from joestar.garbage import fewer_collections

    with fewer_collections:
        return import_module(module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
