"""How the loss over a global batch is made of the losses over its shares, found by trial.

A loss is called on rows that are drawn at random, whole and in two parts. It is a mean if the whole is the parts' mean,
weighted by what their rows weigh (one each; class weights, none for ``ignore_index``; known labels), a sum if it is
their sum. What is neither cannot be divided among ranks without changing it, and is refused.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.lowering.loss import ClassLoss
from joestar.lowering.outputs import loss_and_values

MEAN, SUM = "mean", "sum"
TRIED = 256
"""Seeds of the trial, besides one of every class."""
TRIED_AGAIN = 128
"""Seeds of the trials before further epochs: others each time."""


@dataclass
class LossParts:
    """What a rank's loss counts for.

    Attributes:
        kind: ``mean`` or ``sum``; rows: ids ``[n]`` -> weight of each in the mean, float64; ``None``: all alike.
        logged: kind of every value that is logged with it. tried: the loss of the trial.
    """

    kind: str
    rows: Callable[[Tensor], Tensor] | None
    logged: list[str]
    tried: float
    void: float = float("nan")


def loss_parts(program, seeds: Tensor, graph: Graph) -> LossParts:
    """The parts of a traced ``train`` program's loss, tried on some of ``seeds``.

    Args:
        graph: whose nodes these are: that of the program, or the whole one of which it sees parts.

    Raises:
        ConfigError: if it is neither a mean nor a sum over seeds.
    """
    data = graph.ndata
    known = _known_labels(data["y"])
    classes = [_over(loss, graph) for loss in program.class_losses] if graph is not program.graph else None
    classes = program.class_losses if classes is None else [loss for loss in classes if loss is not None]
    candidates = [_of_classes(loss) for loss in classes] + [known, None]
    nodes = _tried(seeds, data["y"], candidates[0])
    trial = _Trial(program, nodes, graph)
    for rows in candidates:
        weights = torch.ones(len(nodes), dtype=torch.float64, device="cpu") if rows is None else rows(nodes).cpu()
        if trial.is_mean(weights):
            void = 0.0 if rows is known else float("nan")
            return LossParts(MEAN, rows, trial.logged_kinds(), trial.whole[0], void)
    if trial.is_sum():
        return LossParts(SUM, None, trial.logged_kinds(), trial.whole[0])
    raise ConfigError(
        f"{program.loss.name} is neither a mean nor a sum over the seeds of a batch (the loss of a batch does not "
        f"follow from those of its parts), so that several ranks cannot divide it. {_REMEDY}"
    )


_REMEDY = (
    "Give a loss that is one: losses that compare seeds with one another, or divide by what they count, see only a "
    "rank's share."
)


def is_tried_again(epoch: int) -> bool:
    """Before the next eight epochs, then ever more rarely: a trial takes about a millisecond."""
    return 0 < epoch <= 8 or (epoch > 0 and epoch & (epoch - 1) == 0)


def check_again(program, found: LossParts, seeds: Tensor, graph: Graph) -> None:
    """Tries some other seeds of a graph, of which the loss must be made up in the way that was found before.

    Raises:
        ConfigError: if it is not.
    """
    nodes = torch.cat([seeds, seeds]) if len(seeds) == 1 else seeds
    weights = torch.ones(len(nodes), dtype=torch.float64, device="cpu")
    if found.rows is not None:
        weights = found.rows(nodes).cpu()
    trial = _Trial(program, nodes, graph)
    if trial.is_sum() if found.kind == SUM else not weights.any() or trial.is_mean(weights):
        return
    raise ConfigError(
        f"{program.loss.name} looked like a {found.kind} over the seeds of a batch, and is none for the {len(nodes)} "
        f"seeds from {int(nodes[0])} on: a part of it is shared by few seeds. Several ranks cannot divide it. {_REMEDY}"
    )


class _Trial:
    """Loss and logged values of all rows, and of each of two parts."""

    def __init__(self, program, nodes: Tensor, graph: Graph):
        self.program, self.nodes, self.graph = program, nodes, graph
        self.cut = max(1, len(nodes) * 2 // 5)
        if None in program.shapes:
            raise ConfigError(
                f"{type(program.model).__name__} returns something that has no row per seed, from which the loss of a "
                "global batch cannot be put together: several ranks need a row per seed in all that the loss is given."
            )
        self.exact = program.loss_dtype == torch.float64
        self.outputs = [self._random(shape) for shape in program.shapes]
        n = len(nodes)
        self.whole, self.first, self.rest = (self._called(a, b) for a, b in ((0, n), (0, self.cut), (self.cut, n)))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        random = torch.Generator().manual_seed(17)
        values = torch.rand(len(self.nodes), *shape, generator=random, dtype=torch.float64, device="cpu") * 0.9 + 0.05
        return values.to(self.program.graph.device, torch.float64 if self.exact else torch.float32)

    @torch.no_grad()
    def _called(self, start: int, end: int) -> list[float]:
        """Loss and logged values of some rows."""
        loss, nodes, device = self.program.loss, self.nodes[start:end], self.program.graph.device
        data = {name: self.graph.ndata[name][nodes] for name in ("y", *loss.inputs) if name != "seeds"}
        data |= {"seeds": self.graph.ids_of(nodes).long()} if "seeds" in loss.inputs else {}
        given = {name: value.to(device) for name, value in data.items()}
        outputs = self.program.assembled([rows[start:end] for rows in self.outputs])
        value, logged = loss_and_values(loss.call(outputs, given.pop("y"), **given), loss.name)
        return [float(entry) for entry in (value, *logged.values())]

    def is_mean(self, weights: Tensor, of: int = 0) -> bool:
        first, rest = float(weights[: self.cut].sum()), float(weights[self.cut :].sum())
        if first + rest == 0:
            return False
        parts = (first * self.first[of] if first else 0.0) + (rest * self.rest[of] if rest else 0.0)
        return self._close(self.whole[of], parts / (first + rest))

    def is_sum(self, of: int = 0) -> bool:
        return self._close(self.whole[of], self.first[of] + self.rest[of])

    def logged_kinds(self) -> list[str]:
        ones = torch.ones(len(self.nodes), dtype=torch.float64, device="cpu")
        entries = range(1, len(self.whole))
        return [SUM if self.is_sum(i) and not self.is_mean(ones, i) else MEAN for i in entries]

    def _close(self, a: float, b: float) -> bool:
        return abs(a - b) <= (1e-9 if self.exact else 2e-5) * max(abs(a), abs(b), 1e-3)


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
    nodes = torch.cat([nodes, nodes]) if len(nodes) == 1 else nodes
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


def _known_labels(labels: Tensor) -> Callable[[Tensor], Tensor] | None:
    if not labels.dtype.is_floating_point:
        return None
    return lambda nodes: (~torch.isnan(labels[nodes])).reshape(len(nodes), -1).sum(1).double()
