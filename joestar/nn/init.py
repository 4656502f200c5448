"""Parameter initialisation as in PyG, in the same order of random draws."""

import math

import torch
from torch import Tensor, nn


def glorot(parameter: Tensor | None) -> None:
    """Uniform in ±sqrt(6 / (last two sizes)): Glorot and Bengio, 2010. ``None`` is left alone."""
    if parameter is not None:
        bound = math.sqrt(6.0 / (parameter.size(-2) + parameter.size(-1)))
        nn.init.uniform_(parameter, -bound, bound)


def zeros(parameter: Tensor | None) -> None:
    """Fills with zeros. ``None`` is left alone."""
    if parameter is not None:
        nn.init.zeros_(parameter)


def reset(module) -> None:
    """Calls ``reset_parameters`` of the module, or else of its children, however deep."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif isinstance(module, nn.Module):
        for child in module.children():
            reset(child)


class GlorotLinear(nn.Linear):
    """``x W^T + b`` with Glorot weights and PyG's bias (uniform in ±1/sqrt(in_features))."""

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        glorot(self.weight)
        if self.bias is not None:
            bound = 1.0 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_features]`` to ``[N, out_features]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)
