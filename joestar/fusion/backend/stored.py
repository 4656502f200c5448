"""Which values a compiled graph stores, and which results jump where one changes by its last bit."""

import torch
from torch import Tensor, fx

from joestar.torch_private import OpOverload

_PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "einsum", "convolution", "conv1d", "conv2d"}
SELECTS = {
    "max", "min", "amax", "amin", "cummax", "cummin", "sort", "topk", "kthvalue", "median", "nanmedian", "mode",
}  # fmt: skip
"""Ops whose results hold some of the entries of their first operand."""
_JUMP = SELECTS - {"amax", "amin"} | {
    "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "scatter_reduce", "index_reduce",
}  # fmt: skip


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """That of its value, if this is one tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def name_of(node: fx.Node) -> str:
    """The op's name without namespace and overload; nothing for what is no op."""
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""


def stores(node: fx.Node) -> bool:
    """Whether it is a product or an op of ours, whose results lie in memory."""
    own = isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prims")
    return own or name_of(node) in _PRODUCTS


def moves(node: fx.Node) -> bool:
    """Whether the result holds the very entries of an operand, or comes from outside."""
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return not returns or (returns[0].alias_info is not None and not returns[0].alias_info.is_write)


def jumps(node: fx.Node) -> bool:
    """Whether the result, or its gradient, jumps where an operand changes by its last bit: comparisons, integers.

    A mask of what ReLU let through does not count: values near zero are small on both sides.
    """
    operands = [dtype for operand in node.all_input_nodes if (dtype := dtype_of(operand)) is not None]
    if node.op != "call_function" or not any(dtype.is_floating_point for dtype in operands):
        return False
    name, dtype = name_of(node), dtype_of(node)
    if name in {"le", "gt"} and name_of(node.args[0]) == "relu" and node.args[1] == 0:
        return False
    return name in _JUMP or (dtype is not None and not dtype.is_floating_point and not dtype.is_complex)
