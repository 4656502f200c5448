"""``joestar::head_linear``: a product per head that takes and gives rows ``[N, H, ...]`` as aggregations do.

``torch.bmm`` wants the heads first; its result transposed is copied by whatever reads it next. Here the products write
their rows where they belong.
"""

import torch
from torch import Tensor

from joestar import kernels
from joestar.ops.registry import Padding, define, define_gradient

ops = torch.ops.joestar
_MOST_WASTE = 8
"""Heads up to which one product with mostly zeros beats a product per head, on a GPU: its bytes are what costs."""


def check_heads(name: str, x: Tensor, weight: Tensor) -> None:
    """Raises ``ValueError`` unless rows ``[N, H, F]`` and weights ``[H, C, F]`` of one dtype are given."""
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1] != weight.shape[0] or x.shape[2] != weight.shape[2]:
        raise ValueError(
            f"{name}: expected rows [N, H, F] and weights [H, C, F]; got {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"{name}: expected rows and weights of one dtype; got {x.dtype} and {weight.dtype}")


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``y[n, h] = weight[h] @ x[n, h]``: ``x`` ``[N, H, F]``, ``weight`` ``[H, C, F]``, ``y`` ``[N, H, C]``."""
    check_heads("head_linear", x, weight)
    heads, columns, width = weight.shape
    if _in_one(x, columns * width):
        return (x.flatten(1) @ _diagonal(weight).t()).view(-1, heads, columns)
    y = x.new_empty((x.shape[0], heads, columns))
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=y.transpose(0, 1))
    return y


def _diagonal(weight: Tensor) -> Tensor:
    kernel = kernels.find("gpu_heads.block_diagonal")
    return torch.block_diag(*weight) if kernel is None else kernel(weight)


def _in_one(x: Tensor, entries: int) -> bool:
    return x.device.type == "cuda" and x.shape[1] <= _MOST_WASTE and x.shape[0] > entries


def head_linear_weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    """``[H, C, F]``: the sums over rows of ``grad[n, h] x[n, h]^T``; ``grad`` ``[N, H, C]``."""
    heads, columns, width = x.shape[1], grad.shape[2], x.shape[2]
    if _in_one(x, columns * width):
        # N is the only large size: cuBLAS splits it among multiprocessors for one product, not for a batch of them
        both = grad.flatten(1).t() @ x.flatten(1)
        return both.view(heads, columns, heads, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    return torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1))


def _autocast(device: str):
    """As ``linear`` under autocast: both operands are cast."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return ops.head_linear(x.to(dtype), weight.to(dtype))

    return run


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    for_x = ops.head_linear(grad, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
    return for_x, ops.head_linear_weight_grad(x, grad) if ctx.needs_input_grad[1] else None


define(
    "head_linear(Tensor x, Tensor weight) -> Tensor", head_linear,
    fake=lambda x, weight: x.new_empty((x.shape[0], weight.shape[0], weight.shape[1])), gradient=(_setup, _backward),
    padding=Padding.SAFE, autocast=_autocast,
)  # fmt: skip
define_gradient(
    "head_linear_weight_grad(Tensor x, Tensor grad) -> Tensor", head_linear_weight_grad,
    fake=lambda x, grad: x.new_empty((x.shape[1], grad.shape[2], x.shape[2])),
)  # fmt: skip
