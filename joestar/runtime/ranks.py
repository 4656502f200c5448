"""Several processes at one step: what a runner does so that all of them train the same model."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from joestar.distributed import Group, current
from joestar.distributed.board import differences
from joestar.distributed.division import arranged, present, share, weights
from joestar.distributed.facts import (
    checksums,
    flags_of,
    graph_facts,
    model_facts,
    optimizer_facts,
    plain,
    said_of,
    values_of,
)
from joestar.distributed.place import early_word
from joestar.distributed.reduction import Reduction
from joestar.distributed.words import HostWords
from joestar.errors import ConfigError, DistributedError
from joestar.graph_api import Graph
from joestar.lowering.loss import Loss
from joestar.ops.step import ranks as within
from joestar.runtime.executor import Executor
from joestar.runtime.loss_parts import MEAN, LossParts, check_again, is_tried_again, loss_parts, some_again
from joestar.runtime.settings import Settings
from joestar.runtime.state import Run, StepState
from joestar.torch_private import tree_map

COMPARED = 100
"""Calls of ``step(seeds)`` between two at which several ranks compare their parameters."""


class Ranks:
    """One runner's part in a group: its share of every global batch, and the sum over the ranks.

    Args:
        group: the ranks; executor: of the ``train`` program, whose bounds are agreed on from now on.
        graph: whose nodes the seeds of all ranks are: that of the program, or the whole one of which it sees parts.
    """

    def __init__(self, group: Group, executor: Executor, graph: Graph):
        self.group, self.executor, self.graph = group, executor, graph
        self.reduction = Reduction(group)
        self._parts: tuple = (None, None)
        self._even: tuple = (None, None)
        self._written: tuple = (None, [])
        self._since: float | None = None
        self._began = self._ended = False
        self._all_ready = False
        self._words: HostWords | None = None
        self._words_made = False
        self._synced = bool(_synced(executor.program.model))
        executor.agree = group.largest

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.group.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.group.world

    # --- before steps ---

    def agree_on_epoch(self, epoch, seed: int, optimizer, ready: bool) -> None:
        """Raises ``DistributedError`` on all ranks unless this epoch, and the state before it, are the same.

        Args:
            ready: this rank goes on to its first step at once: nothing is left to compile, load or measure.
        """
        given = {
            "batch_size": epoch.batch_size, "shuffle": epoch.shuffle, "drop_last": epoch.drop_last,
            "epoch": epoch.number, "position": epoch.position, "seed": seed,
        }  # fmt: skip
        program = self.executor.program
        facts = values_of(program.model, optimizer, epoch.seeds, program.loss.module)
        self._agree("step.epoch", facts | {name: plain(value) for name, value in given.items()}, ready)

    def agree_on_call(self, seeds: Tensor, number: int, seed: int, optimizer, ready: bool) -> None:
        """The same before ``step(seeds)``; values of parameters are compared every ``COMPARED`` calls."""
        model, loss = self.executor.program.model, self.executor.program.loss.module
        often = {"seeds": said_of(seeds)} | flags_of(model)
        facts = values_of(model, optimizer, seeds, loss) if number % COMPARED == 1 else often
        self._agree("step(seeds)", facts | {"call": plain(number), "seed": plain(seed)}, ready)

    def _agree(self, what: str, facts: dict[str, str], ready: bool) -> None:
        self._all_ready = all(each["ready"] for each in self.group.agree(what, facts, {"ready": ready}))

    def prepare(self, order: Tensor, batch: int, seed: int, epoch: int, population: Tensor | None) -> None:
        """Bounds that are the same on all ranks, from shares of all of them; compiled on all before the first step.

        Ranks wait for one another, unless all have said that they are ready.
        """
        some = arranged(order, batch, self.world) if population is None else population
        with self.long("compiling the step"):
            self.executor.prepare(some, batch, seed, epoch)
            if not self._all_ready:
                self.group.exchange("the first step of an epoch or a call")
        self.group.board.settle()

    def divided(self, order: Tensor, batch: int, epoch: int) -> tuple[Tensor, int, Tensor]:
        """This rank's part of an order: (ids ``[steps * batch]``, how many are meant, ``Run.shares``)."""
        return *self.own(order, batch), self.shares(order, batch, epoch)

    def own(self, order: Tensor, batch: int) -> tuple[Tensor, int]:
        """This rank's seeds of an order: (ids ``[steps * batch]``, how many are meant)."""
        return share(order, batch, self.rank, self.world)

    def owned(self, order: Tensor, batch: int) -> int:
        """Steps over an order in which this rank has seeds of its own: the last one may lack them."""
        full, rest = divmod(order.numel(), batch * self.world)
        return full + (rest > self.rank)

    def shares(self, order: Tensor, batch: int, epoch: int) -> Tensor:
        """``Run.shares``, on the device of ``order``; the program must have been traced.

        On the CPU the order may have -1 where a rank has fewer seeds in a step than others.
        """
        there = None if order.device.type != "cpu" else order >= 0
        there = None if there is None or bool(there.all()) else there
        seeds = order if there is None else order[there]
        if is_tried_again(epoch) and not self.executor.program.loss.standard:
            found = self._loss_parts(seeds, epoch)
            check_again(self.executor.program, found, some_again(seeds, epoch), self.graph)
        parts = self._loss_parts(seeds, epoch)
        means, sums = self._counted(order, there, batch)
        kinds = [(parts.kind, parts.rows), *parts.logged]
        of_rows = {None: means}
        for rows in {rows for _, rows in kinds if rows is not None}:
            of_rows[rows] = self._weighted(rows(seeds), order, there, batch)
        own, *logged = [of_rows[rows] if kind == MEAN else sums for kind, rows in kinds]
        return torch.stack([own, means, *logged], 1)

    def _weighted(self, rows: Tensor, order: Tensor, there: Tensor | None, batch: int) -> Tensor:
        """This rank's part of every step, by weights of the seeds that there are."""
        rows = rows if there is None else rows.new_zeros(order.numel()).masked_scatter(there, rows)
        return weights(rows, batch, self.rank, self.world, there)

    def _counted(self, order: Tensor, there: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the seeds of every step, and whether it has any: float64 ``[steps]`` each.

        Args:
            there: where the order has seeds, ``None`` for everywhere: as in the epoch before, mostly.
        """
        if there is not None:
            means = weights(there.double(), batch, self.rank, self.world)
            return means, (means > 0).double()
        known = order.numel(), batch, order.device
        if self._even[0] != known:
            every = torch.ones_like(order, dtype=torch.float64)
            sums = present(order.numel(), batch, self.rank, self.world, order.device)
            self._even = known, (weights(every, batch, self.rank, self.world), sums)
        return self._even[1]

    def _loss_parts(self, seeds: Tensor, epoch: int) -> LossParts:
        captured = self.executor.program.captured
        if self._parts[0] is not captured:
            found = loss_parts(self.executor.program, seeds, self.graph, further=epoch < 0)
            facts = {"kind": found.kind, "value on the same outputs": f"{found.tried:.6g}"}
            self.group.agree(f"{self.executor.program.loss.name}, tried before the first step", facts)
            self._parts = captured, found
        return self._parts[1]

    # --- within a step ---

    def before(self, state: StepState) -> None:
        """Before a forward pass that may be taken back."""
        program = self.executor.program
        if self._written[0] is not program.captured:
            self._written = program.captured, program.written
        self.reduction.before(self._written[1])
        if self._synced:
            others, share = within.partners(), state.share()
            others.has_loss.copy_(share[0] != 0)
            others.has_seeds.copy_(share[1] != 0)

    def reduce(self, parameters: list[Tensor], loss: Tensor, logged: list[Tensor], ok: Tensor, share: Tensor):
        """Sums over the ranks: see ``Reduction``; ``share``: ``StepState.share`` of the step."""
        with_grad = [p for p in parameters if p.grad is not None]
        return self.reduction(with_grad, loss, logged, ok, share, int(self._synced))

    def counts(self, state: StepState) -> Tensor:
        """Whether this rank has seeds of its own in the step that comes next: 0-d bool."""
        return state.share()[1] > 0

    def host_words(self) -> HostWords | None:
        """Through which hosts hear whether a captured step fits on all ranks; ``None`` where the device says it.

        All ranks call it when they capture a step.
        """
        if early_word() != "1" or len(set(self.group.hosts)) > 1:
            return None
        if not self._words_made:
            try:
                self._words = HostWords.of(self.group)
            except DistributedError:  # no memory that processes share: on all ranks
                self.group.check()
            self._words_made = True
        return self._words

    def step(self, run: Run, long: bool) -> contextlib.AbstractContextManager:
        """Where this rank is during a step."""
        self.group.check()
        self._since = None if long else time.monotonic()
        at = self.group.board.at(f"step {run.position} of epoch {run.epoch}", long)
        ends = run.epoch >= 0 and run.position + 1 == run.steps  # with shares that differ in size, mostly
        return self._looked_at(at, ends) if not self._began or (ends and not self._ended) else at

    @contextlib.contextmanager
    def _looked_at(self, at: contextlib.AbstractContextManager, ends: bool) -> Iterator[None]:
        """The first step, and the last of an epoch: what they write to buffers and is not averaged must be the same."""
        with at:
            yield
            roles = [role for role in self.executor.program.written_roles if not role.tensor.is_floating_point()]
            sums = checksums([role.tensor for role in roles])
            facts = {role.name: f"{role.tensor.dtype} #{n}" for role, n in zip(roles, sums, strict=True)}
            told = [each["facts"] for each in self.group.exchange("the end of a step", {"facts": facts})]
            if any(each != facts for each in told):
                raise DistributedError(
                    "ranks wrote different numbers to buffers of the model:\n"
                    + "\n".join(f"  {line}" for line in differences(told))
                    + "\nOf several ranks' statistics those in floating point are averaged, and no others. Count what "
                    "every rank has alike (steps, not seeds or nodes), or keep such numbers in a buffer of floats."
                )
        self._began, self._ended = True, self._ended or ends

    def waiting(self) -> None:
        """Called while the host waits for the device: raises if that is in vain."""
        group = self.group
        group.check()
        if self._since is not None and time.monotonic() - self._since > group.timeout:
            raise group.board.cause(TimeoutError("a step that takes longer"))

    def part(self, run: Run, error: BaseException) -> None:
        """This rank left a step that had begun, and the others may be within it: none can go on from there.

        Sums over the ranks would be of different steps, and nothing would tell.
        """
        what = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
        self.group.board.fail(
            f"{what}, in the middle of a step (of epoch {run.epoch}). Ranks may be at different steps now: begin again "
            "from a checkpoint."
        )

    def meet(self, what: str) -> None:
        """Waits until all ranks are here."""
        self.group.exchange(what)
        self.group.board.long = False

    def long(self, what: str) -> contextlib.AbstractContextManager:
        """What takes long within, which others wait for."""
        return self.group.board.at(what, long=True)


def counted(loss: Loss, model: torch.nn.Module) -> Loss:
    """The loss, of which a rank gives no gradients, not even NaN, in a step where it has no weight.

    Where statistics are those of all ranks, such a rank has gradients all the same: those of the others' losses.
    """
    if not _synced(model):
        return loss

    def call(outputs, y, **further):
        outputs = tree_map(lambda v: torch.ops.joestar.counted(v) if _is_differentiable(v) else v, outputs)
        return loss.call(outputs, y, **further)

    return replace(loss, call=call)


def _is_differentiable(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def check_joined(group: Group | None) -> None:
    """Before training: raises ``ConfigError`` if ranks were joined behind ``compile``, which would each train alone.

    Args:
        group: of the step.

    Raises:
        DistributedError: if the step's ranks have failed, or this one has left them.
    """
    if group is not None:
        group.check()
    elif current() is not None:
        raise ConfigError(
            f"the step was compiled before joestar.distributed.init(), and {current()} would train alone with it: call "
            "init() first, once, at the top of the script, then joestar.compile."
        )


def check_synced(model: torch.nn.Module, whole_sample: bool) -> None:
    """Raises ``ConfigError`` for a SyncBatchNorm whose statistics could not be those of one process.

    Args:
        whole_sample: the model works on all nodes of a sample at once.
    """
    norms = _synced(model)
    if norms and whole_sample:
        raise ConfigError(
            f"SyncBatchNorm in {type(model).__name__}, which takes an edge_index: nodes at the rim of a rank's sample "
            "have fewer neighbours there than in the sample of all ranks, so that statistics over them would be none "
            "of one process. Use BatchNorm (statistics per rank), or a model of blocks: forward(self, blocks, x)."
        )
    if any(norm.process_group is not None for norm in norms):
        raise ConfigError(
            "SyncBatchNorm with a process_group of its own: statistics are those of all ranks here. Convert without: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
        )


def _synced(model: torch.nn.Module) -> list[torch.nn.SyncBatchNorm]:
    return [module for module in model.modules() if isinstance(module, torch.nn.SyncBatchNorm)]


def _meet_within(group: Group, model: torch.nn.Module) -> None:
    """Lets programs know of the ranks, if their statistics are to be those of all."""
    if not _synced(model) or within.partners() is not None:
        return

    def add_up(tensor: Tensor) -> None:
        if group.board.long:  # others may still compile, and collectives wait for less long
            group.exchange("a sum within the first step")
        group.add_up(tensor)

    has_seeds, has_loss = torch.ones(2, dtype=torch.bool, device=group.device)
    others = within.Partners(add_up, group.rank, group.world, has_seeds, has_loss)
    within.meet(others)
    group.frees(others)


def compare(group: Group, model, sampler, loss_fn, options: dict) -> None:
    """Before memory is planned: all ranks have the same.

    Raises:
        DistributedError: on all ranks, with what differs.
    """
    facts = _facts_of(model, sampler, loss_fn)
    group.agree("joestar.compile, before it plans", facts | {name: plain(value) for name, value in options.items()})


def _facts_of(model, sampler, loss_fn) -> dict[str, str]:
    facts = graph_facts(sampler.graph) | model_facts(model)
    facts |= Settings(model, {"sampler": sampler} | ({} if loss_fn is None else {"loss": loss_fn})).texts()
    return facts | {"sampler.seed": plain(getattr(sampler, "seed", 0))}


def join(group: Group, model, sampler, loss_fn, optimizer, options: dict) -> None:
    """Before anything is compiled: all ranks have the same, and start from the parameters and buffers of rank 0.

    Args:
        sampler: as the user gave it, over the whole graph.

    Raises:
        DistributedError: on all ranks, with what differs.
    """
    facts = _facts_of(model, sampler, loss_fn) | optimizer_facts(model, optimizer)
    facts |= {name: plain(value) for name, value in options.items()}
    group.agree("joestar.compile", facts)
    _meet_within(group, model)
    group.from_first([*model.parameters(), *model.buffers()])
