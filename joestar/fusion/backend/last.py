"""What is done with the backend's graphs behind its own rewrites, on a GPU: they are as they will run.

Kernels of Triton for our ops begin to be compiled in the background, while Inductor writes its own code
(``compile_soon``); then ``overlap`` has its turn.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from joestar.fusion.backend.overlap import Overlap
from joestar.ops import ahead
from joestar.ops.registry import on_gpu
from joestar.torch_private import CustomGraphPass


class LastPasses(CustomGraphPass):
    """As Inductor calls them; ``overlap``: unless that is switched off."""

    def __init__(self, overlap: bool = True):
        self.overlap = Overlap() if overlap else None

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites ``graph`` in place."""
        compile_soon(graph)
        if self.overlap is not None:
            self.overlap(graph)

    def uuid(self):
        """Identifies what changes the graph in Inductor's cache of compiled graphs, which nothing empty gets into."""
        return b"none" if self.overlap is None else self.overlap.uuid()


@dataclass(frozen=True)
class _Blank:
    """A tensor of a graph without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        return ahead.blank(self.shape, self.dtype, self.stride)


def compile_soon(graph: fx.Graph) -> None:
    """Begins to compile the kernels of our ops in a graph of a GPU."""
    devices = {value.device for node in graph.nodes if isinstance(value := node.meta.get("val"), Tensor)}
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is not None:
        ahead.begin(calls(graph), device)


def calls(graph: fx.Graph) -> list[Callable[[], object]]:
    """Calls of our ops in a graph with tensors of the meta device; one of those that do not differ.

    Without ops that are given sizes which are not known.
    """
    found = {}
    for node in graph.nodes:
        kernel = on_gpu(node.target) if node.op == "call_function" else None
        if kernel is None:
            continue
        try:
            given = fx.map_arg((node.args, node.kwargs), _described)
        except ValueError:
            continue
        found.setdefault((node.target.name(), repr(given)), functools.partial(_call, kernel, *given))
    return list(found.values())


def _described(node: fx.Node):
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise ValueError(f"{node} is no tensor of known size")
    numbers = (*value.shape, *value.stride())
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{node} is no tensor of known size")
    return _Blank(numbers[: value.dim()], numbers[value.dim() :], value.dtype)


def _call(kernel: Callable, args, kwargs) -> None:
    args, kwargs = map_aggregate((args, kwargs), lambda value: value.made() if isinstance(value, _Blank) else value)
    kernel(*args, **kwargs)
