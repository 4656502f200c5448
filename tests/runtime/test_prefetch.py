"""With ``prefetch=True`` a loop sees the same bits as without, whatever happens between two steps.

Captured steps run here, too, with stand-ins for CUDA graphs and streams: the fronts' stream works as soon, or as late,
as its waits allow.
"""

import contextlib
import copy
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

import joestar
from joestar.errors import ConfigError, JoestarWarning
from joestar.runtime import prefetch, runner
from joestar.runtime.prefetch import Ahead
from joestar.staged import Planner
from joestar.store import FeatureStore
from tests.runtime.common import make_step, planted_graph, tight_bounds, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)


def graph_of(store: bool = False):
    """The small graph; features in float32 outside of the device, some of them hot."""
    if not store:
        return planted_graph(dtype=torch.float64)
    graph = planted_graph()
    graph.ndata["x"] = FeatureStore(graph.ndata["x"].clone(), "cpu", hot=torch.arange(0, 1200, 9))
    return graph


def everything(step) -> list[torch.Tensor]:
    """Parameters, buffers, gradients, moments, sums of groups, averages."""
    state = step._runner.optimizer.optimizer.state
    parameters = list(step.model.parameters())
    moments = [value for p in parameters for value in state.get(p, {}).values() if isinstance(value, torch.Tensor)]
    found = [*step.model.state_dict().values(), *moments, *step._runner.update.sums, *(step.ema or {}).values()]
    return [value.detach().clone() for value in found + [p.grad for p in parameters if p.grad is not None]]


def identical(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


def both(loop, monkeypatch, *, early=False, store=False, least=2, **options):
    """Carries out ``loop(step) -> numbers`` with and without; all that is left must be the same."""
    monkeypatch.setattr(Ahead, "__init__", _starting(Ahead.__init__, early))
    found = {}
    for ahead in (False, True):
        step = make_step(graph=graph_of(store), prefetch=ahead, **copy.deepcopy(options))
        found[ahead] = [*loop(step), *everything(step)], step.counters
    identical(found[True][0], found[False][0])
    plain, ours = found[False][1], found[True][1]
    assert plain.prefetched == 0 and ours.prefetched >= least
    for name in ("steps", "exact_steps", "overflows", "fallbacks", "recompiles", "warm_up_batches"):
        assert getattr(ours, name) == getattr(plain, name), name
    return ours


def _starting(init, early):
    def start(self, *given):
        init(self, *given)
        self.early = early

    return start


# --- what happens between two steps ---


def plainly(step):
    return [loss.item() for _ in range(2) for loss in step.epoch(IDX, 100)]


def evaluating(step):
    found = []
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position % 3 == 1:
            found += [step.evaluate(VAL, 50)["accuracy"], *step.predict(VAL[:7]).flatten().tolist()]
    return found


def other_steps(step):
    found, second = [], step.epoch(VAL, 64, shuffle=False)
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position in (1, 2, 6):
            found.append(next(second).item())
        if position == 4:
            found.append(step(torch.arange(300, 340)).item())
    return found


def leaving(step):
    found = []
    for stop in (3, 1):
        for position, loss in enumerate(step.epoch(IDX, 100)):
            found.append(loss.item())
            if position == stop:
                break
    step.restart(3)
    return found + [loss.item() for loss in step.epoch(IDX.flip(0), 90, drop_last=True)]


def writing(step):
    """Features, labels and seeds are written in place, some where no step reads them."""
    found, idx, x = [], IDX.clone(), step.graph.ndata["x"]
    for position, loss in enumerate(step.epoch(idx, 100, shuffle=False)):
        found.append(loss.item())
        if position in (1, 2):
            x.mul_(0.5)
        if position == 3:
            step.graph.ndata["y"][:400] = 0
        if position == 5:
            idx.fill_(7)
            found.append(step.evaluate(VAL, 50)["accuracy"])
    return found


def loading(step):
    """A checkpoint in the middle of an epoch: back to it, and on in a step that is new."""
    found = []
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position == 2:
            state = copy.deepcopy(step.state_dict())
        if position == 4:
            break
    step.load_state_dict(state)
    found += [loss.item() for loss in step.epoch(IDX, 100)]
    other = make_step(graph=step.graph, prefetch=step._options.prefetch)
    other.load_state_dict(copy.deepcopy(state))
    return found + [loss.item() for loss in other.epoch(IDX, 100)] + everything(other)


def scheduling(step):
    found, schedule = [], torch.optim.lr_scheduler.StepLR(step.optimizer, 3, 0.5)
    for loss in step.epoch(IDX, 100):
        found.append(loss.item())
        schedule.step()
    return found


def failing(step):
    """An error in the optimizer: the step has not happened, and is taken again."""
    found, real, calls = [], step._runner.update.apply, []

    def apply(*given):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError
        real(*given)

    epoch = step.epoch(IDX, 100)
    with mock.patch.object(step._runner.update, "apply", apply):
        while len(epoch):
            with contextlib.suppress(ZeroDivisionError):
                found.append(next(epoch).item())
    return found


LOOPS = (plainly, evaluating, other_steps, leaving, writing, loading, scheduling, failing)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("store", [False, True], ids=["resident", "store"])
def test_a_loop_sees_the_same_bits(loop, store, monkeypatch):
    ours = both(loop, monkeypatch, store=store, early=store)
    if loop is plainly:
        assert ours.prefetched == ours.steps - 2  # all but the first of every epoch


OPTIONS = {
    "groups": {"accumulate": 3, "clip_grad_norm": 0.05}, "average": {"ema": 0.9, "clip_grad_value": 0.01},
    "scale": {"loss_scale": {"initial": 8.0, "interval": 2}}, "norm": {"model_options": {"norm": "batch_norm"}},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)}, "gat": {"model": "GAT"},
    "gcn": {"model": "GCN"}, "plain passes": {"disable_passes": ("sample-gather-aggregate", "extract-select")},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name, monkeypatch):
    both(other_steps, monkeypatch, early=name in ("groups", "norm"), **OPTIONS[name])


