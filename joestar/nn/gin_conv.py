"""The convolution of graph isomorphism networks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from joestar.graph_api import fn
from joestar.graph_api.computation import Computation
from joestar.nn.conv import Conv
from joestar.nn.init import reset


class GINConv(Conv):
    """``nn((1 + eps) x_i + sum_{j in N(i)} x_j)`` (Xu, Hu, Leskovec and Jegelka, 2019). Keys: ``eps``, ``nn.*``.

    Args:
        nn: maps ``[N, in]`` to ``[N, out]``, such as an ``MLP``.
        eps: first value of the destination's extra weight.
        train_eps: learn it.
        **options: ``aggr`` (default ``"add"``), and see ``Conv``.

    Raises:
        ConfigError: an unknown aggregation or option.
    """

    def __init__(self, nn: Callable, eps: float = 0.0, train_eps: bool = False, **options: Any):
        super().__init__(options.pop("aggr", "add"), **options)
        self.nn = nn
        self.initial_eps = eps
        if train_eps:
            self.eps = Parameter(torch.empty(1))
        else:
            self.register_buffer("eps", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters of ``nn`` anew; ``eps`` gets its first value."""
        reset(self.nn)
        torch.nn.init.constant_(self.eps, self.initial_eps)

    def forward(self, block: Computation, x: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
        """``[num_src, in]`` (or a pair, see ``Conv``) to ``[num_dst, out]``."""
        x_src, x_dst = self.rows(block, x)
        out = self.aggregate(block, fn.copy_u(x_src))
        if x_dst is not None:
            out = out + (1 + self.eps) * x_dst
        return self.nn(out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nn={self.nn})"
