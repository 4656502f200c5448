"""Whether a program rounds values to 16 bits and depends on it, which Inductor leaves out by itself."""

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from joestar import torch_private
from joestar.fusion.backend.stored import dtype_of, jumps, moves, name_of, stores

_SHORT = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_CASTS = {"to", "_to_copy", "type_as"}


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
        operands = [operand for operand in node.all_input_nodes if dtype_of(operand) is not None]
        short = dtype_of(node) in _SHORT
        of_others = operands and all(dtype_of(operand) not in _SHORT for operand in operands) and not stores(node)
        if short and (of_others or any(dtype_of(operand) in _WIDE for operand in operands)):
            rounded.add(node)
        elif not rounded.isdisjoint(operands):
            if short and not stores(node):
                rounded.add(node)
            elif dtype_of(node) in _WIDE and (name_of(node) in _CASTS or not _under_autocast(node)):
                return True
    return False


def compares(graph: fx.Graph) -> bool:
    """Whether rounded values are compared, picked or made integers where no product or op of ours has stored them.

    Inductor compares them as they were before rounding, and with others as they were stored: none equals the maximum,
    and its gradient is 0 / 0, or an entry that is at least as large as the maximum is found nowhere. Asked of a graph
    of ATen ops that Inductor compiles, forward or backward, which shows all casts.
    """
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if not made.isdisjoint(node.all_input_nodes) and jumps(node):
            return True
        kept = stores(node) or (moves(node) and made.isdisjoint(node.all_input_nodes))
        if dtype_of(node) in _SHORT and not kept:
            made.add(node)
    return False


def mark_rounded(graph: fx.Graph) -> None:
    """Marks what ``emulate_precision_casts`` rounds, which PyTorch does only while it traces a program under it."""
    for node in graph.nodes:
        if any(dtype_of(value) in _SHORT for value in (node, *node.all_input_nodes)):
            node.meta["low_precision_pointwise_barrier"] = True


def _under_autocast(node: fx.Node) -> bool:
    return torch.is_autocast_enabled(node.meta["val"].device.type)