@pytest.mark.parametrize("patience", [1000, 2])
@pytest.mark.parametrize("early", [False, True])
def test_overflows_are_redone_and_widen_the_bounds(monkeypatch, patience, early):
    tight_bounds(monkeypatch, 1.0)
    ours = both(evaluating, monkeypatch, early=early, patience=patience, model_options={"norm": "batch_norm"})
    assert ours.fallbacks > 1


def test_compiled_by_inductor(monkeypatch):
    both(plainly, monkeypatch, backend="inductor", store=True)


def test_an_error_while_the_next_batch_is_made_is_that_of_its_own_step(monkeypatch):
    step, real, calls = make_step(prefetch=True), prefetch.read, []

    def read(program, state, key):
        calls.append(int(key[2]))
        if int(key[2]) == 3:
            raise IndexError("no such row")
        return real(program, state, key)

    monkeypatch.setattr(prefetch, "read", read)
    epoch = step.epoch(IDX, 100)
    assert [next(epoch).item() > 0 for _ in range(3)] == [True] * 3 and calls == [0, 1, 2, 3]
    with pytest.raises(IndexError, match="no such row"):
        next(epoch)
    assert epoch.position == 3 and calls == [0, 1, 2, 3, 3]


def test_writes_that_are_not_counted_come_a_step_late_and_no_later():
    """What the docstring says of NumPy; and that a new epoch has them."""
    found = {}
    for ahead in (False, True):
        step = make_step(prefetch=ahead)
        epoch = step.epoch(IDX, 365)
        next(epoch)
        np.asarray(step.graph.ndata["x"])[:] *= 2
        found[ahead] = [next(epoch).item()]
        step = make_step(prefetch=ahead)
        list(step.epoch(IDX, 365))
        np.asarray(step.graph.ndata["x"])[:] *= 2
        found[ahead] += [loss.item() for loss in step.epoch(IDX, 365)]
    assert found[True][0] != found[False][0] and found[True][1:] == found[False][1:]


