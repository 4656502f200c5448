"""Random programs as steps over macro-batches, beside the same steps over the whole graph: what a number stands for.

Where the first stage keeps every neighbour, mini-batches are those of the whole graph. Where it is the one that users
have, they are those of plain PyTorch over the same macro-batches (``staged_plain.py``). Plans are drawn, and so is what
happens between two steps; half of the models compute with the ids of nodes.
"""

import copy
import importlib.util
import itertools
import random
import re
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from captures import cheaper, quick
from torch import Tensor

import joestar
from joestar.errors import JoestarError, StageError
from joestar.graph_api import Graph
from joestar.profile import sizes
from joestar.runtime.seeds import shuffled
from joestar.staged.planning import Planner
from joestar.staged.step import over
from joestar.stages import LargeBatch
from joestar.stages.plan import Plan, Speeds

from .generate import PER_PACK, setting, write
from .reading import reads_ids
from .runs import autocast_of
from .staged_plain import TOLERANCE as OF_PLAIN
from .staged_plain import Noted, Taken, graph_of, replayed, strays
from .steps import OPTIMIZERS
from .subjects import Subject, build, forget
from .twins import Twins, sharing

WHOLE = (".graph\n", "self.rows", "self.bias", 'probs=graph.edata["w"]')
"""What reads the whole graph, or holds tensors of it: there is no such program over macro-batches."""
TOLERANCE = {"exact": 0.0, "padded": 1e-9}
"""Padded steps are wide in different ways where a batch overflowed: their sums have another order."""
ROUNDED = {41: 1e-14}
"""Cases whose exact steps differ by a rounding, and what they may be off by. Of this one the first difference is in a
product of MKL's: with ``MKL_CBWR=COMPATIBLE`` it is gone, and another comes two steps later, for an unknown reason."""


HAS_TRITON = importlib.util.find_spec("triton") is not None
OWN_BOOK = 0.3
"""Share of the cases in which slots are given as on a GPU."""
SAMPLED = 0.4
"""Share of the cases whose first stage samples; their plans have room for all that it could have picked."""
OF_MANY = ("collective_sample(", "LayerDependentSampler(")
"""Draws from what many seeds have reached: another thing for a macro-batch."""
WEIGHED = re.compile(r"individual_sample\((?!-1)[^\n]*probs=|NeighborSampler\(graph, (?!\[-1\])[^\n]*probs=(?!None)")
WEIGHED_ONES = 4
"""What draws by weight; every so many cases have a program that does."""
APART = 5
"""Every so many cases the two steps are captured each by itself."""


class Everything(LargeBatch):
    """A first stage that keeps every neighbour within so many hops."""

    repeats = False

    def __init__(self, num_seeds: int, hops: int):
        super().__init__(num_seeds)
        self.hops = hops

    def sample(self, graph, sampler, seeds, key):
        return super().sample(graph, joestar.NeighborSampler(graph, [-1] * self.hops), seeds, key)


