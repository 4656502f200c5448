"""How the loss over a global batch is made of the losses over its shares, found by trial.

A loss is called on rows that are drawn at random, whole and in two parts. It is a mean if the whole is the parts' mean,
weighted by what their rows weigh (one each; class weights, none for ``ignore_index``; known labels), a sum if it is
their sum. What is neither cannot be divided among ranks without changing it, and is refused; so is what is 0 for all
rows that are drawn, of which both holds.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import version
from joestar.lowering.loss import ClassLoss
from joestar.lowering.outputs import loss_and_values
from joestar.torch_private import TorchDispatchMode

MEAN, SUM = "mean", "sum"
TRIED = 256
"""Seeds of the trial, besides one of every class."""
TRIED_AGAIN = 128
"""Seeds of the trials before further epochs and calls: others each time."""
_RANGES = ((0.05, 0.95), (-6.0, 2.0))
"""Of the rows: some losses want probabilities, others are 0 for them. Uneven, so that sums do not cancel out."""
_WIDE = (-20.0, 60.0)
"""Where a value is 0 in both: last, as float32 has few digits of many a loss there."""

Rows = Callable[[Tensor], Tensor] | None


@dataclass
class LossParts:
    """What a rank's loss counts for.

    Attributes:
        kind: ``mean`` or ``sum``; rows: ids ``[n]`` -> weight of each in the mean, float64; ``None``: all alike.
        logged: the same two of every value that is logged with it. tried: the loss of the trial.
        candidates: what ``rows`` might be.
    """

    kind: str
    rows: Rows
    logged: list[tuple[str, Rows]]
    tried: float
    candidates: list[Rows]


def loss_parts(program, seeds: Tensor, graph: Graph, further: bool = False) -> LossParts:
    """The parts of a traced ``train`` program's loss, tried on some of ``seeds``.

    Args:
        graph: whose nodes these are: that of the program, or the whole one of which it sees parts.
        further: tried on other nodes as well: steps will be over other seeds, too.

    Raises:
        ConfigError: if it is neither a mean nor a sum over seeds, or if that cannot be told of a value.
    """
    labels = graph.ndata["y"]
    found = program.class_losses if graph is program.graph else [_over(loss, graph) for loss in program.class_losses]
    classes = [loss for loss in found if loss is not None]
    candidates = [*map(_of_classes, classes), *_known_labels(labels), None]
    nodes = _tried(seeds, labels, candidates[0])
    others = _further(seeds, graph, classes) if further or program.loss.standard else nodes[:0]
    trials = _first_trials(program, nodes, others, graph)
    trials.check_told()
    for rows in candidates:
        if trials.is_mean(_weights(rows, trials.nodes)):
            trials.check_weightless(rows)
            return LossParts(MEAN, rows, trials.logged(candidates), trials.tried, candidates)
    if trials.is_sum():
        return LossParts(SUM, None, trials.logged(candidates), trials.tried, candidates)
    raise ConfigError(
        f"{program.loss.name} is neither a mean nor a sum over the seeds of a batch (the loss of a batch does not "
        f"follow from those of its parts), so that several ranks cannot divide it. {_REMEDY}"
    )


def _first_trials(program, nodes: Tensor, others: Tensor, graph: Graph) -> "_Trials":
    """With other nodes than the seeds, unless the loss fails for these: they are not what is trained on."""
    if len(others):
        try:
            return _Trials(program, _mixed(torch.cat([nodes, others])), graph)
        except ConfigError:
            raise
        except Exception:
            pass
    return _Trials(program, nodes, graph)


def _weights(rows: Callable[[Tensor], Tensor] | None, nodes: Tensor) -> Tensor:
    return torch.ones(len(nodes), dtype=torch.float64, device="cpu") if rows is None else rows(nodes).cpu()


_REMEDY = (
    "Give a loss that is one: losses that compare seeds with one another, or divide by what they count, see only a "
    "rank's share."
)


def is_tried_again(epoch: int) -> bool:
    """Before the next eight epochs, then ever more rarely, and so for calls: a trial takes about a millisecond.

    Args:
        epoch: its number, from 0, or -1 less the number of the call, from 1.
    """
    number = _number(epoch)
    return 0 < number <= 8 or (number > 0 and number & (number - 1) == 0)


def some_again(order: Tensor, epoch: int) -> Tensor:
    """The seeds for ``check_again``: others in every epoch, all of a call of few."""
    first = _number(epoch) * TRIED_AGAIN % max(1, order.numel() - TRIED_AGAIN + 1)
    return order[first : first + TRIED_AGAIN]


def _number(epoch: int) -> int:
    return epoch if epoch >= 0 else -1 - epoch


def check_again(program, found: LossParts, seeds: Tensor, graph: Graph) -> None:
    """Tries some other seeds of a graph, of which the loss must be made up in the way that was found before.

    Raises:
        ConfigError: if it is not, or if a logged value is not.
    """
    nodes = torch.cat([seeds, seeds]) if len(seeds) == 1 else seeds
    weights = _weights(found.rows, nodes)
    trials = _Trials(program, nodes, graph)
    if not (trials.is_sum() if found.kind == SUM else not weights.any() or trials.is_mean(weights)):
        raise ConfigError(
            f"{program.loss.name} looked like a {found.kind} over the seeds of a batch, and is none for the "
            f"{len(nodes)} seeds from {int(nodes[0])} on: a part of it is shared by few seeds. Several ranks cannot "
            f"divide it. {_REMEDY}"
        )
    trials.check_weightless(found.rows)
    for entry, (name, before) in enumerate(zip(program.logged, found.logged, strict=True), 1):
        if trials.is_zero(entry) or trials.holds(entry, *before):
            continue
        now = trials.logged_kind(entry, found.candidates)
        if now != before:
            raise ConfigError(
                f"{name!r}, which {program.loss.name} logs, looked like {_said(before)} over the seeds of a batch, and "
                f"is {_said(now)} for the {len(nodes)} seeds from {int(nodes[0])} on: several ranks cannot put it "
                "together. Log one or the other."
            )


def _said(kind: tuple[str, Rows]) -> str:
    return f"a {kind[0]}" if kind[1] is None else f"a weighted {kind[0]}"


class _Trials:
    """Loss and logged values for rows of several ranges: what a kind is has to hold in all in which it is a number."""

    def __init__(self, program, nodes: Tensor, graph: Graph):
        self.program, self.nodes, self.graph = program, nodes, graph
        self.made, failed, state = [], [], _LossState(program)
        for drawn in _RANGES:
            try:
                self.made.append(_Trial(program, nodes, graph, drawn, state))
            except ConfigError:
                raise
            except Exception as error:  # of a loss that wants probabilities, say
                failed.append(error)
        if not self.made:
            raise failed[0]
        if any(self.is_zero(entry) for entry in range(len(self.made[0].whole))):
            with contextlib.suppress(Exception):  # others did not fail
                self.made.append(_Trial(program, nodes, graph, _WIDE, state))

    @property
    def tried(self) -> float:
        """The loss of the first trial in which it is a number."""
        return next((trial.whole[0] for trial in self.made if math.isfinite(trial.whole[0])), float("nan"))

    def _finite(self, of: int) -> list["_Trial"]:
        return [trial for trial in self.made if math.isfinite(trial.whole[of])]

    def is_zero(self, of: int = 0) -> bool:
        """Of such a value, both kinds hold."""
        finite = self._finite(of)
        return bool(finite) and all(trial.whole[of] == 0 for trial in finite)

    def is_mean(self, weights: Tensor, of: int = 0) -> bool:
        """In which rows have these weights."""
        finite = self._finite(of)
        return bool(finite) and all(trial.is_mean(weights, of) for trial in finite)

    def is_sum(self, of: int = 0) -> bool:
        """Over rows."""
        finite = self._finite(of)
        return bool(finite) and all(trial.is_sum(of) for trial in finite)

    def check_told(self) -> None:
        """Raises ``ConfigError`` for a loss, or a value that is logged, that is 0 in all trials."""
        name = self.program.loss.name
        names = [name, *(f"{entry!r}, which {name} logs," for entry in self.program.logged)]
        for of, what in enumerate(names):
            if self.is_zero(of):
                raise ConfigError(
                    f"{what} is 0 for {len(self.nodes)} seeds, whatever the model returns for them (drawn from "
                    f"{_WIDE[0]:g} to {_WIDE[1]:g}), so that several ranks cannot tell whether it is a mean or a sum "
                    "over seeds. Leave it out, or let it depend on more: on all of the outputs, on all seeds."
                )

    def check_weightless(self, rows: Rows) -> None:
        """Raises ``ConfigError`` for a loss in which rows that weigh nothing count: a share may have no others."""
        none = _weights(rows, self.nodes) == 0
        if none.any() and any(trial.heeds(none) for trial in self._finite(0)):
            raise ConfigError(
                f"{self.program.loss.name} is a weighted mean in which seeds count that weigh nothing (as with "
                "label_smoothing and a class of weight 0), so that a rank which has no others could not add what is "
                "theirs. Give such classes a small weight, or leave out what counts them."
            )

    def holds(self, of: int, kind: str, rows: Rows) -> bool:
        """Whether a value is of this kind."""
        return self.is_sum(of) if kind == SUM else self.is_mean(_weights(rows, self.nodes), of)

    def logged(self, candidates: list[Rows]) -> list[tuple[str, Rows]]:
        """Kinds of all values that are logged."""
        return [self.logged_kind(entry, candidates) for entry in range(1, len(self.made[0].whole))]

    def logged_kind(self, of: int, candidates: list[Rows]) -> tuple[str, Rows]:
        """What is neither is averaged."""
        kinds = [(MEAN, None), (SUM, None), *((MEAN, rows) for rows in candidates)]
        return next((kind for kind in kinds if self.holds(of, *kind)), (MEAN, None))


class _Trial:
    """Loss and logged values of all rows, drawn from a range, and of each of two parts."""

    def __init__(self, program, nodes: Tensor, graph: Graph, drawn: tuple[float, float], state: "_LossState"):
        self.program, self.nodes, self.graph, self.state = program, nodes, graph, state
        self.cut = max(1, len(nodes) * 2 // 5)
        if None in program.shapes:
            raise ConfigError(
                f"{type(program.model).__name__} returns something that has no row per seed, from which the loss of a "
                "global batch cannot be put together: several ranks need a row per seed in all that the loss is given."
            )
        self.exact = program.loss_dtype == torch.float64
        self.outputs = [self._random(shape, *drawn) for shape in program.shapes]
        n = len(nodes)
        with _Probabilities():
            values = [self._called(a, b) for a, b in ((0, n), (0, self.cut), (self.cut, n))]
        self.whole, self.first, self.rest = torch.stack(values).tolist()  # a GPU is waited for once

    def _random(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        random = torch.Generator().manual_seed(17)
        values = torch.rand(len(self.nodes), *shape, generator=random, dtype=torch.float64, device="cpu")
        values = values * (high - low) + low
        return values.to(self.program.graph.device, torch.float64 if self.exact else torch.float32)

    def heeds(self, rows: Tensor) -> bool:
        """Whether the loss is another one if the model returns something else for these rows, bool ``[n]``."""
        there, n = rows.to(self.nodes.device), len(self.nodes)
        given = [torch.where(there.view(-1, *[1] * (v.dim() - 1)).to(v.device), v.flip(0), v) for v in self.outputs]
        with _Probabilities():
            other = self._called(0, n, given)[0].item()
        return abs(other - self.whole[0]) > self._off(other, self.whole[0])

    @torch.no_grad()
    def _called(self, start: int, end: int, outputs: list[Tensor] | None = None) -> Tensor:
        """Loss and logged values of some rows, float64 ``[1 + values]``."""
        loss, nodes, device = self.program.loss, self.nodes[start:end], self.program.graph.device
        data = {name: self.graph.ndata[name][nodes] for name in ("y", *loss.inputs) if name != "seeds"}
        data |= {"seeds": self.graph.ids_of(nodes).long()} if "seeds" in loss.inputs else {}
        given = {name: value.to(device) for name, value in data.items()}
        outputs = self.program.assembled([rows[start:end] for rows in outputs or self.outputs])
        with self.state.restored():
            value, logged = loss_and_values(loss.call(outputs, given.pop("y"), **given), loss.name)
            values = (value, *logged.values())  # may be what is restored
            return torch.stack([each.detach().to(value.device, torch.float64) for each in values])

    def is_mean(self, weights: Tensor, of: int = 0) -> bool:
        first, rest = float(weights[: self.cut].sum()), float(weights[self.cut :].sum())
        whole = first + rest
        return whole != 0 and self._is(of, first / whole, rest / whole)

    def is_sum(self, of: int = 0) -> bool:
        return self._is(of, 1.0, 1.0)

    def _is(self, of: int, first: float, rest: float) -> bool:
        """Whether the whole is made of so much of the first part and of the rest."""
        parts = [by * value[of] for by, value in ((first, self.first), (rest, self.rest)) if by]
        return abs(self.whole[of] - sum(parts)) <= self._off(self.whole[of], *parts)

    def _off(self, *values: float) -> float:
        """By how much sums of such values may differ from one another."""
        return (1e-9 if self.exact else 2e-5) * max(map(abs, values))


class _LossState:
    """What a loss may write (counters, running means, banks of rows), and the random generators it may draw from."""

    def __init__(self, program):
        module = program.loss.module
        own = () if module is None else (*module.parameters(), *module.buffers())
        tensors = {id(tensor): tensor for tensor in (*own, *program.written)}.values()
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        device = program.graph.device
        self._devices = [device] if device.type == "cuda" else []

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever is called inside, and whatever it raises, afterwards all is as it was."""
        before = [version(tensor) for tensor, _ in self._values]
        try:
            with torch.random.fork_rng(self._devices):
                yield
        finally:
            with torch.no_grad():
                for (tensor, value), was in zip(self._values, before, strict=True):
                    if version(tensor) != was:
                        tensor.copy_(value)


