"""What fits where: from the graph, the sampler and a budget to hot nodes, macro-batches and what they will cost.

A macro-batch of M seeds needs n(M) nodes, of which the share h(H) is hot. The device holds H hot rows, the others of
two macro-batches in a row (nodes of both once), and the step's own memory. Larger macro-batches share more rows among
their seeds, fewer hot nodes then fit: the plan takes the M whose epoch it expects to be shortest (thesis 3.3; the bus,
the steps and the first stage work at the same time, so the slowest of them decides; hidden rows are found and written
by the threads of the first stage, so that those two take turns).
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.profile.numbers import human_bytes, seconds
from joestar.stages.layout import Costs, Layout
from joestar.stages.macro import MacroBatch, Picked, nodes_of

SLACK, SIGMAS = 1.02, 4.0
"""Room beyond the sizes of the macro-batches that were looked at: a factor, and standard deviations."""
BESIDE = 1.2
"""How much longer the first stage takes beside steps and loads than alone."""
FEW, SMALL, LARGE = 20_000, 8, 3
"""Macro-batches that are looked at: ``SMALL`` of up to ``FEW`` seeds, else ``LARGE``."""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
"""Macro-batches per epoch that are considered."""
COUNTED = 32
"""Macro-batches, an epoch of them, from which is counted which nodes are needed often."""
FEW_COUNTED = 8
"""The same for samplers whose first stage has no fast way."""


@dataclass(frozen=True)
class Speeds:
    """Bytes per second over the bus, of the device's own memory; seconds that a step takes at least; operations per
    second of products of matrices; seconds that loading a macro-batch takes at least, whatever it brings.

    ``sparse`` are pairs, ascending: the rate over the bus where one row of so many is read; ``bus`` everywhere if there
    are none."""

    bus: float = 47e9
    memory: float = 3e12
    step: float = 1.5e-4
    products: float = 1e15
    load: float = 0.0
    sparse: tuple[tuple[float, float], ...] = ()

    def rows_over_bus(self, every: float) -> float:
        """Bytes per second of rows, one of ``every`` of the table: as measured, or between what was."""
        if not self.sparse:
            return self.bus
        below = max((known for known in self.sparse if known[0] <= every), default=self.sparse[0])
        above = min((known for known in self.sparse if known[0] >= every), default=self.sparse[-1])
        if below[0] >= above[0]:
            return below[1]
        return _power(below[1], above[1], math.log(every / below[0]) / math.log(above[0] / below[0]))


@dataclass(frozen=True)
class Shape:
    """A macro-batch's size: ``nodes`` in all, of which ``rows`` may have edges, and the ``seconds`` of sampling it."""

    seeds: int
    nodes: float
    rows: float
    edges: float
    seconds: float