def test_a_sampler_that_follows_the_model_is_told_once():
    graph = planted_graph(dtype=torch.float64)
    model = joestar.nn.GraphSAGE(12, 16, 1, out_channels=4).double()
    model.register_buffer("seen", torch.ones(graph.num_edges))
    sampler = joestar.NeighborSampler(graph, [3], probs=model.seen)
    step = joestar.compile(model, sampler, torch.nn.functional.cross_entropy,
                           torch.optim.Adam(model.parameters()), backend="eager", prefetch=True)  # fmt: skip
    with pytest.warns(JoestarWarning, match="no effect on this step.*depends on model.seen"):
        losses = train(step, IDX)
    assert len(losses) == 16 and step.counters.prefetched == 0


def test_the_report_says_what_was_made_a_step_early():
    step = make_step(prefetch=True, graph=graph_of(store=True))
    train(step, IDX)
    text = str(step.report())
    assert "prefetch: 14 steps found their samples and rows made a step early" in text
    assert "gather_rows" in next(line for line in step.explain().splitlines() if "fired   prefetch" in line)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 1}, "True or False"),
        ({"execution": "exact"}, "'padded'"),
        ({"memory": "100KiB"}, r"into memory=100.0 KiB as a whole.*a step ahead.*leave prefetch out"),
        ({"memory": "1GiB", "first_stage": joestar.LargeBatch(100)}, "leave it out"),
    ],
)
def test_what_it_does_not_go_with(options, words):
    with pytest.raises(ConfigError, match=words):
        make_step(**{"prefetch": True, **options})


def test_under_a_budget_that_holds_everything(monkeypatch):
    both(evaluating, monkeypatch, memory="1GiB", batch_size=100)


@pytest.mark.parametrize("columns", [12, 300])
@pytest.mark.parametrize("kind", ["GraphSAGE", "GAT"])
def test_the_plan_counts_what_is_there_twice(kind, columns):
    """At least one more batch as the front leaves it, and no more than a few; of everything, no other part changes."""
    graph = planted_graph()
    graph.ndata["x"] = torch.rand(graph.num_nodes, columns)
    model = getattr(joestar.nn, kind)(columns, 16, 2, out_channels=4)
    sampler = joestar.NeighborSampler(graph, [5, 3])
    step = joestar.compile(
        model, sampler, torch.nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), backend="eager",
        memory="1GiB", batch_size=100, prefetch=True,
    )  # fmt: skip
    epoch = step.epoch(IDX, 100)
    next(epoch)
    made = sum(tensor.nbytes for tensor in step._runner.ahead._made.made)
    parts = dict(step.plan.parts)
    assert made <= parts.pop("a step ahead") <= 8 * made
    assert parts == Planner(model, sampler, 1 << 30, batch=100).plan().parts


# --- captured ---


