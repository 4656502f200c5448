"""``joestar::scaled_linear``: the sum of several products of the same rows, each scaled by a factor per row (PNA).

``sum_j f[i, j] W_j x_i = (sum_j f[i, j] W_j) x_i``: rows with the same factors share one weight. Functions of degrees
take as many values as there are degrees: on a CPU rows are taken by their factors, and all products cost what one does.
"""

import torch
from torch import Tensor

from joestar.ops.dense.gather_linear import BLOCK_BYTES
from joestar.ops.registry import Padding, define, define_gradient

ops = torch.ops.joestar
_MOST_GROUPS = 256
_LEAST_ROWS = 16
"""Of a group on average: a weight of its own has to pay."""
_MIXED = 0x9E3779B97F4A7C15 - 2**64


def _check(x: Tensor, factors: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or factors.dim() != 2 or weight.dim() != 3 or (
        factors.shape != (x.shape[0], weight.shape[0]) or x.shape[1] != weight.shape[2]
    ):  # fmt: skip
        raise ValueError(
            "scaled_linear: expected rows [n, K], factors [n, m] and weights [m, C, K]; got "
            f"{list(x.shape)}, {list(factors.shape)} and {list(weight.shape)}"
        )
    if not x.dtype == factors.dtype == weight.dtype:
        raise ValueError(
            "scaled_linear: expected rows, factors and weights of one dtype; got "
            f"{x.dtype}, {factors.dtype} and {weight.dtype}"
        )


def scaled_linear(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """``y[i] = sum_j factors[i, j] * (weight[j] @ x[i])``, ``[n, C]``.

    Args:
        x: ``[n, K]``; factors: ``[n, m]``; weight: ``[m, C, K]``; all of one dtype.

    Raises:
        ValueError: for other shapes or dtypes.
    """
    _check(x, factors, weight)
    products = (x @ weight.flatten(0, 1).t()).view(x.shape[0], *weight.shape[:2])
    return (products * factors[:, :, None]).sum(1)


def scaled_linear_weight_grad(x: Tensor, factors: Tensor, grad: Tensor) -> Tensor:
    """``[m, C, K]``: the sums over rows of ``factors[i, j] grad[i] x[i]^T``; ``grad`` ``[n, C]``."""
    scaled = (factors[:, :, None] * grad[:, None]).flatten(1)
    return (scaled.t() @ x).view(factors.shape[1], grad.shape[1], x.shape[1])


def _groups(factors: Tensor) -> tuple[Tensor, list[int], Tensor] | None:
    """(rows in order of their factors, how many have the same, those factors ``[groups, m]``), if groups are large."""
    bits = factors.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[factors.element_size()])
    hashed = torch.zeros(len(bits), dtype=torch.int64, device="cpu")
    for column in bits.unbind(1):
        hashed = hashed.bitwise_xor_(column).mul_(_MIXED)
        hashed = hashed.bitwise_xor_(hashed >> 29)
    hashed, order = hashed.sort(stable=True)
    _, counts = hashed.unique_consecutive(return_counts=True)
    if not 0 < len(counts) <= min(_MOST_GROUPS, len(bits) // _LEAST_ROWS):
        return None
    first = order[counts.cumsum(0) - counts]
    same = torch.equal(bits[order], bits[first].repeat_interleave(counts, 0))  # no two of them have one hash
    return (order, counts.tolist(), factors[first]) if same else None


def _cpu(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    _check(x, factors, weight)
    found = _groups(factors)
    if found is None:
        return scaled_linear(x, factors, weight)
    order, counts, values = found
    weights = (values @ weight.flatten(1)).view(-1, *weight.shape[1:])
    y = x.new_empty((x.shape[0], weight.shape[1]))
    for group, rows in _blocks(order, counts, x.shape[1] * x.element_size()):
        y.index_copy_(0, rows, x.index_select(0, rows) @ weights[group].t())
    return y


def _cpu_weight_grad(x: Tensor, factors: Tensor, grad: Tensor) -> Tensor:
    found = _groups(factors)
    if found is None:
        return scaled_linear_weight_grad(x, factors, grad)
    order, counts, values = found
    sums = x.new_zeros((len(counts), grad.shape[1], x.shape[1]))
    for group, rows in _blocks(order, counts, x.shape[1] * x.element_size()):
        sums[group].addmm_(grad.index_select(0, rows).t(), x.index_select(0, rows))
    return (values.t() @ sums.flatten(1)).view(-1, *sums.shape[1:])


def _blocks(order: Tensor, counts: list[int], row_bytes: int):
    """(group, some of its rows), so few at a time that what is gathered of them stays in a cache."""
    size = max(64, BLOCK_BYTES // max(1, row_bytes))
    for group, rows in enumerate(order.split(counts)):
        for part in rows.split(size):
            yield group, part


def _autocast(device: str):
    """As ``linear`` under autocast: all operands are cast."""

    def run(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return ops.scaled_linear(x.to(dtype), factors.to(dtype), weight.to(dtype))

    return run


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, factors, weight = ctx.saved_tensors
    grad, (rows, scales, weights) = grad.contiguous(), ctx.needs_input_grad
    for_x = ops.scaled_linear(grad, factors, weight.transpose(1, 2)) if rows else None
    for_factors = torch.stack([(grad * (x @ part.t())).sum(1) for part in weight], 1) if scales else None
    return for_x, for_factors, ops.scaled_linear_weight_grad(x, factors, grad) if weights else None


define(
    "scaled_linear(Tensor x, Tensor factors, Tensor weight) -> Tensor", scaled_linear,
    fake=lambda x, factors, weight: x.new_empty((x.shape[0], weight.shape[1])), gradient=(_setup, _backward),
    padding=Padding.RULE, cpu=_cpu, autocast=_autocast,
)  # fmt: skip
define_gradient(
    "scaled_linear_weight_grad(Tensor x, Tensor factors, Tensor grad) -> Tensor", scaled_linear_weight_grad,
    fake=lambda x, factors, grad: x.new_empty((factors.shape[1], grad.shape[1], x.shape[1])), cpu=_cpu_weight_grad,
)  # fmt: skip