class Drawn:
    """Everything but the program, of one case: order of seeds, plan, optimizer, events; ``repr`` says it."""

    def __init__(self, number: int, graph: Graph, classified: bool):
        self.number, rng = number, random.Random(f"staged {number}")
        self.rng = rng
        nodes = graph.num_nodes
        self.batch, self.execution = rng.randint(2, 6), rng.choice(("exact", "padded"))
        self.order = [rng.randrange(nodes) for _ in range(self.batch * rng.randint(2, 6) + rng.choice((0, 0, 1, 2)))]
        self.steps = rng.randint(1, 4)
        self.hot = sorted(rng.sample(range(nodes), rng.choice((0, 0, nodes // 4, nodes // 2, nodes))))
        self.roomy(graph)
        self.kind = rng.choice(list(OPTIMIZERS))
        self.settings = {**rng.choice(OPTIMIZERS[self.kind]), **({} if self.kind == "SGD" else {"eps": 1e-4})}
        self.accumulate = rng.choice((1, 1, 1, 2))
        self.shuffle, self.tight = rng.random() < 0.7, rng.random() < 0.3
        self.sampled = False
        events = ["predict", "step", "inner", "break", "resume"] + ["evaluate"] * classified
        self.events = {at: rng.choice(events) for at in range(9) if rng.random() < 0.25}
        self.own_book = HAS_TRITON and random.Random(f"book {number}").random() < OWN_BOOK

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in ("rng", "number"))

    def crowd(self, graph: Graph, hops: int) -> None:
        """Room that is enough for every step by itself, for most macro-batches, or anything in between."""
        ids, rng = torch.tensor(self.order, dtype=graph.indices.dtype), self.rng
        orders = [shuffled(ids, 0, epoch) if self.shuffle else ids for epoch in range(2)]
        stage, whole = Everything(1, hops), joestar.NeighborSampler(graph, [-1])
        self.sampled = rng.random() < SAMPLED
        for name, size in (("cold", self._cold), ("edges", lambda macro: macro.num_edges)):
            most = max(size(stage.sample(graph, whole, order, (0, 0, 0))) for order in orders)
            parts = (part for order in orders for part in order.split(self.batch))
            least = max(size(stage.sample(graph, whole, part, (0, 0, 0))) for part in parts)
            setattr(self, name, max(1, rng.choice((least, rng.randint(least, most), getattr(self, name)))))

    def _cold(self, macro) -> int:
        return macro.num_nodes - len(set(macro.ids.tolist()) & set(self.hot))

    def roomy(self, graph: Graph) -> None:
        """Room for all there is."""
        self.cold, self.edges = graph.num_nodes, max(1, graph.num_edges)

    def plan(self, dtype: torch.dtype) -> Plan:
        """As drawn."""
        count, hot = self.steps * self.batch, torch.tensor(self.hot, dtype=dtype)
        return Plan(1 << 30, False, count, 4, len(hot), self.cold, self.edges, hot_ids=hot, batch=self.batch)


@dataclass
class Tally:
    """What became of some cases.

    Attributes:
        cases: compared; cut: with macro-batches that were cut or loaded alone; crowded: with steps that had no room at
            all; again: with macro-batches that were made again; plain: steps compared with a plain loop; whole_runs:
            runs compared with one to their end; sampled: with a first stage that samples; repeated: of these, whose
            draws steps repeat; of_whole: steps whose mini-batches are found to be those of the whole graph; refused:
            title -> message.
    """

    cases: int = 0
    cut: int = 0
    crowded: int = 0
    again: int = 0
    overflows: int = 0
    plain: int = 0
    whole_runs: int = 0
    sampled: int = 0
    repeated: int = 0
    of_whole: int = 0
    finite: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def own_graph(subject: Subject) -> Subject:
    """The program over a graph of its own, whose labels are those that its loss takes."""
    graph = subject.graph
    mine = Graph.from_csc(graph.indptr, graph.indices)
    mine.ids = graph.ids
    mine.ndata.update(dict(graph.ndata.items()), y=graph.ndata[subject.written.target])
    mine.edata.update(dict(graph.edata.items()))
    return replace(subject, graph=mine, sampler=over(subject.sampler, mine), model=copy.deepcopy(subject.model))


def hops_of(written) -> int:
    """How far a program's sampler reaches at most."""
    blocks = len(setting(written.number // PER_PACK).edata)
    return blocks * (2 if "second =" in written.head or "near =" in written.head else 1)


def as_a_part(graph: Graph) -> None:
    """Says of a whole graph what an arena says: the ids of its nodes, and their degrees. Nothing is another for it."""
    graph.whole_degrees = graph.in_degrees()
    if graph.ids is None:
        graph.ids = torch.arange(graph.num_nodes, dtype=graph.indices.dtype)


class Trained:
    """A step, and what is seen of it while events happen."""

    def __init__(self, subject: Subject, drawn: Drawn, staged: bool):
        self.subject, self.drawn, self.staged = subject, drawn, staged
        self.seen: list[Tensor] = []
        self.steps: list[tuple[Taken, int]] = []
        self.noted: list[Noted] = []
        self.step = self.compiled(self.subject.model)
        self.overflows = 0

    def compiled(self, model):
        """A new step of a model."""
        subject, drawn = self.subject, self.drawn
        self.optimizer = getattr(torch.optim, drawn.kind)(model.parameters(), **drawn.settings)
        number, hops = drawn.steps * drawn.batch, hops_of(subject.written)
        first = LargeBatch(number) if drawn.sampled else Everything(number, hops)
        stage = {"memory": 1 << 30, "first_stage": first, "batch_size": drawn.batch} if self.staged else {}
        step = joestar.compile(
            model, subject.sampler, subject.loss, self.optimizer, backend="eager", execution=drawn.execution,
            autocast=autocast_of(subject.written), accumulate=drawn.accumulate,
            **({"slack": 0.0, "warm_up": 1} if drawn.tight else {"warm_up": 3}), **stage,
        )  # fmt: skip
        if self.staged:
            self.noted.append(Noted(step.first_stage))
        return step

    def run(self) -> None:
        """Two epochs, with what happens in between."""
        ids = torch.tensor(self.drawn.order, dtype=self.subject.graph.indices.dtype)
        at = itertools.count()
        for _ in range(2):
            epoch = self._epoch(ids)
            while (taken := next(epoch, None)) is not None:
                loss, seeds = taken
                self._took(epoch.number, epoch.position - 1, loss, seeds, self.drawn.batch)
                epoch = self._event(self.drawn.events.get(next(at)), ids, epoch)
        self.overflows += self.step.counters.overflows

    def _took(self, epoch: int, position: int, loss: Tensor, seeds: Tensor, batch: int) -> None:
        self.seen += [loss, seeds]
        self.steps.append((Taken(loss, seeds, epoch, position), batch))

    def _epoch(self, ids: Tensor):
        return self.step.epoch(ids, self.drawn.batch, self.drawn.shuffle, with_seeds=True)

    def _event(self, event: str | None, ids: Tensor, epoch):
        """What happens between two steps; the epoch to go on with."""
        step, some = self.step, ids[: self.drawn.batch]
        if event == "predict":
            self.seen.append(step.predict(ids.flip(0), self.drawn.batch + 1))
        elif event == "evaluate":
            self.seen.append(torch.tensor(list(step.evaluate(some).values())))
        elif event == "step" and self.drawn.accumulate == 1:
            self._took(-2 - step._calls, 0, step(some.flip(0)), some.flip(0), len(some))
        elif event == "inner" and self.drawn.accumulate == 1:
            inner = self._epoch(some)
            for loss, seeds in inner:
                self._took(inner.number, inner.position - 1, loss, seeds, self.drawn.batch)
        elif event == "break":
            epoch.close()
        elif event == "resume":
            state = copy.deepcopy(step.state_dict())
            epoch.close()
            self.overflows += step.counters.overflows
            self.step = self.compiled(copy.deepcopy(self.subject.model))
            self.step.load_state_dict(state)
            self.subject.model = self.step.model
            return self._epoch(ids)
        return epoch

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and moments as they are."""
        return states(self.step.model, self.optimizer)


def states(model, optimizer) -> dict[str, Tensor]:
    """Weights, buffers and moments."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"{key} of {name}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def written_of(case: int):
    """The program of a case: the first from a random one on that reads nothing of the whole graph; of every second
    one, features know their ids. In every fourth case it draws by weight."""
    number = random.Random(f"staged program {case}").randrange(3000)
    possible = (w for w in map(write, itertools.count(number)) if not any(piece in w.source for piece in WHOLE))
    if is_weighed(case):
        possible = (w for w in possible if WEIGHED.search(w.source) and not w.autocast)
    found = next(possible)
    return reads_ids(found) if number % 2 else found


def is_weighed(case) -> bool:
    """Whether the program of a case draws by weight, and its first stage samples."""
    return isinstance(case, int) and case % WEIGHED_ONES == 3


def check(case: int, tally: Tally) -> list[str]:
    """Runs a case; what differs, in words."""
    written = written_of(case)
    subjects = build([written])
    try:
        classified = written.target == "y" and "z[:" not in written.body
        drawn = Drawn(case, subjects[0].graph, classified)
        drawn.crowd(subjects[0].graph, hops_of(written))
        if is_weighed(case):
            drawn.sampled, drawn.accumulate = True, 1  # so that it is compared with plain PyTorch
        twins = case % APART != 0
        found = _checked(subjects[0], drawn, tally, sharing(Twins()) if twins else quick)
        if found and twins:  # unless it is a twin's fault
            found = _checked(subjects[0], drawn, tally, quick)
    finally:
        forget([written])
        torch._dynamo.reset()
    return [f"case {case}, {drawn}\n{words}" for words in found]


def _checked(subject: Subject, drawn: Drawn, tally: Tally, capture) -> list[str]:
    with ExitStack() as stack:
        stack.enter_context(cheaper(capture))
        stack.enter_context(mock.patch.object(Planner, "_measured", return_value=Speeds()))
        stack.enter_context(mock.patch.object(Planner, "plan", lambda self: drawn.plan(self.graph.indices.dtype)))
        if drawn.own_book:
            from runtime.device_book import book_on_device

            stack.enter_context(book_on_device())
        if drawn.tight:
            stack.enter_context(mock.patch.object(sizes, "ROUND", 1))
        start = copy.deepcopy(subject.model)
        whole, error = _ran(subject, drawn, False, capture is not quick)
        if error is not None:
            tally.refused[subject.written.title] = str(error)
            _, other = _ran(subject, drawn, True, False)
            same = isinstance(other, type(error)) or isinstance(getattr(other, "__cause__", None), type(error))
            return [] if same or no_room(other) else [f"whole graph: {error!r}\nmacro-batches: {other!r}"]
        parts, error = _ran(subject, drawn, True, False)
        if no_room(error):
            tally.crowded += 1
            drawn.roomy(subject.graph)
            parts, error = _ran(subject, drawn, True, False)
        if error is not None:
            return [f"macro-batches alone raise {error!r}"]
    _count(tally, parts, whole)
    found = [] if drawn.sampled else differences(parts, whole)
    return [*found, *plain_differences(replace(subject, model=start), drawn, parts, tally)]


def _count(tally: Tally, parts: Trained, whole: Trained) -> None:
    traffic = parts.step.traffic
    tally.cases += 1
    tally.cut += traffic.cut + traffic.alone > 0
    tally.again += traffic.again > 0
    tally.overflows += parts.overflows + whole.overflows > 0
    tally.finite += all(bool(value.isfinite().all()) for value in parts.seen)


def no_room(error: Exception | None) -> bool:
    """Whether a step had no room, which the plan, not the program, is to blame for."""
    return isinstance(error, StageError) and "of a single step" in str(error)


def _ran(subject: Subject, drawn: Drawn, staged: bool, alike: bool) -> tuple[Trained | None, Exception | None]:
    trained = None
    try:
        mine = own_graph(subject)
        if alike and not staged:
            as_a_part(mine.graph)
        trained = Trained(mine, drawn, staged)
        trained.run()
    except (JoestarError, RuntimeError, ValueError) as error:
        return trained, error
    return trained, None


def differences(parts: Trained, whole: Trained) -> list[str]:
    """Of all that was seen, and of the state in the end."""
    exact = parts.drawn.execution == "exact" or not (parts.overflows or whole.overflows)
    tolerance = max(TOLERANCE["exact" if exact else "padded"], ROUNDED.get(parts.drawn.number, 0.0))
    if not exact and parts.subject.written.autocast:
        return []  # 16 bits: another order of sums is another result
    found = [] if len(parts.seen) == len(whole.seen) else [f"{len(parts.seen)} results for {len(whole.seen)}"]
    pairs = [(f"result {n}", *both) for n, both in enumerate(zip(parts.seen, whole.seen, strict=False))]
    other = whole.state()
    pairs += [(name, value, other[name]) for name, value in parts.state().items()]
    return found + [off for name, a, b in pairs if (off := _off(name, a, b, tolerance))]


def _off(name: str, a: Tensor, b: Tensor, tolerance: float) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{name}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    a, b = a.double(), b.double()
    scale = max(1.0, float(b.nan_to_num().abs().max())) if b.numel() else 1.0
    if torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"{name}: off by {float((a - b).abs().max()):.3g} at a scale of {scale:.3g}"


def plain_differences(subject: Subject, drawn: Drawn, parts: Trained, tally: Tally) -> list[str]:
    """Losses of all steps, and the state in the end, beside a plain PyTorch loop over the same macro-batches."""
    if subject.written.autocast or drawn.accumulate > 1:
        return []
    mine = own_graph(subject)
    mine.written = replace(mine.written, target="y")
    optimizer = getattr(torch.optim, drawn.kind)(mine.model.parameters(), **drawn.settings, fused=False)
    repeated = parts.step.arena.graph.first_key is not None
    tally.repeated += repeated
    macros, steps = [_macro_of(parts, *step) for step in parts.steps], [step for step, _ in parts.steps]
    graphs = [graph_of(mine.graph, *macro, repeated) for macro in macros]
    if repeated and drawn.sampled and not any(piece in mine.written.source for piece in OF_MANY):
        if off := strays(mine, steps, graphs, [key for _, key in macros]):
            return off
        tally.of_whole += len(steps)
    found, compared, all_of_them = replayed(mine, steps, graphs, optimizer)
    tally.plain += compared
    if not all_of_them or found:
        return found
    tally.whole_runs += 1
    tally.sampled += drawn.sampled
    other = states(mine.model, optimizer)
    pairs = ((name, value, other.get(name, torch.zeros_like(value))) for name, value in parts.state().items())
    offs = (_off(f"{name} beside a plain loop", a, b.to(a.dtype), OF_PLAIN) for name, a, b in pairs)
    return [off for off in offs if off]


def _macro_of(parts: Trained, step: Taken, batch: int):
    """The macro-batch of a step, and its key, whichever of the run's first stages has made it: these are pure."""
    return Noted.joined(parts.noted).of(step, batch)
