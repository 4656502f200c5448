"""Macro-batches: samplers with a state, features written behind our back, features of 16 bits."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
from joestar.errors import ChangedAfterCompileError, SamplerError
from joestar.staged.planning import Planner
from joestar.staged.pure import check_pure
from joestar.staged.written import Written
from tests.runtime.staged_plans import BATCH, EDGES, NODES, Whole, plans


@pytest.fixture
def graph():
    torch.manual_seed(0)
    made = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, EDGES)), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    made.train_idx = torch.randperm(NODES)[:100]
    return made


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    return plans(monkeypatch)


def step_of(graph, staged=True, sampler=None, model=joestar.nn.GraphSAGE, **options):
    torch.manual_seed(1)
    net = model(8, 6, 2, 4)
    sampler = joestar.NeighborSampler(graph, [3, 3], seed=5) if sampler is None else sampler
    stage = {"memory": "1GiB"} if staged else {}
    adam = torch.optim.Adam(net.parameters(), 0.01)
    with cheaper(cheapest):
        step = joestar.compile(net, sampler, F.cross_entropy, adam, backend="eager", warm_up=4, **stage, **options)
        if staged:
            step.first_stage = Whole(48)
        return step


# --- samplers ---


class Sampler:
    """Takes ``fanout(self)`` neighbours; ``held``: attributes of its own."""

    def __init__(self, graph, fanout, **held):
        self.graph, self.fanout = graph, fanout
        vars(self).update(held)

    def sample(self, graph, seeds):
        first = graph[:, seeds].individual_sample(self.fanout(self))
        return [graph[:, first.srcs].individual_sample(3), first]


def counted(sampler):
    sampler.calls += 1
    return 3


def noted(sampler):
    sampler.seen.append(1)
    return 3


def nested(sampler):
    sampler.config["of"]["this"] = len(sampler.config["of"])
    sampler.config["n"] += 1
    return 3


def in_a_tensor(sampler):
    sampler.table.add_(1)
    return 3


def in_an_array(sampler):
    sampler.table[0] += 1
    return 3


STATEFUL = {
    "counter": (counted, {"calls": 0}, r"changes Sampler\.calls"),
    "list": (noted, {"seen": []}, r"changes Sampler\.seen"),
    "dict": (nested, {"config": {"n": 0, "of": {}}}, r"changes Sampler\.config"),
    "tensor": (in_a_tensor, {"table": torch.zeros(3)}, r"changes Sampler\.table"),
    "array": (in_an_array, {"table": np.zeros(3)}, r"changes Sampler\.table"),
    "torch's": (lambda s: int(torch.randint(2, 4, ())), {}, "draws from torch's generator"),
    "Python's": (lambda s: random.randint(2, 3), {}, "draws from Python's random module"),
    "NumPy's": (lambda s: int(np.random.randint(2, 4)), {}, "draws from NumPy's random module"),
    "generator": (lambda s: 2 + int(torch.rand((), generator=s.own) > 0.5), {"own": torch.Generator()}, "changes.*own"),
    "own random": (lambda s: s.own.randint(2, 3), {"own": random.Random(3)}, "changes Sampler.own"),
    "own NumPy": (lambda s: int(s.own.integers(2, 4)), {"own": np.random.default_rng(3)}, "changes Sampler.own"),
    "elsewhere": (lambda s: next(_CALLS) + 1, {}, "gives other blocks"),
}
_CALLS = iter(range(1000))


@pytest.mark.parametrize(("fanout", "held", "text"), STATEFUL.values(), ids=STATEFUL)
def test_samplers_with_a_state_are_refused(graph, fanout, held, text):
    with pytest.raises(SamplerError, match=f"{text}.*Write instead"):
        step_of(graph, sampler=Sampler(graph, fanout, **held))


def test_samplers_without_one_are_not(graph):
    held = {"own": random.Random(3), "rates": [0.5], "table": torch.rand(5), "other": graph, "open": open}
    check_pure(Sampler(graph, lambda s: 3, **held))
    check_pure(joestar.NeighborSampler(graph, [3]))

    class Failing(Sampler):
        def sample(self, graph, seeds):
            raise RuntimeError("comes again")

    check_pure(Failing(graph, None))


# --- what is written ---


def through_numpy(x):
    x.numpy()[:] += 1


def through_data(x):
    x.data.mul_(2)


def of_one_row(x):
    x.numpy()[7, 3] = 5


@pytest.mark.parametrize(
    "write", [of_one_row, *(pytest.param(write, marks=pytest.mark.fuzz) for write in (through_numpy, through_data))]
)
def test_writes_that_pytorch_does_not_count_are_noticed(graph, write):
    step = step_of(graph)
    with cheaper(cheapest):
        next(step.epoch(graph.train_idx, BATCH))
        write(graph.ndata["x"])
        for use in (lambda: list(step.epoch(graph.train_idx, BATCH)), lambda: step.predict(graph.train_idx, 20)):
            with pytest.raises(ChangedAfterCompileError, match=r"ndata\['x'\] was written to.*through NumPy"):
                use()


@pytest.mark.parametrize("shape", [(5000, 16), (700, 300), (3, 40000), (9000,), (0, 4), (20, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_rows_that_are_compared(shape, dtype):
    nodes = shape[0] if shape[0] else 4
    one = joestar.Graph.from_csc(torch.zeros(nodes + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    if shape[0]:
        one.ndata["t"] = torch.zeros(shape).to(dtype)
    written = Written(one, torch.arange(0, nodes, 3, dtype=torch.int32))
    written.check()
    if shape[0] and one.ndata["t"].numel():
        row = int(torch.arange(0, nodes, 3)[-1])
        one.ndata["t"].data[row] = 1  # the last hot row
        with pytest.raises(ChangedAfterCompileError):
            written.check()
        written.check(contents=False)


# --- 16 bits ---


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("stored", "autocast"),
    [
        (torch.float16, torch.bfloat16),
        pytest.param(torch.bfloat16, torch.float16, marks=pytest.mark.fuzz),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.fuzz),
        pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.fuzz),
    ],
)
def test_features_of_16_bits_stay_so_under_autocast(graph, stored, autocast):
    graph.ndata["x"] = graph.ndata["x"].to(stored)
    found = []
    for staged in (True, False):
        step = step_of(graph, staged, autocast=autocast, loss_scale=False)
        if staged:
            assert step.arena.graph.ndata["x"].dtype == stored
        with cheaper(cheapest):
            found.append([x.item() for x in step.epoch(graph.train_idx, BATCH)])
            found.append(step.predict(graph.train_idx, 20).tolist())
    assert found[:2] == found[2:]


def test_the_plan_counts_the_bytes_that_are_stored(graph):
    net = joestar.nn.GraphSAGE(8, 6, 2, 4)
    graph.ndata["x"] = graph.ndata["x"].half()
    sampler = joestar.NeighborSampler(graph, [3, 3])
    sizes = [Planner(net, sampler, 1 << 30, autocast=dtype).costs().slot for dtype in (torch.bfloat16, None)]
    assert sizes[1] - sizes[0] == 8 * 2
