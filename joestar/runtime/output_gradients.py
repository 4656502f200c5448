"""Parameters that a loss does not reach have no gradient, where it reads only some of what the model returned.

A compiled program's backward pass is one function of the gradients of all outputs: for those that a loss leaves out
PyTorch gives it zeros, and all parameters get a gradient, some of them zero. Plain PyTorch gives those ``None``, which
optimizers leave alone; a zero has them decay weights and follow momentum. From the program's graph is known which
output reads which parameter; which outputs a backward pass is about is known when it begins.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from joestar.lowering.flows import reaching
from joestar.lowering.inputs import Input
from joestar.runtime import quiet_hooks


class Reach:
    """Which of a program's outputs depend on which tensors.

    Args:
        graph: a program, its first ``count`` outputs those of the model. roles: of its placeholders.

    Attributes:
        of: id of a tensor that needs a gradient -> numbers of the outputs. tensors: these tensors.
    """

    def __init__(self, graph: fx.Graph, roles: Sequence[Input], count: int):
        (output,) = graph.find_nodes(op="output")
        places = zip(graph.find_nodes(op="placeholder"), roles, strict=True)
        role_of = {node: role for node, role in places if role.needs_grad}
        self.of: dict[int, frozenset[int]] = {id(role.tensor): frozenset() for role in role_of.values()}
        self.tensors = [role.tensor for role in roles if role.needs_grad]
        found = reaching(graph, list(role_of))
        for number, value in enumerate(output.args[0][:count]):
            for node in set().union(*found.get(value, ())):
                self.of[id(role_of[node].tensor)] |= {number}

    def has_gradient(self, tensor: Tensor, used: frozenset[int]) -> bool:
        """Whether a loss of these outputs reaches a tensor, in the backward pass that is under way.

        Where not, it is about to get no gradient, and hooks that PyTorch calls all the same are not called: plain
        PyTorch would not come to them.
        """
        reached = not used.isdisjoint(self.of.get(id(tensor), used))
        if not reached:
            quiet_hooks.before(tensor)
        return reached

    @property
    def differs(self) -> bool:
        """Whether a loss of some outputs may leave out a parameter that one of others reaches."""
        return len({outputs for outputs in self.of.values() if outputs}) > 1


class Gates:
    """Stand-ins for a program's parameters in one call: behind each, gradients end where a loss does not reach it."""

    def __init__(self, reach: Reach):
        self.reach = reach
        self.used: frozenset[int] | None = None
        self._by_id = {id(tensor): _Gate.apply(self, tensor) for tensor in reach.tensors}

    def of(self, tensor: Tensor) -> Tensor:
        """What stands in for a tensor: itself, if nothing does."""
        return self._by_id.get(id(tensor), tensor)

    def open(self, tensor: Tensor) -> bool:
        """Whether the backward pass that goes on is about an output that depends on a tensor."""
        return self.used is None or self.reach.has_gradient(tensor, self.used)

    def follow(self, outputs: Sequence[Tensor]) -> None:
        """Has every backward pass through what a call returned note first which outputs it is about."""
        self._by_id.clear()  # they know this object
        node, places = None, []
        for number, output in enumerate(outputs):
            found = _compiled(output)
            if found is None:
                if output.requires_grad:
                    return  # something stands between: nothing is known of it
                continue
            node = found[0] if node is None else node
            if found[0] is not node:
                return
            places.append((number, found[1]))

        def note(grads: tuple[Tensor | None, ...]) -> None:
            self.used = frozenset(number for number, place in places if grads[place] is not None)

        if node is not None:
            node.register_prehook(note)


def _compiled(output: Tensor):
    """(the node of a compiled program's backward pass, which of its outputs) that an output comes from."""
    node, place = output.grad_fn, output.output_nr
    while node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
        if len(node.next_functions) != 1:
            return None
        ((node, place),) = node.next_functions
    return None if node is None else (node, place)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates: Gates, tensor: Tensor) -> Tensor:
        ctx.gates, ctx.key = gates, tensor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, grad if ctx.gates.open(ctx.key) else None
