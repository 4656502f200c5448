"""From a loss to new parameters: loss scale, backward, groups of batches, clipping, optimizer, average of weights.

All of it happens on the device and depends on ``ok``, so that it can be part of a captured step: a batch that exceeds
the bounds changes neither sums of gradients nor the scale nor the average.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import ChangedAfterCompileError, CheckpointError
from joestar.runtime.interrupts import Whole
from joestar.runtime.optimizer import SkippableOptimizer
from joestar.runtime.state import Run, StepState
from joestar.torch_private import amp_unscale, amp_update_scale


@dataclass
class LossScale:
    """Loss scaling for float16, as ``torch.amp.GradScaler`` does it, on the device.

    The loss is multiplied by ``scale`` before the backward pass, gradients are divided by it. If one of them is not
    finite, the optimizer's step is left out and the scale shrinks; after ``interval`` steps without, it grows.

    Attributes:
        initial: the first scale; growth, backoff: factors; interval: steps.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def place(self, device: torch.device) -> None:
        """Allocates scale and counter."""
        self.scale = torch.full((), self.initial, dtype=torch.float32, device=device)
        self.steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[Tensor]) -> Tensor:
        """Divides gradients by the scale, in place; 0-d float32, 1 if any is not finite."""
        found = torch.zeros((), dtype=torch.float32, device=self.scale.device)
        inverse = self.scale.double().reciprocal().float()
        for dtype in {grad.dtype for grad in grads}:
            same = [grad for grad in grads if grad.dtype == dtype]
            amp_unscale(same, found, inverse)
        return found

    def follow(self, found: Tensor, happened: Tensor) -> None:
        """Shrinks or grows the scale behind an optimizer's step that ``happened``."""
        scale, steps = self.scale.clone(), self.steps.clone()
        amp_update_scale(scale, steps, found, self.growth, self.backoff, self.interval)
        self.scale.copy_(torch.where(happened, scale, self.scale))
        self.steps.copy_(torch.where(happened, steps, self.steps))


class Average:
    """An exponential moving average of parameters, as ``torch.optim.swa_utils.AveragedModel`` with its EMA function.

    The first update copies the parameters; later ones move the average by ``1 - decay`` of the way to them.

    Attributes:
        weights: name -> average, of every parameter; updates: 0-d int64.
        exchanged: parameters hold averages, and averages parameters.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.parameters, self.exchanged = dict(model.named_parameters()), False
        self.weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        device = next(iter(self.weights.values())).device
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self._shares = torch.tensor([1.0, 1.0 - decay], dtype=torch.float64, device="cpu").to(device)

    @torch.no_grad()
    def follow(self, happened: Tensor) -> None:
        """Behind an optimizer's step, if it ``happened``."""
        share = torch.where(self.updates == 0, self._shares[0], self._shares[1]) * happened
        for name, parameter in self.parameters.items():
            if parameter.is_floating_point() or parameter.is_complex():
                self.weights[name].lerp_(parameter.detach(), share.to(parameter.dtype))
            else:  # no optimizer moves it
                self.weights[name].copy_(parameter)
        self.updates += happened

    def exchange(self, wanted: bool) -> None:
        """Has parameters be averages and averages parameters, in place, if ``wanted``, or each its own again.

        Nothing happens where it is so already; an interrupt waits for its end.
        """
        with Whole():
            if self.exchanged != wanted:
                self._swap()
                self.exchanged = wanted

    @torch.no_grad()
    def _swap(self) -> None:
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}  # all of them first
        for name, parameter in self.parameters.items():
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(kept[name])


