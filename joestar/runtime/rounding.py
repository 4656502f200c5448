"""Whether a program rounds values to 16 bits and widens them again, which Inductor leaves out by itself."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from joestar import torch_private
from joestar.torch_private import OpOverload

_SHORT = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_CASTS = {"to", "_to_copy", "type_as"}
_PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "einsum", "convolution", "conv1d", "conv2d"}


@contextlib.contextmanager
def casts_kept() -> Iterator[None]:
    """What Inductor's option ``emulate_precision_casts`` leaves to do before PyTorch 2.13 (pytorch#185337).

    There a pass over forward and backward graph removes a cast to 16 bits that is taken back, whatever the option says,
    and C++ reads what was rounded as it was before.
    """
    kernel, passes = torch_private.CppKernel, torch_private.joint_patterns.patterns
    casts = "call_function", torch.ops.prims.convert_element_type.default
    before, patterns = kernel.cache_dtype_convert, passes[casts]
    kernel.cache_dtype_convert = lambda *_: None
    passes[casts] = [p for p in patterns if getattr(p, "handler", None) is not torch_private.pointless_convert]
    try:
        yield
    finally:
        kernel.cache_dtype_convert, passes[casts] = before, patterns


def rounds(graph: fx.Graph) -> bool:
    """Whether what was rounded is read wide again, without a product or an op of ours, which store it, in between.

    Asked of a program as it was written: passes may widen what they put elsewhere.

    Under autocast, whose casts a trace does not show, only casts of the program's own count (``x.half().float()``).
    """
    rounded: set[fx.Node] = set()
    for node in graph.nodes:
        operands = [operand for operand in node.all_input_nodes if _dtype(operand) is not None]
        short = _dtype(node) in _SHORT
        if short and any(_dtype(operand) in _WIDE for operand in operands):
            rounded.add(node)
        elif not rounded.isdisjoint(operands):
            if short and not _stores(node):
                rounded.add(node)
            elif _dtype(node) in _WIDE and (_name(node) in _CASTS or not _under_autocast(node)):
                return True
    return False


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""


def _stores(node: fx.Node) -> bool:
    own = isinstance(node.target, OpOverload) and node.target.namespace != "aten"
    return own or _name(node) in _PRODUCTS


def _under_autocast(node: fx.Node) -> bool:
    return torch.is_autocast_enabled(node.meta["val"].device.type)