@dataclass
class Plan:
    """Where everything goes.

    Attributes:
        budget: bytes of the device that may be used.
        fits: whether graph and features fit whole; then there is no first stage.
        num_seeds: of a macro-batch; macro_batches: in an epoch.
        hot: nodes that stay on the device; cold: slots for others; edges: room for edges.
        share: of a macro-batch's nodes that are expected to be hot; fresh: that have to be loaded, neither hot nor of
            the macro-batch before.
        parts: bytes of the device by what they hold; seconds: of an epoch by who needs them.
        bus: bytes over the bus in an epoch. hot_ids: the nodes ``[hot]``, the hottest first. batch: seeds per step
            planned for. enlarged: whether room was made since for steps with more.
        nodes, mean_edges: of a macro-batch; alone: nodes of a single batch, to compare.
        host: bytes of host memory beside the graph, by what they hold.
        ranks: how the plans of several processes differ, in words; this is the one of this process then, for its seeds.
        rough: whether times are of steps on a CPU: operations and bytes at full speed, which they are far from.
    """

    budget: int
    fits: bool
    num_seeds: int = 0
    macro_batches: int = 0
    hot: int = 0
    cold: int = 0
    edges: int = 0
    share: float = 0.0
    fresh: float = 1.0
    bus: float = 0.0
    parts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    hot_ids: Tensor | None = None
    batch: int = 1000
    nodes: float = 0.0
    mean_edges: float = 0.0
    alone: float = 0.0
    host: dict[str, int] = field(default_factory=dict)
    ranks: str = ""
    enlarged: bool = False
    rough: bool = False

    @property
    def layout(self) -> Layout:
        """How the arena is divided."""
        return Layout(self.hot, self.cold, self.edges)

    @property
    def memory(self) -> int:
        """Bytes of the device in all."""
        return sum(self.parts.values())

    @property
    def epoch_seconds(self) -> float:
        """What an epoch is expected to take: the slowest of those who work at the same time, and the first wait."""
        return max(self.seconds.values(), default=0.0) + self.seconds.get("first stage", 0.0) / max(
            1, self.macro_batches
        )

    @property
    def working_set(self) -> dict[str, float]:
        """Normalised working sets (thesis 3.2): nodes per seed, of a macro-batch, of what is loaded for one, and of a
        batch that is sampled alone."""
        seeds = max(1, self.num_seeds)
        return {
            "macro_batch": self.nodes / seeds, "loaded": self.nodes * self.fresh / seeds,
            "batch_alone": self.alone / max(1, self.batch),
        }  # fmt: skip

    def __str__(self) -> str:
        about = "at least" if self.rough else "about"
        if self.fits:
            text = f"everything fits into {human_bytes(self.budget)}: {listed(self.parts)}"
            return text + (f"\nan epoch: {about} {seconds(self.epoch_seconds)} of steps" if self.seconds else "")
        per_seed = self.working_set
        slowest = max(self.seconds, key=self.seconds.get)
        times = ", ".join(f"{name} {seconds(value)}" for name, value in self.seconds.items())
        return (
            f"{self.macro_batches} macro-batches of {self.num_seeds:,} seeds; {self.hot:,} hot nodes "
            f"({self.share:.0%} of the rows needed), {self.cold:,} slots for others ({self.fresh:.0%} "
            "have to be loaded)\n"
            f"working set: {per_seed['macro_batch']:,.1f} nodes per seed, {per_seed['loaded']:,.1f} of them loaded "
            f"(a batch alone: {per_seed['batch_alone']:,.1f})\n"
            f"memory {human_bytes(self.memory)} of {human_bytes(self.budget)}: {listed(self.parts)}\n"
            f"an epoch: {human_bytes(self.bus)} over the bus; {about} {seconds(self.epoch_seconds)} ({times}: "
            f"{slowest} decide{'s' if slowest in ('bus', 'first stage') else ''})"
            + (f"\nhost memory beside the graph: {listed(self.host)}" if self.host else "")
            + (f"\n{self.ranks}" if self.ranks else "")
            + ("\nroom was made since for larger steps: memory is as it is now" if self.enlarged else "")
        )


def listed(parts: dict[str, int]) -> str:
    """Bytes by what they hold, in words."""
    return ", ".join(f"{name} {human_bytes(value)}" for name, value in parts.items() if value)