class Update:
    """What a step does behind its forward pass.

    Args:
        optimizer: made skippable; accumulate: batches per step of the optimizer, whose gradients are averaged (the
            last group of an epoch may have fewer).
        scale: loss scaling, or ``None``; average: of weights, or ``None``.
    """

    def __init__(
        self, optimizer: SkippableOptimizer, accumulate: int = 1, scale: LossScale | None = None,
        average: Average | None = None,
    ):  # fmt: skip
        self.optimizer, self.accumulate, self.scale, self.average = optimizer, accumulate, scale, average
        self.sums: list[Tensor] = []
        self._owner: Run | None = None
        self._one: Tensor | None = None
        if scale is not None:
            scale.place(optimizer.parameters()[0].device)

    def backward(self, loss: Tensor, part: Tensor | None = None) -> None:
        """Gradients of the loss, times the scale if there is one, times this rank's part (0-d) if there are several."""
        if part is not None:
            loss.backward((part if self.scale is None else part * self.scale.scale).to(loss.dtype))
            return
        if self.scale is not None:
            loss.backward(self.scale.scale.to(loss.dtype))
            return
        if self._one is None or self._one.dtype != loss.dtype:
            self._one = torch.ones_like(loss, requires_grad=False)
        loss.backward(self._one)  # autograd would make a one in every step

    def apply(self, ok: Tensor, state: StepState) -> None:
        """Takes the gradients of the step that ``state`` holds; nothing lasts if ``ok`` (0-d bool) is false."""
        happened = ok if self.accumulate == 1 else ok & self._summed(ok, state)
        fine = happened
        if self.scale is not None:
            found = self.scale.unscale([p.grad for p in self.optimizer.parameters() if p.grad is not None])
            fine = happened & (found == 0)
            self.optimizer.step(fine)
            self.scale.follow(found, happened)
        else:
            self.optimizer.step(fine)
        if self.average is not None:
            self.average.follow(fine)

    # --- groups of batches ---

    def completes(self, run: Run, position: int) -> bool:
        """Whether the optimizer makes its step behind this one of the run."""
        return (position + 1) % self.accumulate == 0 or position + 1 == run.steps

    def _summed(self, ok: Tensor, state: StepState) -> Tensor:
        """Adds gradients to those of the group and replaces them by its mean; whether the group is complete.

        The last of a group is not written to the sums: if the optimizer's step fails, it is not there twice.
        """
        position, steps = state.key[2], state.steps
        inside = position % self.accumulate
        due = (inside == self.accumulate - 1) | (position == steps - 1)
        size = torch.clamp(steps - (position - inside), max=self.accumulate)
        parameters = [p for p in self.optimizer.parameters() if p.grad is not None]
        if [total.shape for total in self.sums] != [p.shape for p in parameters]:
            self.sums = [torch.zeros_like(p.grad) for p in parameters]
        for parameter, total in zip(parameters, self.sums, strict=True):
            new = torch.where(inside == 0, parameter.grad, total + parameter.grad)
            total.copy_(torch.where(ok & ~due, new, total))
            parameter.grad = new / size
        return due

    def switch(self, run: Run) -> None:
        """Sums are those of this run from now on; those of the one before are kept with it.

        Raises:
            ChangedAfterCompileError: if other parameters are trained than when the run's group of batches began.
        """
        if self.accumulate == 1:
            return
        trained = self.optimizer.trained()
        if run.trained is None or run.position % self.accumulate == 0:
            run.trained = trained
        elif run.trained != trained:
            raise ChangedAfterCompileError(
                f"parameters were frozen, thawed or added within a group of accumulate={self.accumulate} batches, "
                "whose gradients are summed. Change them behind a step of the optimizer: when epoch.updated is true."
            )
        if self._owner is run:
            return
        if self._owner is not None:
            self._owner.pending = self.pending(self._owner)
            self._owner.pending_scale = None if self.scale is None else self.scale.scale.clone()
        if run.pending is not None:
            self._check_sums(run.pending)
            run.pending = self._in_scale(run)
            if [total.shape for total in self.sums] != [total.shape for total in run.pending]:
                self.sums = [torch.empty_like(total, device=run.order.device) for total in run.pending]
            for total, kept in zip(self.sums, run.pending, strict=True):
                total.copy_(kept)  # in place: a captured step holds on to it
        run.pending, self._owner = None, run

    def _check_sums(self, sums: list[Tensor]) -> None:
        """Raises ``ChangedAfterCompileError`` unless these may be of the parameters that are trained: each in order."""
        trained = iter([p.shape for p in self.optimizer.parameters() if p.requires_grad])
        if not all(any(shape == total.shape for shape in trained) for total in sums):
            raise ChangedAfterCompileError(
                "other parameters are trained than when the group of batches began that is gone on with (accumulate=), "
                "whose gradients are summed: freeze and thaw as then, and change them when epoch.updated is true."
            )

    def _in_scale(self, run: Run) -> list[Tensor]:
        """What a run has summed up so far, under the scale of now: other runs have changed it since."""
        if self.scale is None or run.pending_scale is None:
            return run.pending
        factor = self.scale.scale / run.pending_scale
        return [total * factor.to(total.dtype) for total in run.pending]

    def pending(self, run: Run) -> list[Tensor] | None:
        """Sums of a group of this run that is not complete; ``None`` between groups."""
        if self.accumulate == 1 or run.position % self.accumulate == 0 or run.position >= run.steps:
            return None
        if self._owner is run:
            return [total.clone() for total in self.sums]
        return None if run.pending is None else self._in_scale(run)

    # --- state ---

    def reset(self) -> None:
        """As new: the optimizer's state, the scale, the average."""
        self.optimizer.reset()
        if self.scale is not None:
            self.scale.scale.fill_(self.scale.initial)
            self.scale.steps.zero_()
        if self.average is not None:
            self.average.updates.zero_()
            for name, parameter in self.average.parameters.items():
                self.average.weights[name].copy_(parameter.detach())

    def state_dict(self) -> dict:
        """Scale and average, as far as there are any; the optimizer has its own."""
        state = {}
        if self.scale is not None:
            state["scale"] = {"scale": self.scale.scale, "steps": self.scale.steps}
        if self.average is not None:
            state["average"] = {"updates": self.average.updates, "weights": dict(self.average.weights)}
        return state

    def check_state(self, state: dict) -> None:
        """Raises ``CheckpointError`` unless the state is that of a step compiled in the same way."""
        own, saved = self.state_dict().keys(), state.keys()
        words = {"scale": "loss_scale", "average": "ema"}
        for name in sorted(own ^ saved):
            has, lacks = ("", "out") if name in saved else ("out", "")
            raise CheckpointError(
                f"the checkpoint was saved with{has} {words.get(name, name)}, this step was compiled with{lacks}: "
                "compile it as it was then."
            )
        if "average" in saved and state["average"]["weights"].keys() != self.average.weights.keys():
            raise CheckpointError("the checkpoint has averages (ema) of other parameters than this model has.")

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Goes on with scale and average of ``state_dict``, in place."""
        if self.scale is not None:
            self.scale.scale.copy_(state["scale"]["scale"])
            self.scale.steps.copy_(state["scale"]["steps"])
        if self.average is not None:
            self.average.updates.copy_(state["average"]["updates"])
            for name, weight in self.average.weights.items():
                weight.copy_(state["average"]["weights"][name])
