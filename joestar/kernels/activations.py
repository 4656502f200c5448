"""What happens to rows before an aggregation reads them: bias, layer norm, activation, as one line of text and vectors.

An activation is a name and its numbers, as text: ``"elu 1.0 1.0 1.0"``, ``"gelu none"``, ``"relu"``. The table has what
PyTorch computes; ``gpu_activations`` has the same for kernels.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from joestar.kernels.layout import wide_dtype

_ATEN = torch.ops.aten


class Activation(NamedTuple):
    """``forward(u, *numbers)``, and ``backward(grad, u, *numbers)``, its gradient from the same argument ``u``."""

    forward: Callable
    backward: Callable


def _elu_grad(grad, u, alpha, scale, input_scale):
    return _ATEN.elu_backward(grad, alpha, scale, input_scale, False, u)


def _gelu_grad(grad, u, approximate):
    return _ATEN.gelu_backward(grad, u, approximate=approximate)


def _hardsigmoid_grad(grad, u):
    return torch.where((u <= -3) | (u >= 3), torch.zeros_like(grad), grad / 6)


ACTIVATIONS = {
    "identity": Activation(lambda u: u, lambda grad, u: grad),
    "relu": Activation(torch.relu, lambda grad, u: _ATEN.threshold_backward(grad, u, 0)),
    "elu": Activation(_ATEN.elu, _elu_grad),
    "leaky_relu": Activation(_ATEN.leaky_relu, lambda grad, u, slope: _ATEN.leaky_relu_backward(grad, u, slope, False)),
    "gelu": Activation(lambda u, approximate: _ATEN.gelu(u, approximate=approximate), _gelu_grad),
    "silu": Activation(_ATEN.silu, _ATEN.silu_backward),
    "mish": Activation(_ATEN.mish, _ATEN.mish_backward),
    "tanh": Activation(torch.tanh, lambda grad, u: _ATEN.tanh_backward(grad, u.tanh())),
    "sigmoid": Activation(torch.sigmoid, lambda grad, u: _ATEN.sigmoid_backward(grad, u.sigmoid())),
    "log_sigmoid": Activation(torch.nn.functional.logsigmoid, lambda grad, u: grad * torch.sigmoid(-u)),
    "softplus": Activation(_ATEN.softplus, _ATEN.softplus_backward),
    "hardswish": Activation(_ATEN.hardswish, _ATEN.hardswish_backward),
    "hardsigmoid": Activation(_ATEN.hardsigmoid, _hardsigmoid_grad),
    "hardtanh": Activation(_ATEN.hardtanh, _ATEN.hardtanh_backward),
}
"""Name -> what PyTorch computes. Numbers are those of aten's op of that name."""

SELU = (1.6732632423543772, 1.0507009873554805)
"""Alpha and scale (Klambauer et al., 2017)."""

SPELT = {
    "relu6": lambda: ("hardtanh", 0.0, 6.0),
    "selu": lambda: ("elu", *SELU, 1.0),
    "celu": lambda alpha: ("elu", alpha, 1.0, 1.0 / alpha),
}
"""Activations that are others under certain numbers."""


def spelt(name: str, *numbers) -> str | None:
    """The text of aten's activation ``name`` under these arguments, ``None`` if the table has none of the name."""
    if name in SPELT:
        name, *numbers = SPELT[name](*numbers)
    if name not in ACTIVATIONS:
        return None
    return " ".join((name, *(str(n) if isinstance(n, str) else repr(float(n)) for n in numbers)))


@functools.cache
def parsed(text: str) -> tuple:
    """(name, *numbers) of a text.

    Raises:
        ValueError: there is no such activation.
    """
    name, *words = text.split()
    if name not in ACTIVATIONS:
        raise ValueError(f"expected an activation out of {', '.join(ACTIVATIONS)}; got {text!r}")
    return name, *map(_number, words)


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


class Before(NamedTuple):
    """What happens to rows ``[n, D]`` before they are read: plus ``bias``, layer norm if ``eps`` > 0, activation.

    ``bias``, ``gain`` and ``shift`` (of the norm) are ``[D]`` or none. Without ``act`` there is a bias at most.
    """

    act: str | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 0.0
    bias: Tensor | None = None

    def check(self, x: Tensor) -> None:
        """Raises ``ValueError`` for an activation that there is not, or vectors that do not fit to rows of ``x``."""
        parsed(self.act)
        width = x.shape[1]
        for name in ("gain", "shift", "bias"):
            vector = getattr(self, name)
            if vector is not None and vector.shape != (width,):
                raise ValueError(f"aggregate_activated: expected {name} [{width}], got {list(vector.shape)}")
        if not self.eps and (self.gain is not None or self.shift is not None):
            raise ValueError(f"aggregate_activated: expected eps > 0 with gain or shift, of a norm, got {self.eps}")

    def __call__(self, x: Tensor) -> Tensor:
        """The rows, in ``x``'s dtype or a wider one: what is computed is not rounded to 16 bits in between."""
        name, *numbers = parsed(self.act)
        return ACTIVATIONS[name].forward(self._normed(x)[0], *numbers)

    def gradients(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients for ``x``, ``gain``, ``shift`` and ``bias``, ``[0]`` where there is no such vector.

        ``grad``: ``[n, D]``, for the result.
        """
        (name, *numbers), wide = parsed(self.act), wide_dtype(x.dtype)
        u, centred, scale = self._normed(x)
        by_u = ACTIVATIONS[name].backward(grad.to(wide), u, *numbers)
        rows = by_u
        if self.eps:
            unit = centred * scale
            rows = by_u if self.gain is None else by_u * self.gain.to(wide)
            rows = scale * (rows - rows.mean(1, True) - unit * (rows * unit).mean(1, True))
        by_gain = by_u * unit if self.gain is not None else rows
        summed = ((by_gain, self.gain), (by_u, self.shift), (rows, self.bias))
        return rows, *(x.new_empty(0) if v is None else r.sum(0).to(v.dtype) for r, v in summed)

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(argument of the activation; rows minus their mean and 1 over their deviation ``[n, 1]``, with a norm)."""
        u = x.to(wide_dtype(x.dtype))
        u = u if self.bias is None else u + self.bias.to(u.dtype)
        if not self.eps:
            return u, None, None
        centred = u - u.mean(1, True)
        scale = (centred.square().mean(1, True) + self.eps).rsqrt()
        u = centred * scale
        u = u if self.gain is None else u * self.gain.to(u.dtype)
        return u if self.shift is None else u + self.shift.to(u.dtype), centred, scale