class Stream:
    """Work in order, carried out when somebody waits for it, or at once."""

    current: "Stream"

    def __init__(self, late: bool):
        self.late, self.work, self.log = late, [], []

    def do(self, work) -> None:
        self.work.append(work)
        if not self.late:
            self.finish()

    def finish(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()

    def wait_stream(self, other: "Stream") -> None:
        other.finish()


class Graph:
    """In place of a ``StepGraph``: what it captured runs again, and leaves its results in the same memory."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, step, device, memory=None, beside=False):
        self.step, self.beside, self.overlapped, self.seconds = step, beside, [], 0.0
        self.graph, self.memory = self, memory
        for _ in range(2):
            step()
        Graph.made.append(self)

    def replay(self) -> None:
        Stream.current.do(self.step)

    def free(self) -> None:
        Graph.made.remove(self)


class Box:
    """In place of a ``Mailbox``: the word of the step that was carried out last."""

    def __init__(self, *_):
        self.number, self.sequence, self.word = 0, torch.zeros(()), None

    def start(self) -> None:
        """Nothing was posted."""

    def open(self):
        return contextlib.nullcontext()

    def wait(self):
        Stream.current.finish()
        return self.word


@pytest.fixture(params=[False, True], ids=["soon", "late"])
def captured(request, monkeypatch):
    """Runners capture their steps; the fronts' stream is slow, or at once."""
    main, side = Stream(late=False), Stream(late=request.param)
    Stream.current = main
    Graph.made.clear()

    @contextlib.contextmanager
    def on(stream):
        Stream.current = stream
        yield
        Stream.current = main

    def fill(graphs, front):
        """As a front of ``PrefetchGraphs``, into the memory of its first run."""
        turn = len(graphs.fronts)

        def work():
            new, kept = front(graphs.key), graphs._batches[turn]
            if kept is None:
                graphs._batches[turn] = new
                return
            for place, value in zip(
                [kept.seeds, kept.count, *kept.made], [new.seeds, new.count, *new.made], strict=True
            ):
                place.copy_(value)

        return work

    class Fronts(Graph):
        def __init__(self, step, device, memory=None, beside=False):
            if beside:  # ``fill`` of ``PrefetchGraphs``, with a memory that stays
                graphs, front = (cell.cell_contents for cell in _cells(step, "self", "front"))
                step = fill(graphs, front)
            super().__init__(step, device, memory, beside)

    monkeypatch.setattr(prefetch, "StepGraph", Fronts)
    monkeypatch.setattr(runner, "StepGraph", Graph)
    monkeypatch.setattr(prefetch, "GraphMemory", mock.Mock)
    monkeypatch.setattr(prefetch, "own_stream", lambda *_: side)
    monkeypatch.setattr(runner, "Mailbox", Box)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    forward = runner.StepRunner._forward

    def noted(self, batch):
        ok, counts, finish = forward(self, batch)
        if isinstance(self._mailbox, Box):
            self._mailbox.word = bool(ok), counts.tolist()
        return ok, counts, finish

    monkeypatch.setattr(runner.StepRunner, "_forward", noted)
    real = runner.StepRunner.__init__

    def start(self, executor, update, seed, cuda_graph):
        real(self, executor, update, seed, True)

    monkeypatch.setattr(runner.StepRunner, "__init__", start)
    return side


def _cells(function, *names):
    found = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return [found[name] for name in names]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_graphs_that_take_turns_leave_the_same_bits(loop, captured, monkeypatch):
    ours = both(loop, monkeypatch, store=True)
    assert ours.captures >= 1 and not captured.work


@pytest.mark.parametrize("patience", [1000, 2])
def test_graphs_that_take_turns_redo_and_are_captured_again(captured, monkeypatch, patience):
    tight_bounds(monkeypatch, 1.0)
    ours = both(other_steps, monkeypatch, patience=patience, model_options={"norm": "batch_norm"}, least=2)
    assert ours.fallbacks > 1 and ours.captures > 1


def test_gradients_are_those_of_the_latest_step(captured, monkeypatch):
    def loop(step):
        found = []
        for loss in step.epoch(IDX, 100):
            found += [loss.clone(), *(p.grad.clone() for p in step.model.parameters())]
        return found

    both(loop, monkeypatch, accumulate=2)


def test_fronts_share_no_memory_with_what_runs_beside_them(captured):
    step = make_step(prefetch=True)
    train(step, IDX, epochs=1)
    fronts, backs = ([graph for graph in Graph.made if graph.beside is beside] for beside in (True, False))
    memories = [graph.memory for graph in fronts]
    assert len(fronts) == 2 and memories[0] is not memories[1] and memories[0].tables is memories[1].tables
    assert len(backs) == 2 and backs[0].memory is backs[1].memory and backs[0].memory not in memories
    step._runner.drop_graph()
    assert Graph.made == []
