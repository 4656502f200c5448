"""What a gradient compares for equality is kept, not computed again (CPU and GPU).

Before, forward and backward in one graph                    After
    n = aten.sqrt(s);  m = aten.amax(n, [0])                     the same; n is saved for the backward pass
    picked = aten.eq(n, m)
    count = aten.sum(picked)
    grad = aten.mul(picked, aten.div(tangents_1, count))

The gradient of a maximum goes to the entries that equal it. The partitioner saves the maximum, and lets the backward
pass compute the entries again, in another loop, whose last bits may be others: then none equals it, and the gradient
is 0 / 0. The same holds for what a program compares with a maximum by itself, ``h >= h.amax(0)`` or
``h - h.amax(0) == 0``: what the maximum was taken of is kept as well. Must not fire for integers, for what is computed
from a gradient, nor for a maximum that is compared with nothing (that of softmax).
"""

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joestar.fusion.backend import stored
from joestar.fusion.backend.stored import SELECTS, dtype_of, jumps, moves, name_of, stores
from joestar.torch_private import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten


class SaveCompared(CustomGraphPass):
    """Marks what gradients compare in the joint graph, before it is partitioned; changes metadata only."""

    def __call__(self, graph: fx.Graph) -> None:
        """Marks the operands of every comparison, as far as they are computed from no gradient."""
        backward = {place for place in graph.find_nodes(op="placeholder") if str(place.target).startswith("tangents")}
        for node in graph.nodes:
            if node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
                backward.add(node)
        compared = [node.args for node in graph.find_nodes(op="call_function", target=_ATEN.eq.Tensor)]
        compared += [node.args[:1] for node in graph.nodes if name_of(node) in SELECTS and _is_compared(node)]
        for operand in (operand for operands in compared for operand in operands if isinstance(operand, fx.Node)):
            for source in _sources(operand):
                if source not in backward and _computed(source):
                    source.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__, stored.__file__))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose entries this one holds; a mask of padded rows chooses between two."""
    while name_of(node) == "_unsafe_view" or (name_of(node) and moves(node)):
        node = node.args[0]
    if node.target is not _ATEN.where.self:
        return [node]
    return [source for choice in node.args[1:] if isinstance(choice, fx.Node) for source in _sources(choice)]


def _is_compared(node: fx.Node) -> bool:
    """Whether something is compared, or made an integer, that is computed from it without a product in between."""
    found, seen = [node], {node}
    while found:
        for user in found.pop().users:
            if jumps(user):
                return True
            if user not in seen and not stores(user):
                seen.add(user)
                found.append(user)
    return False


def _computed(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return bool(node.op == "call_function" and node.all_input_nodes and dtype is not None and dtype.is_floating_point)
