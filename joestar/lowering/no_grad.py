"""Regions under ``torch.no_grad`` become detached operands, so that the order of nodes means nothing.

Before                                   After
    _set_grad_enabled(False)                 w1 = aten.detach(w)
    t = aten.linear(x, w)                    t = aten.linear(x, w1)
    _set_grad_enabled(True)                  return aten.linear(t, w)
    return aten.linear(t, w)

A pass puts what it makes in front of the first or behind the last node that it replaces. Were the gradient mode a
switch between nodes, a fused op would be under that of its neighbours, and gradients be lost without a word.
"""

import torch
from torch import fx

from joestar.errors import CaptureError
from joestar.lowering.flows import flows
from joestar.lowering.functional import is_in_place
from joestar.lowering.origin import node_line
from joestar.torch_private import enter_inference_mode, exit_inference_mode, set_grad_enabled

_DETACH = torch.ops.aten.detach.default


def without_inference_mode(gm: fx.GraphModule, enabled: bool) -> None:
    """Makes regions under ``torch.inference_mode`` of Dynamo's graph such under ``no_grad``, which a re-trace keeps.

    Args:
        enabled: the gradient mode in which the graph is run.
    """
    inside, outer = False, []  # in inference mode: nothing that is enabled there counts
    for node in list(gm.graph.nodes):
        if node.target is set_grad_enabled:
            enabled = node.args[0]
            node.args = (enabled and not inside,)
        elif node.target is enter_inference_mode:
            outer.append((inside, enabled))
            inside = node.args[0]
            enabled = not inside
            _switch(gm, node, enabled)
        elif node.target is exit_inference_mode:
            inside, enabled = outer.pop()
            _switch(gm, node, enabled and not inside)
    gm.graph.lint()
    gm.recompile()


def _switch(gm: fx.GraphModule, node: fx.Node, enabled: bool) -> None:
    with gm.graph.inserting_before(node):
        gm.graph.call_function(set_grad_enabled, (enabled,))
    if node.target is exit_inference_mode:
        (entered,) = node.args
        gm.graph.erase_node(node)
        gm.graph.erase_node(entered)


def detach_regions(gm: fx.GraphModule, wanted: list[bool], enabled: bool) -> int:
    """Removes every switch of the gradient mode; returns how many.

    Args:
        wanted: for every placeholder, in order, whether it needs a gradient.
        enabled: the mode in which the graph is run.

    Raises:
        CaptureError: if a value that needs a gradient is written in place where none are computed.
    """
    if enabled and not any(node.target is set_grad_enabled for node in gm.graph.nodes):
        return 0
    needs = {node for node, want in zip(gm.graph.find_nodes(op="placeholder"), wanted, strict=True) if want}
    detached: dict[fx.Node, fx.Node] = {}
    switches = 0
    for node in list(gm.graph.nodes):
        if node.target is set_grad_enabled:
            enabled, detached = node.args[0], {}  # what is written in place in between is detached anew
            gm.graph.erase_node(node)
            switches += 1
        elif node.op == "call_function" and needs.intersection(node.all_input_nodes):
            if enabled:
                _note(node, needs)
            else:
                _detach(gm, node, needs, detached)
    return switches


def _note(node: fx.Node, needs: set[fx.Node]) -> None:
    """Adds a node that is computed from values that need a gradient, and what it writes to."""
    if any(any(flows(node, value)) for value in needs.intersection(node.all_input_nodes)):
        needs.add(node)
        if is_in_place(node):
            needs.add(node.args[0])


def _detach(gm: fx.GraphModule, node: fx.Node, needs: set[fx.Node], detached: dict[fx.Node, fx.Node]) -> None:
    if is_in_place(node) and node.args[0] in needs and node.args[0].op != "placeholder":
        raise CaptureError(
            f"in-place {node.target} under torch.no_grad(), at {node_line(node)}, changes a value that gradients "
            "flow through. Write instead: x + (changed - x).detach(), which has the values of `changed`."
        )
    for value in needs.intersection(node.all_input_nodes):
        if is_in_place(node) and value is node.args[0]:
            continue  # a parameter: check_writes refuses it
        if value not in detached:
            with gm.graph.inserting_before(node):
                detached[value] = gm.graph.call_function(_DETACH, (value,))
            detached[value].meta = dict(value.meta)
        node.replace_input_with(value, detached[value])
