"""Steps of segment programs: what they are called, what they read and compute, and how gradients pass through them."""

from collections.abc import Callable, Iterable

import torch

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
UNARY = ("neg", "relu", "sigmoid", "tanh", "exp", "abs", "silu")
WITH_NUMBER = ("leaky_relu", "elu", "add_scalar", "mul_scalar")
"""Steps of one value and one number: a slope, an alpha, or what is added or multiplied."""

ACROSS = ("dot", "total", "spread")
"""Steps between sizes."""

OPERANDS = {
    **dict.fromkeys(BINARY, 2), **dict.fromkeys((*UNARY, *WITH_NUMBER), 1),
    "relu_grad": 2, "leaky_relu_grad": 2, "elu_grad": 2, "sigmoid_grad": 2, "tanh_grad": 2, "abs_grad": 2,
    "silu_grad": 2, "larger_grad": 3, "dot": 2, "total": 1, "spread": 1,
}  # fmt: skip
"""Values that a step reads. Those that end in ``_grad``, of gradients only, read the gradient of a step's result first;
then its argument, or its result for ``sigmoid`` and ``tanh``. ``larger_grad``: where the second is larger than the
third, half where they are equal."""

NUMBERS = dict.fromkeys((*WITH_NUMBER, "leaky_relu_grad", "elu_grad"), 1)
"""Numbers that follow the values of a step."""

MEANING = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "neg": torch.neg,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "elu": torch.nn.functional.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "abs": torch.abs,
    "silu": torch.nn.functional.silu,
    "add_scalar": torch.add,
    "mul_scalar": torch.mul,
}
"""What the steps of a program compute, as torch functions; those of gradients are the kernels' own."""

Step = tuple


def operands(step: Step) -> tuple[int, ...]:
    """Numbers of the values that a step reads."""
    return step[1 : 1 + OPERANDS[step[0]]]


def renumbered(step: Step, number: Callable[[int], int]) -> Step:
    count = 1 + OPERANDS[step[0]]
    return (step[0], *map(number, step[1:count]), *step[count:])


def parts_of(
    step: Step, result: int, grad: int, push: Callable[..., int], needed: Callable[[int], bool]
) -> Iterable[tuple[int, int]]:
    """(a value that the step reads, its gradient through the step), for the values that need one.

    Subgradients are PyTorch's: ReLU and the absolute value have 0 at 0, the leaky ReLU its slope, equal arguments of a
    maximum or minimum half each.
    """
    name, *arguments = step
    a = arguments[0]
    if name in BINARY:
        b = arguments[1]
        for_a, for_b = {
            "add": (lambda: grad, lambda: grad),
            "sub": (lambda: grad, lambda: push("neg", grad)),
            "mul": (lambda: push("mul", grad, b), lambda: push("mul", grad, a)),
            "div": (
                lambda: push("div", grad, b),
                lambda: push("neg", push("div", push("mul", grad, result), b)),
            ),
            "maximum": (lambda: push("larger_grad", grad, a, b), lambda: push("larger_grad", grad, b, a)),
            "minimum": (lambda: push("larger_grad", grad, b, a), lambda: push("larger_grad", grad, a, b)),
        }[name]
        return [(value, part()) for value, part in ((a, for_a), (b, for_b)) if needed(value)]
    if name == "add_scalar":
        return [(a, grad)]
    if name in ("neg", "mul_scalar"):
        return [(a, push(name, grad, *arguments[1:]))]
    if name == "exp":
        return [(a, push("mul", grad, result))]
    of = result if name in ("sigmoid", "tanh") else a
    return [(a, push(f"{name}_grad", grad, of, *arguments[1:]))]
