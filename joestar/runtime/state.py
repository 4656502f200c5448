"""What training steps read and change on the device: key, seeds, overflow flag, losses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar import ops  # noqa: F401  (registers torch.ops.joestar)

LOSSES = 1 << 20
"""Losses that fit into one array; then another one is taken, so that no loss handed out is ever written again."""


@dataclass(eq=False)
class Run:
    """Steps over some seeds, in order, and how far they have got.

    Attributes:
        order: ids ``[n]``; batch: seeds per step (the last may have fewer); epoch: second word of the key.
        array: where the losses of its steps are, from ``offset`` on; position: steps that have happened.
    """

    order: Tensor
    batch: int
    epoch: int
    array: Tensor
    offset: int
    position: int = 0

    @property
    def steps(self) -> int:
        """Steps in all."""
        return -(-self.order.numel() // self.batch)

    def seeds(self, position: int) -> Tensor:
        """The seeds of a step."""
        return self.order[position * self.batch : (position + 1) * self.batch]

    def loss(self, position: int) -> Tensor:
        """The loss of a step, a 0-d tensor of its own."""
        return self.array[self.offset + position]


class StepState:
    """Tensors with fixed addresses, as a captured CUDA graph needs them; they hold one run at a time.

    Attributes:
        key: int64 ``[3]`` = (seed, epoch, step); flag: 0-d bool, the sticky overflow flag.
        run: int64 ``[3]`` = (number of seeds, seeds per step, where the losses begin); order: the seeds come first.
        losses: float32, or float64 for losses of that dtype; NaN until their step has happened.
        version: changes with every tensor that is replaced: a captured graph is then out of date.
    """

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.seed = seed
        words = torch.zeros(6, dtype=torch.int64, device=device)
        self._words, self.key, self.run = words, words[:3], words[3:]
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.order = torch.zeros(0, dtype=torch.int64, device=device)
        self.losses = torch.zeros(0, dtype=torch.float32, device=device)
        self.version = 0
        self._used = 0
        self._held: Run | None = None
        pinned = device.type == "cuda"
        self._staged = torch.zeros(6, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def begin(self, order: Tensor, batch: int, epoch: int, dtype: torch.dtype) -> Run:
        """A run over these seeds, with room for its losses of this dtype."""
        steps = -(-order.numel() // batch)
        if self._used + steps > self.losses.numel() or self.losses.dtype != dtype:
            self.losses = torch.full((max(LOSSES, steps),), torch.nan, dtype=dtype, device=self.device)
            self.version += 1
            self._used = 0
        self._used += steps
        return Run(order, batch, epoch, self.losses, self._used - steps)

    def hold(self, run: Run) -> None:
        """Makes this run the one that steps work on; nothing to do if it is."""
        if self._held is run:
            return
        number = run.order.numel()
        if number > self.order.numel() or run.order.dtype != self.order.dtype:
            self.order = run.order.new_empty(max(number, 2 * self.order.numel()))
            self.version += 1
        self.order[:number] = run.order
        if run.array is not self.losses:  # begun before the losses' array was full
            self.losses = run.array
            self.version += 1
        self._staged.copy_(_words(self.seed, run))
        self._words.copy_(self._staged, non_blocking=True)
        self._held = run

    def let_go(self) -> None:
        """The next step sets everything anew."""
        self._held = None


def _words(seed: int, run: Run) -> Tensor:
    number = run.order.numel()
    return torch.tensor(
        [seed, run.epoch, run.position, number, run.batch, run.offset], dtype=torch.int64, device="cpu"
    )  # fmt: skip
