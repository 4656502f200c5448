"""What training steps read and change on the device: key, seeds, overflow flag, losses (ARCHITECTURE decision 4)."""

import torch
from torch import Tensor

from joestar import ops  # noqa: F401  (registers torch.ops.joestar)
from joestar.profile.sizes import step_key

LOSSES = 1 << 20
"""Losses that fit into one array; then another one is taken, so that no loss handed out is ever written again."""


class StepState:
    """Tensors with fixed addresses, as a captured CUDA graph needs them.

    Attributes:
        key: int64 ``[3]`` = (seed, epoch, step); flag: 0-d bool, the sticky overflow flag.
        order, num_seeds: ids of the epoch's seeds (the first ``num_seeds``, 0-d int64, are valid).
        losses: float32; this epoch's start at ``offset`` (0-d int64). history: int64 ``[steps, n]``, true counts.
        progress: int64 ``[2]`` = (flag, step), for the host to read.
        version: changes with every tensor that is replaced: a captured graph is then out of date.
    """

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.key = step_key(seed, 0, 0, device)
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.num_seeds = torch.zeros((), dtype=torch.int64, device=device)
        self.offset = torch.zeros((), dtype=torch.int64, device=device)
        self.progress = torch.zeros(2, dtype=torch.int64, device=device)
        self.order = torch.zeros(0, dtype=torch.int64, device=device)
        self.losses = torch.full((LOSSES,), torch.nan, device=device, dtype=torch.float32)
        self.history = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self.version = 0
        self._used = 0

    def begin(self, order: Tensor, steps: int, sets: int) -> Tensor:
        """Sets up an epoch over these seeds; returns the view into ``losses`` that its steps fill (NaN until then)."""
        if order.numel() > self.order.numel() or order.dtype != self.order.dtype:
            self.order = torch.empty_like(order)
            self.version += 1
        self.order[: order.numel()] = order
        self.num_seeds.fill_(order.numel())
        self.expect(steps, sets)
        if self._used + steps > self.losses.numel():
            self.losses = torch.full((max(LOSSES, steps),), torch.nan, device=self.device, dtype=torch.float32)
            self.version += 1
            self._used = 0
        self.offset.fill_(self._used)
        losses = self.losses[self._used : self._used + steps]
        self._used += steps
        return losses

    def expect(self, steps: int, sets: int) -> None:
        """Makes room for the counts of ``sets`` sets over ``steps`` steps."""
        if steps > self.history.shape[0] or sets != self.history.shape[1]:
            self.history = torch.full((steps, sets), -1, dtype=torch.int64, device=self.device)
            self.version += 1
        self.history.fill_(-1)
