"""Pointwise steps of segment programs inside Triton kernels, and those of their gradients."""

import triton
import triton.language as tl

from joestar.kernels.gpu_activations import sigmoid, tanh


@triton.jit
def pointwise_step(
    values, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):
    NAME: tl.constexpr = NAMES[K]
    a, b = values[READ[3 * K]], values[READ[3 * K + 1]]
    number = tl.full([1, 1], NUMBERS[K], ACC)
    if NAME == "add":
        return a + b
    elif NAME == "sub":
        return a - b
    elif NAME == "mul":
        return a * b
    elif NAME == "div":
        return a / b
    elif NAME == "maximum":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "minimum":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "neg":
        return -a
    elif NAME == "relu":
        return tl.where(a <= 0, 0, a)
    elif NAME == "leaky_relu":
        return tl.where(a > 0, a, a * number)
    elif NAME == "elu":
        return tl.where(a > 0, a, (tl.exp(a) - 1) * number)
    elif NAME == "sigmoid":
        return sigmoid(a)
    elif NAME == "tanh":
        return tanh(a)
    elif NAME == "exp":
        return tl.exp(a)
    elif NAME == "abs":
        return tl.abs(a)
    elif NAME == "silu":
        return a * sigmoid(a)
    elif NAME == "add_scalar":
        return a + number
    elif NAME == "mul_scalar":
        return a * number
    else:
        return _gradient_step(values, NAMES, READ, NUMBERS, K, ACC)


@triton.jit
def _gradient_step(
    values, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):
    """Steps of gradients: ``a`` is the argument, or for ``sigmoid`` and ``tanh`` the result."""
    NAME: tl.constexpr = NAMES[K]
    grad, a, b = values[READ[3 * K]], values[READ[3 * K + 1]], values[READ[3 * K + 2]]
    number = tl.full([1, 1], NUMBERS[K], ACC)
    if NAME == "relu_grad":
        return tl.where(a <= 0, 0, grad)
    elif NAME == "leaky_relu_grad":
        return tl.where(a > 0, grad, grad * number)
    elif NAME == "elu_grad":
        return tl.where(a > 0, grad, grad * tl.exp(a) * number)
    elif NAME == "sigmoid_grad":
        return grad * a * (1 - a)
    elif NAME == "tanh_grad":
        return grad * (1 - a * a)
    elif NAME == "abs_grad":
        return tl.where(a > 0, grad, tl.where(a < 0, -grad, 0))
    elif NAME == "silu_grad":
        return grad * sigmoid(a) * (1 + a * sigmoid(-a))
    elif NAME == "larger_grad":
        return tl.where(a > b, grad, tl.where(a == b, grad / 2, 0))
    else:
        tl.static_assert(False, "a step that the kernels do not know")
