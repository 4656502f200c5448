"""Gradients of our ops can be taken once: differentiating them again is an error, not a gradient of zero.

The formulas of the backward passes are made of ops that have no gradient. Under ``create_graph=True`` PyTorch records
them all the same, and would take what it finds no derivative for as zero.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joestar.errors import GradientError
from joestar.ops.differentiation import refuse_tangents
from joestar.torch_private import tree_flatten, tree_leaves, tree_unflatten


def once(name: str, formula: Callable) -> Callable:
    """The formula of a backward pass, ``formula(ctx, *grads)``, with results that refuse to be differentiated.

    Without ``create_graph`` it is the formula and nothing else. With it, the results depend on the incoming gradients
    and on the saved tensors, by way of a function whose own backward pass raises ``GradientError``. Where none of these
    needs a gradient, the results are constants. Gradients with tangents (forward over reverse mode) are refused.

    Args:
        name: of the op, for the message.
    """

    def backward(ctx, *grads):
        refuse_tangents(name, grads)
        if not torch.is_grad_enabled():
            return formula(ctx, *grads)
        saved = ctx.saved_tensors  # read once: recomputation in activation checkpointing gives them once
        with torch.no_grad():
            results = formula(_Saved(ctx, saved), *grads)
        return refusing(name, results, [*tree_leaves(grads), *saved])

    return backward


def refusing(name: str, results, sources: Sequence):
    """``results`` that cannot be differentiated for ``sources``.

    Args:
        results: a tensor, or tensors and ``None`` in tuples and lists.
        sources: the tensors, among anything else, that the results were computed from.
    """
    if not torch.is_grad_enabled():
        return results
    sources = [source for source in sources if isinstance(source, Tensor) and source.requires_grad]
    flat, form = tree_flatten(results)
    moving = [i for i, value in enumerate(flat) if isinstance(value, Tensor) and value.is_floating_point()]
    if not sources or not moving:
        return results
    for i, value in zip(moving, _Refused.apply(name, [flat[i] for i in moving], *sources), strict=True):
        flat[i] = value
    return tree_unflatten(flat, form)


class _Saved:
    """The context of a backward pass whose saved tensors have been read already."""

    def __init__(self, ctx, saved: tuple):
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)


class _Refused(torch.autograd.Function):
    """(name, values, sources) -> the values, as functions of the sources that have no derivative."""

    @staticmethod
    def forward(name: str, values: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise GradientError(
            f"{ctx.name}: its gradient was differentiated again, by a gradient penalty, a Hessian or a backward pass"
            " through a gradient taken with create_graph=True. Expected first derivatives only: what Joestar computes"
            " (pull, push, apply_edges, edge_softmax, compiled steps) has no second ones. If the gradient is only to be"
            " read, detach() it, or take it without create_graph. Else aggregate with PyTorch's ops in a loop of your"
            " own: torch.zeros(block.num_dst, D).index_add(0, dst, x[block.indices]) is a sum over edges, where"
            " dst = torch.repeat_interleave(block.indptr.diff())."
        )

    @staticmethod
    def vmap(info, in_dims: tuple, name: str, values: list[Tensor], *sources: Tensor) -> tuple:
        return _Refused.apply(name, values, *sources), tuple(in_dims[1])