class Look:
    """Macro-batches that were sampled to see how large they are, and which of their nodes are hot.

    Args:
        sample: a macro-batch of so many seeds, of an index. score: hot nodes are those with the largest, ``[N]``.
        device: where ids are sorted. reuse: whether rows of the macro-batch before are found again.
        hot: how many nodes are, where that is not for the plan to choose.
        seconds: that one takes to sample, where ``sample`` hands over what was made before.
    """

    def __init__(
        self, sample: Callable[[int, int], MacroBatch | Picked], score: Tensor, device: torch.device,
        reuse: bool = True, hot: int | None = None, seconds: float | None = None,
    ):  # fmt: skip
        self.sample, self.reuse, self.seconds = sample, reuse, seconds
        self.numbers_of_hot = _steps(score.numel()) if hot is None else [min(hot, score.numel())]
        order = torch.argsort(score.to(device), descending=True, stable=True)
        self._rank = torch.empty(score.numel(), dtype=torch.int32, device=device)
        self._rank[order] = torch.arange(score.numel(), dtype=torch.int32, device=device)
        self.known: dict[int, Shape] = {}
        self._ranks: dict[int, list[_Ranks]] = {}
        self._shared: dict[int, list[_Ranks]] = {}
        self._edges_vary: dict[int, float] = {}
        self._anywhere: list[tuple[_Ranks, int]] = []
        self._alone: list[tuple[_Ranks, int]] = []
        self._together: tuple[list[_Ranks], list[int], int] = [], [], 0

    @property
    def num_nodes(self) -> int:
        """Of the whole graph."""
        return self._rank.numel()

    def hottest(self, count: int) -> Tensor:
        """The first ``count`` nodes by score, ids ``[count]`` on the CPU, the hottest first."""
        ids = torch.nonzero(self._rank < count).flatten()
        return ids[torch.argsort(self._rank[ids])].cpu()

    def at(self, number: int) -> None:
        """Samples macro-batches of ``number`` seeds: ``SMALL`` of them if they are small and vary, else ``LARGE``."""
        found, ranks, clocks = [], [], []
        for index in range(SMALL if number <= FEW else LARGE):
            start = time.perf_counter()
            macro = self.sample(number, index)
            clocks.append(time.perf_counter() - start)
            ranks.append(self._ranked(macro))
            found.append((ranks[-1].count, macro.num_rows, macro.num_edges))
        means = [statistics.fmean(column) for column in zip(*found, strict=True)]
        seconds = statistics.median(clocks) if self.seconds is None else self.seconds
        self.known[number] = Shape(number, *means, BESIDE * seconds)
        self._ranks[number] = ranks
        pairs = itertools.pairwise(one.values for one in ranks)
        shared = (_common(a, b) if self.reuse else a[:0] for a, b in pairs)
        self._shared[number] = [_Ranks(one, self.num_nodes) for one in shared]
        self._edges_vary[number] = _variation([edges for _, _, edges in found])

    def anywhere(self, macro: MacroBatch) -> None:
        """Makes room for macro-batches like this one, too: a step over nodes from anywhere, as in predictions."""
        self._anywhere.append((self._ranked(macro), macro.num_edges))

    def alone(self, macro: MacroBatch) -> None:
        """Makes room for this one by itself: of a single step, it cannot be cut."""
        self._alone.append((self._ranked(macro), macro.num_edges))

    def together(self, macros: list[MacroBatch], count: int) -> None:
        """Makes room for any ``count`` of these as one macro-batch: nothing else is sure to fit where cutting seeds off
        makes none smaller."""
        ranks = [self._ranked(macro) for macro in macros]
        self._together = ranks, [macro.num_edges for macro in macros], count

    def shape(self, number: int) -> Shape:
        """As sampled, or between those that were: by a power law, a little low as numbers of nodes level off."""
        return _between([self.known[n] for n in sorted(self.known)], number)

    def share(self, number: int, hot: int) -> float:
        """Of the nodes of such a macro-batch, if the first ``hot`` by score are kept."""
        ranks = self._ranks[self._nearest(number)]
        nodes = sum(one.count for one in ranks)
        return (nodes - sum(one.beyond(hot) for one in ranks)) / max(1, nodes)

    def shared(self, number: int, hot: int) -> float:
        """Nodes of such a macro-batch that are not hot, but of the macro-batch before, over all its nodes."""
        near = self._nearest(number)
        pairs = zip(self._shared[near], self._ranks[near][1:], strict=True)
        found = [common.beyond(hot) / max(1, after.count) for common, after in pairs]
        return statistics.fmean(found) if found else 0.0

    def room(self, number: int, hot: int) -> tuple[int, int]:
        """(slots for nodes of two macro-batches in a row that are not hot, edges of one), hardly ever exceeded:
        ``SIGMAS`` deviations beyond the mean, and a bit."""
        shape, near = self.shape(number), self._nearest(number)
        cold = [one.beyond(hot) for one in self._ranks[near]]
        mean = shape.nodes * (2 * (1 - self.share(number, hot)) - self.shared(number, hot))
        slots, edges = mean * (1 + SIGMAS * _variation(cold)), shape.edges * (1 + SIGMAS * self._edges_vary[near])
        if self._anywhere:
            cold = [one.beyond(hot) for one, _ in self._anywhere]
            slots = max(slots, 2 * statistics.fmean(cold) * (1 + SIGMAS * _variation(cold)))
            given = [number for _, number in self._anywhere]
            edges = max(edges, statistics.fmean(given) * (1 + SIGMAS * _variation(given)))
        for one, given in self._alone:
            slots, edges = max(slots, one.beyond(hot)), max(edges, given)
        ranks, given, count = self._together
        slots = max(slots, sum_of_largest([one.beyond(hot) for one in ranks], count))
        edges = max(edges, sum_of_largest(given, count))
        return _room(slots, self.num_nodes - hot), _room(edges)

    def _ranked(self, macro: MacroBatch | Picked) -> "_Ranks":
        ids = nodes_of(macro, self.num_nodes, self._rank.device)
        return _Ranks(torch.sort(self._rank[ids.to(self._rank.device).long()]).values, self.num_nodes)

    def _nearest(self, number: int) -> int:
        return min(self.known, key=lambda known: abs(math.log(known / number)))


def sum_of_largest(sizes: list[int], count: int) -> int:
    """Sum of the ``count`` largest."""
    return sum(sorted(sizes, reverse=True)[:count])


class _Ranks:
    """Ascending ``values``: ranks of a macro-batch's nodes. How many are not hot is found for all that a plan tries at
    once, as it asks hundreds of times, and every answer of a GPU would be waited for."""

    def __init__(self, values: Tensor, num_nodes: int):
        self.values, self.count, self.num_nodes = values, values.numel(), num_nodes
        self._beyond: dict[int, int] = {}

    def beyond(self, hot: int) -> int:
        """How many are at least ``hot``."""
        if hot not in self._beyond:
            tried = [hot, *(_steps(self.num_nodes) if not self._beyond else [])]
            below = torch.searchsorted(
                self.values, torch.tensor(tried, dtype=self.values.dtype, device=self.values.device)
            )
            self._beyond.update(zip(tried, (self.count - below).tolist(), strict=True))
        return self._beyond[hot]