class _Probabilities(TorchDispatchMode):
    """What wants probabilities raises without them; on a GPU nothing would work afterwards."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.binary_cross_entropy.default and bool(((args[0] < 0) | (args[0] > 1)).any()):
            raise ValueError("binary_cross_entropy wants probabilities")
        return func(*args, **(kwargs or {}))


def _tried(seeds: Tensor, labels: Tensor, rows: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Seeds from all over, one of every class, and such as weigh nothing; twice as many where there is only one."""
    spread = torch.linspace(0, len(seeds) - 1, min(TRIED, len(seeds)), dtype=torch.float64, device=seeds.device).long()
    nodes = seeds[spread]
    if not labels.dtype.is_floating_point and labels.dim() == 1:
        _, first = torch.unique(labels[seeds], return_inverse=True)
        of_class = torch.zeros(int(first.max()) + 1, dtype=torch.int64, device=seeds.device)
        of_class[first] = torch.arange(len(seeds), device=seeds.device)
        nodes = torch.cat([nodes, seeds[of_class[:TRIED]]])
    if rows is not None:
        nodes = torch.cat([nodes, seeds[rows(seeds) == 0][:TRIED]])
    return _mixed(torch.cat([nodes, nodes]) if len(nodes) == 1 else nodes)


def _further(seeds: Tensor, graph: Graph, classes: list[ClassLoss]) -> Tensor:
    """Nodes to train on, or of the whole graph, as seeds of other steps may be; none with labels out of range."""
    nodes, number = graph.train_idx, graph.num_nodes if graph.train_idx is None else len(graph.train_idx)
    spread = torch.linspace(0, number - 1, min(TRIED, number), dtype=torch.float64, device="cpu").long()
    nodes = spread if nodes is None else nodes[spread.to(nodes.device)]
    nodes, labels = nodes.to(seeds), graph.ndata["y"]
    for loss in classes:
        ids = loss.ids(nodes)
        fine = ((ids >= 0) & (ids < loss.classes)) | (ids == loss.ignore_index)
        nodes = nodes[fine if fine.dim() == 1 else fine.flatten(1).all(1)]
    if classes or labels.dtype.is_floating_point:
        return nodes
    own, ids = labels[seeds], labels[nodes]
    fine = (ids >= own.min()) & (ids <= own.max())
    return nodes[fine if fine.dim() == 1 else fine.flatten(1).all(1)]


def _mixed(nodes: Tensor) -> Tensor:
    """In an order of its own, the same on all ranks."""
    random = torch.Generator().manual_seed(5)
    return nodes[torch.randperm(len(nodes), generator=random, device="cpu").to(nodes.device)]


def _over(loss: ClassLoss, graph: Graph) -> ClassLoss | None:
    """A loss of a program over parts of a graph, for that graph's nodes; ``None`` if its ids are computed."""
    if loss.target is not None:
        return None
    labels = graph.ndata["y"]
    return dataclasses.replace(
        loss, labels=labels, weight=None if loss.weight is None else loss.weight.to(labels.device)
    )


def _of_classes(loss: ClassLoss) -> Callable[[Tensor], Tensor]:
    return loss.row_weights


def _known_labels(labels: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Of every row: its known entries, whether any is known, whether all are."""
    if not labels.dtype.is_floating_point:
        return []
    counts = [torch.sum] if labels.dim() == 1 else [torch.sum, torch.any, torch.all]
    return [functools.partial(_known_of, labels, count) for count in counts]


def _known_of(labels: Tensor, count: Callable, nodes: Tensor) -> Tensor:
    return count(~torch.isnan(labels[nodes]).reshape(len(nodes), -1), 1).double()
