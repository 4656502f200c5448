"""Fake tensors of a graph: shapes without data, all of one mode, on which ops can be run."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx

from joestar.torch_private import FakeTensor, FakeTensorMode, OpOverload, enable_python_dispatcher, tree_leaves

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MADE = "made of"
HELD = "dtype of what is held"
"""Name, in a placeholder's ``meta``, of the dtype of data that are traced as float32 (``capture.short_data``)."""
_RESULTS = "joestar_results"
_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Ops that give other sizes, or numbers, for other data."""


def values(node: fx.Node) -> Iterator[Tensor]:
    """The tensors that a node stands for: its own, or those of its tuple."""
    return (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))


def mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the graph's fake tensors, ``None`` if it has none."""
    return next((value.fake_mode for node in graph.nodes for value in values(node) if _is_fake(value)), None)


def run(graph: fx.Graph, target, *args, **kwargs):
    """What a call gives, on shapes alone: a fake tensor (or several) of the graph's mode."""
    mode = mode_of(graph)

    def ran():
        # Some meta functions (addcmul beside [1, 1]) expand through C++, which knows no symbols but by way of Python.
        with mode or contextlib.nullcontext(), torch.no_grad(), enable_python_dispatcher():
            return target(*args, **kwargs)

    return once(mode, ran, target, args, kwargs)


def once(mode: FakeTensorMode | None, ran: Callable, target, args: tuple, kwargs: dict):
    """What ``ran`` gives, the call of an op on values of a mode: run for the first call of each form alone.

    Passes run on copies of one graph (variants), and are verified: they make the same calls over and over. Calls that
    write, and those whose result may depend on data, run each time.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if mode is None or not is_of_form(target) or not all(map(_is_without_data, tensors)):
        return ran()
    device = next((tensor.device.type for tensor in tensors), "cpu")
    able = torch.amp.is_autocast_available(device)
    autocast = torch.get_autocast_dtype(device) if able and torch.is_autocast_enabled(device) else None
    call = target, autocast, torch.get_default_dtype(), form(args), form(kwargs)
    results = vars(mode).setdefault(_RESULTS, {})  # as long as the tensors of the mode
    if call not in results:
        results[call] = ran()
    return results[call]


def is_of_form(target) -> bool:
    """Whether the forms of its arguments are all that decides what an op gives."""
    return isinstance(target, OpOverload) and not target._schema.is_mutable and _BY_DATA.isdisjoint(target.tags)


def _is_without_data(tensor: Tensor) -> bool:
    return _is_fake(tensor) and tensor.constant is None


def result(node: fx.Node):
    """What a node's op gives on the values of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return run(node.graph, node.target, *args, **kwargs)


def as_held(node: fx.Node):
    """What a placeholder stands for, in the dtype that it has where the program runs."""
    value = node.meta.get("val")
    return run(node.graph, torch.ops.aten.to.dtype, value, node.meta[HELD]) if HELD in node.meta else value


def made(node: fx.Node, value) -> None:
    """Gives a node the value that its op was seen to give for its arguments, and notes that it was."""
    node.meta["val"], node.meta[_MADE] = value, (value, _call_form(node))


def is_made(node: fx.Node) -> bool:
    """Whether a node's value is what its op was seen to give for such arguments; forgets the note."""
    value, call = node.meta.pop(_MADE, (None, None))
    return call is not None and value is node.meta["val"] and call == _call_form(node)


def _call_form(node: fx.Node) -> tuple:
    return node.target, form(node.args), form(node.kwargs)


def form(value):
    """All that decides what shapes an op gives: dtypes, sizes, strides and devices in place of tensors, and numbers.

    Nodes stand for their values. Two forms are equal only if they are so in every batch.
    """
    if isinstance(value, fx.Node):
        return "node", form(value.meta.get("val"))
    if isinstance(value, Tensor):
        return value.dtype, value.device, form(value.shape), form(value.stride()), form(value.storage_offset())
    if isinstance(value, (list, tuple)):
        return tuple(map(form, value))
    if isinstance(value, dict):
        return tuple((key, form(entry)) for key, entry in value.items())
    return type(value), value.node.expr if isinstance(value, _SYMBOLIC) else value


def strangers(graph: fx.Graph, among: list[fx.Node] | None = None) -> Iterator[tuple[fx.Node, str]]:
    """Nodes whose tensors are not of the graph's mode, and what they are: no op could be run on them and the others.
    ``among``: of the graph's nodes, those that are looked at; all of them by default."""
    mode = mode_of(graph)
    for node in graph.nodes if among is None else among:
        for value in values(node):
            if not _is_fake(value):
                yield node, f"a {type(value).__name__} on {value.device}"
            elif value.fake_mode is not mode:
                yield node, "a fake tensor of another mode"


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, FakeTensor)
