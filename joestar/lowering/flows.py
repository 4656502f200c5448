"""Which results of an op a gradient reaches its arguments from: autograd is asked, op by op, on shapes alone.

A list of ops without a derivative (``zeros_like``, ``new_full``, comparisons) would be ours, and age.
"""

import operator

import torch
from torch import Tensor, fx

from joestar.lowering import fakes
from joestar.torch_private import enable_python_dispatcher, tree_leaves, tree_map

_FLOWS = "joestar_flows"


def flows(node: fx.Node, source: fx.Node) -> tuple[bool, ...]:
    """For every leaf of a node's value, whether its gradient flows to the values of ``source``, one of its arguments.

    What cannot be asked counts as flowing: ops that write, or whose results have other sizes for other data.
    """
    results = tree_leaves(node.meta.get("val"))
    able = tuple(map(_is_real, results))
    if not any(able) or not any(map(_is_real, tree_leaves(source.meta.get("val")))):
        return (False,) * len(results)
    mode = fakes.mode_of(node.graph)
    if mode is None or not fakes.is_of_form(node.target):
        return able
    known = vars(mode).setdefault(_FLOWS, {})  # as long as the tensors of the mode
    call = node.target, tuple(arg is source or _alike(arg) for arg in tree_leaves((node.args, node.kwargs)))
    if call not in known:
        known[call] = _asked(node, source, mode)
    return known[call]


def reaching(graph: fx.Graph, sources: list[fx.Node]) -> dict[fx.Node, list[set[fx.Node]]]:
    """For every leaf of a node's value, the sources that its gradient flows to; a source's flows to itself."""
    found: dict[fx.Node, list[set[fx.Node]]] = {source: [{source}] for source in sources}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        behind = [arg for arg in node.all_input_nodes if any(found.get(arg, ()))]
        if node.target is operator.getitem and behind and len(found[behind[0]]) > 1:
            found[node] = [found[behind[0]][node.args[1]]]
        elif behind:
            found[node] = _together(node, behind, found)
    return found


def _together(node: fx.Node, behind: list[fx.Node], found: dict) -> list[set[fx.Node]]:
    leaves: list[set[fx.Node]] = [set() for _ in tree_leaves(node.meta.get("val"))]
    for arg in behind:
        for leaf, open_ in zip(leaves, flows(node, arg), strict=True):
            if open_:
                leaf.update(*found[arg])
    return leaves


def _asked(node: fx.Node, source: fx.Node, mode) -> tuple[bool, ...]:
    def given(arg):
        return arg.meta["val"] if isinstance(arg, fx.Node) else arg

    def wanting(value):
        return value.detach().requires_grad_() if isinstance(value, Tensor) and _is_real(value) else value

    with mode, torch.enable_grad(), enable_python_dispatcher():
        own = tree_map(wanting, source.meta["val"])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: own if arg is source else given(arg))
        results = tree_leaves(node.target(*args, **kwargs))
    return tuple(isinstance(result, Tensor) and result.requires_grad for result in results)


def _is_real(value) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _alike(arg):
    """What of another argument may decide: flags, names and dtypes themselves; of anything else, what it is."""
    return arg if isinstance(arg, (bool, str, torch.dtype)) else type(arg)
