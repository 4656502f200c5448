"""Jumping knowledge: combining the results of all layers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from joestar.errors import ConfigError

MODES = ("cat", "max", "lstm")


class JumpingKnowledge(nn.Module):
    """Combines ``L`` layer results ``[N, C]`` (Xu et al., 2018). Keys: ``lstm.*`` and ``att.*`` in mode ``"lstm"``.

    Args:
        mode: ``"cat"``: ``[N, L * C]``; ``"max"``: element-wise, ``[N, C]``; ``"lstm"``: mean weighted by the
            attention of a bidirectional LSTM over the layers, ``[N, C]``.
        channels, num_layers: ``C`` and ``L``; only ``"lstm"`` needs them.

    Raises:
        ConfigError: another mode, or sizes missing.
    """

    def __init__(self, mode: str, channels: int | None = None, num_layers: int | None = None):
        super().__init__()
        if mode not in MODES:
            raise ConfigError(f"JumpingKnowledge: mode must be one of {', '.join(MODES)}; got {mode!r}.")
        if mode == "lstm" and (channels is None or num_layers is None):
            raise ConfigError("JumpingKnowledge: mode 'lstm' needs channels and num_layers.")
        self.mode = mode
        if mode == "lstm":
            hidden = num_layers * channels // 2
            self.lstm = BidirectionalLSTM(channels, hidden)
            self.att = nn.Linear(2 * hidden, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        if self.mode == "lstm":
            self.lstm.reset_parameters()
            self.att.reset_parameters()

    def forward(self, xs: list[Tensor]) -> Tensor:
        """One ``[N, C]`` per layer to ``[N, C]``, or ``[N, L * C]`` for ``"cat"``."""
        if self.mode == "cat":
            return torch.cat(xs, dim=-1)
        if self.mode == "max":
            return torch.stack(xs, dim=-1).max(dim=-1)[0]
        scores = torch.cat([self.att(h) for h in self.lstm(xs)], dim=-1)  # [N, L]
        weights = torch.softmax(scores, dim=-1)
        return (torch.stack(xs, dim=1) * weights.unsqueeze(-1)).sum(dim=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mode})"


class BidirectionalLSTM(nn.Module):
    """``torch.nn.LSTM(C, H, bidirectional=True)`` written out, with its keys: TorchDynamo does not trace that one.

    The sequence is short (a model's layers), so the steps are unrolled.
    """

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        for suffix in ("", "_reverse"):
            self.register_parameter("weight_ih_l0" + suffix, nn.Parameter(torch.empty(4 * hidden, channels)))
            self.register_parameter("weight_hh_l0" + suffix, nn.Parameter(torch.empty(4 * hidden, hidden)))
            self.register_parameter("bias_ih_l0" + suffix, nn.Parameter(torch.empty(4 * hidden)))
            self.register_parameter("bias_hh_l0" + suffix, nn.Parameter(torch.empty(4 * hidden)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew, uniform in ±1/sqrt(H)."""
        bound = 1.0 / math.sqrt(self.hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """A sequence of ``[N, C]`` to one of ``[N, 2 H]``."""
        ahead = self._run(xs, "")
        back = self._run(xs[::-1], "_reverse")[::-1]
        return [torch.cat(pair, dim=-1) for pair in zip(ahead, back, strict=True)]

    def _run(self, xs: list[Tensor], suffix: str) -> list[Tensor]:
        weight_ih, bias_ih = getattr(self, "weight_ih_l0" + suffix), getattr(self, "bias_ih_l0" + suffix)
        weight_hh, bias_hh = getattr(self, "weight_hh_l0" + suffix), getattr(self, "bias_hh_l0" + suffix)
        state = xs[0].new_zeros(xs[0].shape[0], self.hidden)
        cell = state
        outs = []
        for x in xs:
            gates = F.linear(x, weight_ih, bias_ih) + F.linear(state, weight_hh, bias_hh)
            enter, forget, new, leave = gates.chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            outs.append(state)
        return outs
