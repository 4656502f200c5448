"""What autograd sees of our ops: first derivatives in reverse mode. Forward mode and ``torch.func`` are an error.

PyTorch takes an op without a formula for tangents as a constant: derivatives in forward mode would be zero in silence.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from joestar.errors import GradientError
from joestar.torch_private import (
    AutogradInfo,
    OpOverload,
    after_autograd,
    any_requires_grad,
    below_autograd,
    make_autograd_impl,
    transforms_active,
    tree_leaves,
)

_BY_HAND = (
    "Else aggregate with PyTorch's ops in a loop of your own: torch.zeros(block.num_dst, D).index_add(0, dst,"
    " x[block.indices]) is a sum over edges, where dst = torch.repeat_interleave(block.indptr.diff())."
)


def differentiable(op: OpOverload, setup: Callable, backward: Callable) -> Callable:
    """The autograd kernel of an op: what ``torch.library.register_autograd`` would make, and refusals.

    Eager and compiled steps go through it with every op: where nothing needs a gradient it does less than PyTorch's.

    Args:
        setup, backward: as of ``torch.library.register_autograd``.
    """
    recorded = make_autograd_impl(op, AutogradInfo(backward, setup))
    name = op._schema.name

    def kernel(keys, *args):
        if forward_ad._current_level >= 0:
            refuse_tangents(name, args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            if transforms_active():
                raise GradientError(
                    f"{name}: torch.func (grad, vjp, jacrev, hessian) asked for its derivative. Expected a gradient in"
                    " the usual way: x.requires_grad_(), then loss.backward() or torch.autograd.grad(loss, x)."
                    f" {_BY_HAND}"
                )
            return recorded(keys, *args)
        with below_autograd():
            return op.redispatch(keys & after_autograd, *args)

    return kernel


def refuse_tangents(name: str, values) -> None:
    """Raises ``GradientError`` if a tensor among ``values``, nested or not, has a tangent of forward-mode autograd."""
    if forward_ad._current_level < 0:
        return
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_floating_point()]
    if any(forward_ad.unpack_dual(value).tangent is not None for value in tensors):
        raise GradientError(
            f"{name}: a derivative in forward mode was asked for (torch.func.jvp, jacfwd, hessian or"
            " torch.autograd.forward_ad). Expected reverse mode, loss.backward() or torch.autograd.grad: what Joestar"
            " computes (pull, push, apply_edges, edge_softmax, compiled steps) has no formulas for tangents."
            f" {_BY_HAND}"
        )