def _common(a: Tensor, b: Tensor) -> Tensor:
    """Numbers in both; each has every number once, ascending."""
    if not a.numel():
        return a
    at = torch.searchsorted(a, b).clamp_(max=a.numel() - 1)
    return b[a[at] == b]


def _variation(values: list[int]) -> float:
    """Standard deviation over mean."""
    if len(values) < 2 or not any(values):
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean


def _between(known: list[Shape], number: int) -> Shape:
    above = next((k for k in known if k.seeds >= number), known[-1])
    below = next((k for k in reversed(known) if k.seeds <= number), known[0])
    if above.seeds == below.seeds:
        return above
    at = math.log(number / below.seeds) / math.log(above.seeds / below.seeds)
    return Shape(
        number, *(_power(getattr(below, f), getattr(above, f), at) for f in ("nodes", "rows", "edges", "seconds"))
    )


def _power(low: float, high: float, at: float) -> float:
    return math.exp((1 - at) * math.log(max(low, 1e-9)) + at * math.log(max(high, 1e-9)))


def shortest(plans: list[Plan | None]) -> Plan | None:
    """The one with the shortest expected epoch."""
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.epoch_seconds, default=None)


def choose(look: Look, wanted: list[int], costs: Costs, budget: int, total: int, compute: float,
           speeds: Speeds, best: Callable[[list[Plan | None]], Plan | None] = shortest) -> Plan | None:  # fmt: skip
    """The plan with the shortest expected epoch among these sizes of macro-batches; ``None`` if none fits.

    The size that is chosen has been sampled.

    Args:
        total: seeds of an epoch; compute: seconds of its steps.
        best: which of the plans, one for each size, ``None`` for what does not fit.
    """
    for number in {wanted[0], wanted[-1], wanted[len(wanted) // 2]} - look.known.keys():
        look.at(number)
    while True:
        plans = [_of_size(look, number, costs, budget, total, compute, speeds) for number in wanted]
        found = best(plans)
        if found is None or found.num_seeds in look.known:
            return found
        look.at(found.num_seeds)


def parts_of(look: Look, number: int, costs: Costs, hot: int) -> dict[str, int]:
    """Bytes of the device, with so many hot nodes and seeds per macro-batch."""
    shape, (cold, edges) = look.shape(number), look.room(number, hot)
    return costs.of(Layout(hot, cold, edges), shape.nodes, shape.edges)


def least(look: Look, number: int, costs: Costs) -> dict[str, int]:
    """``parts_of`` with as many hot nodes as take the least memory, where their number is to be chosen."""
    found = (parts_of(look, number, costs, hot) for hot in look.numbers_of_hot)
    return min(found, key=lambda parts: sum(parts.values()))


def _of_size(look: Look, number: int, costs: Costs, budget: int, total: int, compute: float,
             speeds: Speeds) -> Plan | None:  # fmt: skip
    shape, num_nodes = look.shape(number), look.num_nodes
    fitting = [hot for hot in look.numbers_of_hot if sum(parts_of(look, number, costs, hot).values()) <= budget]
    if not fitting:
        return None
    low = fitting[-1]
    share = look.share(number, low)
    fresh, count = max(0.0, 1 - share - look.shared(number, low)), -(-total // number)
    ids = shape.rows if costs.own_book else shape.nodes * (1 + 2 * fresh)  # of rows, or slots and what is loaded
    structure = 4 * (number + ids + shape.edges) + 8 * shape.rows
    rows = shape.nodes * fresh
    beside = structure + costs.pulled + costs.pushed
    moved = count * (rows * costs.bus + structure + costs.pulled)
    bus = count * (rows * costs.bus / speeds.rows_over_bus(num_nodes / max(1.0, rows)) + beside / speeds.bus)
    loads, stage = count * (speeds.load + costs.hidden), count * shape.seconds
    seconds = {"bus": bus, "loads": loads, "steps": compute, "first stage": stage}
    if costs.hidden:  # both keep the same threads busy: what they take alone adds up
        seconds["loads and first stage"] = loads + stage / BESIDE
    return Plan(
        budget, False, number, count, low, *look.room(number, low), share, fresh, moved,
        parts_of(look, number, costs, low), seconds, nodes=shape.nodes, mean_edges=shape.edges,
    )  # fmt: skip


def _steps(num_nodes: int) -> list[int]:
    """Numbers of hot nodes to try: 0, and 200 up to all of them, evenly and by factors (more of them may take less
    memory, where most macro-batches need them)."""
    even = (num_nodes * step // 100 for step in range(101))
    return sorted({0, *even, *(int(num_nodes * 0.5 ** (step / 4)) for step in range(100))})


def _room(size: float, most: float = math.inf) -> int:
    return max(1, math.ceil(min(size * SLACK + 64, most)))
