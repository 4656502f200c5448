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
        array: where the losses of its steps are, from ``offset`` on; values: ``[L, ...]``, what is logged with them.
        position: steps that have happened.
        pending: gradients of a group of batches that another run came between (``runtime.update``).
        pending_scale: what their losses were multiplied by (0-d), where that changes.
        filled: which part of ``order`` is known, where it is filled in as the run goes on.
        end: position in ``order`` of the first seed that is not to be taken, where that is not its end.
        shares: what this rank's loss, seeds and logged values count for in every step, float64 ``[steps, 2 + L]``; for
            several ranks.
        owned: steps, from the first, in which this rank has seeds of its own, where that is not all of them: a rank
            without gets one with weight zero, so that it makes the step.
        trained: identities of the parameters that are trained in the group of batches under way (``runtime.update``).
    """

    order: Tensor
    batch: int
    epoch: int
    array: Tensor
    offset: int
    values: Tensor
    position: int = 0
    pending: list[Tensor] | None = None
    pending_scale: Tensor | None = None
    filled: slice | None = None
    end: int | None = None
    shares: Tensor | None = None
    owned: int | None = None
    trained: list[int] | None = None

    @property
    def known(self) -> Tensor:
        """The part of ``order`` that is filled in."""
        return self.order if self.filled is None else self.order[self.filled]

    @property
    def steps(self) -> int:
        """Steps in all."""
        return -(-self.order.numel() // self.batch)

    def seeds(self, position: int) -> Tensor:
        """The seeds of a step."""
        last = (position + 1) * self.batch
        return self.order[position * self.batch : last if self.end is None else min(last, self.end)]

    def own_seeds(self, position: int) -> Tensor:
        """The seeds of a step that count for this rank: none, where it has none."""
        return self.seeds(position) if self.owned is None or position < self.owned else self.order[:0]

    def loss(self, position: int) -> Tensor:
        """The loss of a step, a 0-d tensor of its own."""
        return self.array[self.offset + position]

    def logged(self, position: int) -> Tensor:
        """The values logged with it ``[L]``."""
        return self.values[:, self.offset + position]


class StepState:
    """Tensors with fixed addresses, as a captured CUDA graph needs them; they hold one run at a time.

    Attributes:
        key: int64 ``[3]`` = (seed, epoch, step); flag: 0-d bool, the sticky overflow flag.
        run: int64 ``[3]`` = (number of seeds, seeds per step, where the losses begin); order: the seeds come first;
            steps: 0-d int64, of the whole run.
        losses: float32, or float64 for losses of that dtype; NaN until their step has happened. logged: ``[L, ...]``,
            of what losses return beside.
        shares: of the run, if there are several ranks.
        version: changes with every tensor that is replaced: a captured graph is then out of date.
        holds: how often another run has been made the one that steps work on.
    """

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.seed = seed
        words = torch.zeros(7, dtype=torch.int64, device=device)
        self._words, self.key, self.run, self.steps = words, words[:3], words[3:6], words[6]
        self.flag = torch.zeros((), dtype=torch.bool, device=device)
        self.order = torch.zeros(0, dtype=torch.int64, device=device)
        self.losses = torch.zeros(0, dtype=torch.float32, device=device)
        self.logged = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self.shares: Tensor | None = None
        self.version = self.holds = 0
        self._latest, self._used = (self.losses, self.logged), 0
        self._held: Run | None = None
        pinned = device.type == "cuda"
        self._staged = torch.zeros(7, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def begin(self, order: Tensor, batch: int, epoch: int, dtype: torch.dtype, logged: int = 0) -> Run:
        """A run over these seeds, with room for its losses of this dtype, and so many values logged with each."""
        steps = -(-order.numel() // batch)
        losses, values = self._latest  # others may be held: those of a run that was begun before
        room, known = losses.numel(), (losses.dtype, len(values))
        if self._used + steps > room or known != (dtype, logged):
            self.losses = torch.full((max(LOSSES, steps),), torch.nan, dtype=dtype, device=self.device)
            self.logged = torch.full((logged, len(self.losses)), torch.nan, dtype=dtype, device=self.device)
            self._latest = self.losses, self.logged
            self.version += 1
            self._used = 0
        self._used += steps
        return Run(order, batch, epoch, self._latest[0], self._used - steps, self._latest[1])

    def hold(self, run: Run) -> None:
        """Makes this run the one that steps work on; nothing to do if it is."""
        if self._held is run:
            return
        self.holds += 1
        number = run.order.numel()
        if number > self.order.numel() or run.order.dtype != self.order.dtype:
            self.order = run.order.new_empty(max(number, 2 * self.order.numel()))
            self.version += 1
        self.order[:number] = run.order
        if run.shares is not None:
            self._hold_shares(run.shares)
        if run.array is not self.losses:  # begun before the losses' array was full
            self.losses, self.logged = run.array, run.values
            self.version += 1
        self._staged.copy_(_words(self.seed, run))
        self._words.copy_(self._staged, non_blocking=True)
        self._held = run

    def _hold_shares(self, shares: Tensor) -> None:
        if self.shares is None or len(shares) > len(self.shares) or shares.shape[1] != self.shares.shape[1]:
            room = max(len(shares), 0 if self.shares is None else 2 * len(self.shares))
            self.shares = shares.new_ones(room, shares.shape[1])
            self.version += 1
        self.shares[: len(shares)] = shares

    def share(self) -> Tensor:
        """What this rank counts for in the step that comes next, float64 ``[2 + L]``."""
        return self.shares.index_select(0, self.key[2:3]).view(-1)

    def note(self, values: list[Tensor], ok: Tensor) -> None:
        """Writes what is logged with the step's loss where ``ok``; before the step is counted."""
        if not values:
            return
        at = (self.run[2] + self.key[2]).view(1)
        new = torch.stack([value.to(self.logged.dtype) for value in values]).view(-1, 1)
        self.logged.index_copy_(1, at, torch.where(ok, new, self.logged.index_select(1, at)))

    def let_go(self) -> None:
        """The next step sets everything anew."""
        self._held = None


def _words(seed: int, run: Run) -> Tensor:
    number = run.order.numel() if run.end is None else run.end
    return torch.tensor(
        [seed, run.epoch, run.position, number, run.batch, run.offset, run.steps], dtype=torch.int64, device="cpu"
    )  # fmt: skip
