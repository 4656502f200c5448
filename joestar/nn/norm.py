"""Normalisations over all rows of a layer, with PyG's arguments and state_dict keys."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from joestar.errors import ConfigError


class BatchNorm(nn.Module):
    """Batch normalisation of every feature over the rows (Ioffe and Szegedy, 2015); keys ``module.*``.

    Args:
        in_channels: features of a row.
        eps, momentum, affine, track_running_stats, device: as in ``torch.nn.BatchNorm1d``.
        allow_single_element: refused, because one row in a padded batch cannot be told apart while compiled.

    Raises:
        ConfigError: ``allow_single_element=True``.
    """

    def __init__(
        self,
        in_channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        allow_single_element: bool = False,
        device: torch.device | None = None,
    ):
        super().__init__()
        if allow_single_element:
            raise ConfigError(
                "BatchNorm: allow_single_element=True is not supported: the compiled program does not branch on the "
                "number of rows. Keep batches of two seeds or more, or use norm='layer_norm' with mode='node'."
            )
        self.module = nn.BatchNorm1d(in_channels, eps, momentum, affine, track_running_stats, device=device)
        self.in_channels = in_channels

    def reset_running_stats(self) -> None:
        """Forgets the running mean and variance."""
        self.module.reset_running_stats()

    def reset_parameters(self) -> None:
        """Resets the affine parameters and the running statistics."""
        self.module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_channels]`` to the same shape."""
        return self.module(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module.extra_repr()})"


class LayerNorm(nn.Module):
    """Layer normalisation (Ba, Kiros and Hinton, 2016); keys ``weight`` and ``bias``.

    Args:
        in_channels: features of a row.
        eps: added to the deviation (mode ``"graph"``) or to the variance (mode ``"node"``).
        affine: learn a scale and an offset per feature.
        mode: ``"graph"``: one mean and one deviation over all rows and features, PyG's default;
            ``"node"``: each row by itself.
        device: where the parameters are made.

    Raises:
        ConfigError: another mode.
    """

    def __init__(
        self,
        in_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        mode: str = "graph",
        device: torch.device | None = None,
    ):
        super().__init__()
        if mode not in ("graph", "node"):
            raise ConfigError(f"LayerNorm: mode must be 'graph' or 'node'; got {mode!r}.")
        self.in_channels = in_channels
        self.eps = eps
        self.affine = affine
        self.mode = mode
        if affine:
            self.weight = nn.Parameter(torch.empty(in_channels, device=device))
            self.bias = nn.Parameter(torch.empty(in_channels, device=device))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, offset 0."""
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_channels]`` to the same shape."""
        if self.mode == "node":
            return F.layer_norm(x, (self.in_channels,), self.weight, self.bias, self.eps)
        # Means only (no std): a mean over rows has a plain form on padded rows. The clamp keeps the gradient of the
        # root finite where all entries are equal.
        x = x - x.mean()
        deviation = x.square().mean().clamp(min=torch.finfo(x.dtype).tiny).sqrt()
        out = x / (deviation + self.eps)
        return out * self.weight + self.bias if self.affine else out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, affine={self.affine}, mode={self.mode})"
