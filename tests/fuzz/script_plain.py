"""The plain side of a random script: the loop that people write in plain PyTorch.

It knows of Joestar the sampler in Python and the numbers that key its draws, and stays on the CPU.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
from joestar.runtime.prediction import PREDICTED
from joestar.runtime.seeds import shuffled

from .script_tasks import score, valued
from .script_worlds import Parts


class PlainEpoch:
    """Seeds, and how far they have got."""

    def __init__(self, *given: int | Tensor | bool):
        self.given = self.idx, self.batch, self.shuffle, self.drop_last = given
        self.number, self.position, self.sums = -1, 0, []

    @property
    def steps(self) -> int:
        n = self.idx.numel()
        return n // min(self.batch, n) if self.drop_last else -(-n // self.batch)


class Plain(Parts):
    """The loop by hand: groups of batches, clipped, averaged."""

    def __init__(self, drawn, initial: int = 0):
        super().__init__(drawn, initial)
        self.seed, self.begun, self.calls = 7, 0, 0
        self.epochs: list[PlainEpoch] = []
        self.under_way: list[PlainEpoch] = []
        self.average, self.updates = copy.deepcopy(self.model), 0

    def given(self) -> Callable:
        """The loss in plain PyTorch."""
        return self.drawn.task.plain()

    def averages(self) -> dict[str, Tensor]:
        return dict(self.average.named_parameters()) if self.drawn.ema else {}

    def rows(self, seeds: Tensor, epoch: int, step: int, sampler=None) -> Tensor:
        sampler = sampler or self.sampler
        context = SamplingContext(step_key(self.seed, epoch, step, "cpu"))
        blocks = sampler.sample(self.graph.with_context(context), seeds.to(self.graph.indices.dtype))
        return self.model(blocks, self.graph.ndata["x"][blocks[0].srcs])

    def train(self, seeds: Tensor, epoch: int, step: int, group: int, sums: list, complete: bool) -> Tensor:
        """One batch of a group of so many, whose gradients are added to ``sums``."""
        self.taken = seeds
        loss, logs = valued(self.loss, self.rows(seeds, epoch, step), self.graph.ndata["y"][seeds], seeds)
        self.logs = {name: value.detach() for name, value in logs.items()}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss / group, parameters, allow_unused=True)
        sums[:] = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        if complete:
            self.update(parameters, sums)
            sums.clear()
        return loss.detach()

    def update(self, parameters: list, grads: list) -> None:
        self.optimizer.zero_grad()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        if self.drawn.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.drawn.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            share = 1.0 if self.updates == 0 else 1 - (self.drawn.ema or 0)
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, share)
        self.updates += 1

    def open(self, idx: Tensor, batch: int, shuffle: bool, drop_last: bool) -> None:
        self.epochs.append(self.under_way.pop(0) if self.under_way else PlainEpoch(idx, batch, shuffle, drop_last))

    def begin(self, number: int) -> PlainEpoch:
        """An epoch, which has its number from its first step on."""
        epoch = self.epochs[number]
        if epoch.number < 0:
            epoch.number, self.begun = self.begun, self.begun + 1
        return epoch

    def next(self, number: int) -> Tensor:
        epoch = self.begin(number)
        order = shuffled(epoch.idx, self.seed, epoch.number) if epoch.shuffle else epoch.idx
        at, k = epoch.position, self.drawn.accumulate
        group = min(k, epoch.steps - at // k * k)
        complete = (at + 1) % k == 0 or at + 1 == epoch.steps
        loss = self.train(order.split(epoch.batch)[at], epoch.number, at, group, epoch.sums, complete)
        epoch.position += 1
        return loss

    def left(self) -> list[int]:
        return [epoch.steps - epoch.position for epoch in self.epochs]

    def leave(self, number: int) -> None:
        del self.epochs[number]

    def call(self, seeds: Tensor) -> Tensor:
        self.calls += 1
        return self.train(seeds, -1 - self.calls, 0, 1, [], True)

    @torch.no_grad()
    def predict(self, idx: Tensor, batch: int | None, full: bool) -> Tensor:
        size, modes = PREDICTED if batch is None else batch, [module.training for module in self.model.modules()]
        self.model.eval()
        if full:  # every node: degrees in blocks are those of the graph
            rows = [self.rows(torch.arange(self.graph.num_nodes), -1, 0, self.sampled([-1, -1]))[idx]]
        else:
            rows = [self.rows(seeds, -1, step) for step, seeds in enumerate(idx.split(size))]
        for module, mode in zip(self.model.modules(), modes, strict=True):
            module.training = mode
        return torch.cat(rows)

    @torch.no_grad()
    def evaluate(self, idx: Tensor, batch: int | None, ema: bool) -> Tensor:
        kept = [p.clone() for p in self.model.parameters()]
        if ema:
            for parameter, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                parameter.copy_(mean)
        rows, y = self.predict(idx, batch, False), self.graph.ndata["y"][idx]
        for parameter, now in zip(self.model.parameters(), kept, strict=True):
            parameter.copy_(now)
        return torch.stack([score(name, self.loss, rows, y, idx).double() for name in self.drawn.task.scored])

    def restart(self, seed: int) -> None:
        self.seed, self.begun, self.calls, self.updates = seed, 0, 0, 0
        self.optimizer.state.clear()
        self.average.load_state_dict(self.model.state_dict())
        self.epochs, self.under_way = [epoch for epoch in self.epochs if epoch.number < 0], []

    def save(self) -> None:
        found = {name: vars(self)[name] for name in ("seed", "begun", "calls", "updates")}
        found["under_way"] = [e for e in self.epochs if e.number >= 0 and e.position < e.steps] + self.under_way
        kept = ("model", "optimizer", "average", "loss")
        found["states"] = {k: getattr(self, k).state_dict() for k in kept if hasattr(getattr(self, k), "state_dict")}
        self.saved = copy.deepcopy(found)

    def load(self) -> None:
        found = copy.deepcopy(self.saved)
        for name, state in found.pop("states").items():
            getattr(self, name).load_state_dict(state)
        vars(self).update(found)
        self.epochs = [epoch for epoch in self.epochs if epoch.number < 0]

    def elsewhere(self) -> None:
        self.epochs = []
        self.load()

    def told(self) -> bool:
        """Whether it is known what the trace read: quicker ones do not tell (``tests/captures.py``)."""
        return self.step._executor("train").program.captured.reads.told

    def refused(self, kind: str) -> None:
        """Nothing to be told of."""
