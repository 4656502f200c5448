"""Several processes at one step: what a runner does so that all of them train the same model."""

import contextlib
import time

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.division import arranged, present, share, weights
from joestar.distributed.facts import checksum, graph_facts, model_facts, plain, sampler_facts, values_of
from joestar.distributed.reduction import Reduction
from joestar.graph_api import Graph
from joestar.runtime.executor import Executor
from joestar.runtime.loss_parts import MEAN, SUM, LossParts, loss_parts
from joestar.runtime.state import Run, StepState


class Ranks:
    """One runner's part in a group: its share of every global batch, and the sum over the ranks.

    Args:
        group: the ranks; executor: of the ``train`` program, whose bounds are agreed on from now on.
        graph: whose nodes the seeds of all ranks are: that of the program, or the whole one of which it sees parts.

    Attributes:
        world: number of ranks.
    """

    def __init__(self, group: Group, executor: Executor, graph: Graph):
        self.group, self.executor, self.graph = group, executor, graph
        self.rank, self.world = group.rank, group.world
        self.reduction = Reduction(group)
        self._parts: tuple = (None, None)
        self._written: tuple = (None, [])
        self._since: float | None = None
        executor.agree = group.largest

    # --- before steps ---

    def check_call(self, what: str, facts: dict[str, str]) -> None:
        """Raises ``DistributedError`` on all ranks unless they make the same call."""
        self.group.agree(what, facts)

    def facts(self, seeds: Tensor, **given) -> dict[str, str]:
        """What must be the same before steps over these seeds."""
        named = {name: plain(value) for name, value in given.items()}
        return {"seeds": f"{seeds.numel()} ids #{checksum(seeds)}", **named}

    def state_facts(self, optimizer) -> dict[str, str]:
        """Parameters, buffers and optimizer as training has made them."""
        return values_of(self.executor.program.model, optimizer)

    def prepare(self, order: Tensor, batch: int, seed: int, epoch: int, population: Tensor | None) -> None:
        """Bounds that are the same on all ranks, from shares of all of them; compiled on all before the first step."""
        some = arranged(order, batch, self.world) if population is None else population
        with self.long("compiling the step"):
            self.executor.prepare(some, batch, seed, epoch)
            self.group.exchange("the first step of an epoch or a call")
        self.group.board.settle()

    def divided(self, order: Tensor, batch: int) -> tuple[Tensor, int, Tensor]:
        """This rank's part of an order: (ids ``[steps * batch]``, how many are meant, ``Run.shares``)."""
        return *self.own(order, batch), self.shares(order, batch)

    def own(self, order: Tensor, batch: int) -> tuple[Tensor, int]:
        """This rank's seeds of an order: (ids ``[steps * batch]``, how many are meant)."""
        return share(order, batch, self.rank, self.world)

    def shares(self, order: Tensor, batch: int) -> Tensor:
        """``Run.shares``, on the device of ``order``; the program must have been traced."""
        parts = self._loss_parts(order)
        ones = torch.ones(order.numel(), dtype=torch.float64, device=order.device)
        means = weights(ones, batch, self.rank, self.world)
        sums = present(order.numel(), batch, self.rank, self.world, order.device)
        own = sums if parts.kind == SUM else means
        if parts.rows is not None:
            own = weights(parts.rows(order), batch, self.rank, self.world, parts.void)
        logged = [means if kind == MEAN else sums for kind in parts.logged]
        return torch.stack([own, means, *logged], 1)

    def _loss_parts(self, seeds: Tensor) -> LossParts:
        captured = self.executor.program.captured
        if self._parts[0] is not captured:
            found = loss_parts(self.executor.program, seeds, self.graph)
            facts = {"kind": found.kind, "value on the same outputs": f"{found.tried:.6g}"}
            self.group.agree(f"{self.executor.program.loss.name}, tried before the first step", facts)
            self._parts = captured, found
        return self._parts[1]

    # --- within a step ---

    def before(self) -> None:
        """Before a forward pass that may be taken back."""
        program = self.executor.program
        if self._written[0] is not program.captured:
            self._written = program.captured, program.written
        self.reduction.before(self._written[1])

    def reduce(self, parameters: list[Tensor], loss: Tensor, logged: list[Tensor], ok: Tensor, state: StepState):
        """Sums over the ranks: see ``Reduction``."""
        with_grad = [p for p in parameters if p.grad is not None]
        return self.reduction(with_grad, loss, logged, ok, state.share())

    def step(self, run: Run, long: bool) -> contextlib.AbstractContextManager:
        """Where this rank is during a step."""
        self.group.check()
        self._since = None if long else time.monotonic()
        return self.group.board.at(f"step {run.position} of epoch {run.epoch}", long)

    def waiting(self) -> None:
        """Called while the host waits for the device: raises if that is in vain."""
        group = self.group
        group.check()
        if self._since is not None and time.monotonic() - self._since > group.timeout:
            raise group.board.cause(TimeoutError("a step that takes longer"))

    def meet(self, what: str) -> None:
        """Waits until all ranks are here."""
        self.group.exchange(what)
        self.group.board.long = False

    def long(self, what: str) -> contextlib.AbstractContextManager:
        """What takes long within, which others wait for."""
        return self.group.board.at(what, long=True)


def compare(group: Group, model, sampler, options: dict) -> None:
    """Before memory is planned: all ranks have the same.

    Raises:
        DistributedError: on all ranks, with what differs.
    """
    facts = graph_facts(sampler.graph) | model_facts(model) | sampler_facts(sampler)
    group.agree("joestar.compile, before it plans", facts | {name: plain(value) for name, value in options.items()})


def join(group: Group, model, sampler, optimizer, options: dict) -> None:
    """Before anything is compiled: all ranks have the same, and start from the parameters and buffers of rank 0.

    Args:
        sampler: as the user gave it, over the whole graph.

    Raises:
        DistributedError: on all ranks, with what differs.
    """
    facts = graph_facts(sampler.graph) | model_facts(model) | sampler_facts(sampler)
    facts["optimizer"] = type(optimizer).__name__
    if optimizer is not None:
        facts["optimizer's parameters"] = str([[list(p.shape) for p in g["params"]] for g in optimizer.param_groups])
    facts |= {name: plain(value) for name, value in options.items()}
    group.agree("joestar.compile", facts)
    group.from_first([*model.parameters(), *model.buffers()])
