"""Training over partitions: models of the user's own, and what is refused."""

import copy
import warnings

import pytest
import torch
from captures import cheaper, real

import joestar
from joestar.errors import CheckpointError, ConfigError, DataError
from joestar.nn import historical
from joestar.profile.ledger import Report
from tests.runtime.partitioned import BATCH, EDGES, GROUP, NODES, PARTS, compiled, model_of, run, stage_of

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture
def real_captures():
    with cheaper(real):
        yield


class TwoLayers(torch.nn.Module):
    """A model of the user's own; ``calls`` are the blocks for which it calls ``historical``."""

    def __init__(self, calls, heads=False):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 4), torch.nn.Linear(4, 4)
        self.calls, self.heads = calls, heads

    def forward(self, blocks, x):
        h = self.a(blocks[0].pull(joestar.fn.copy_u(x), "mean"))
        h = h.unflatten(1, (2, 2)) if self.heads else h
        for i in self.calls:
            h = historical(h, blocks[i])
        h = h.flatten(1)
        return self.b(blocks[1].pull(joestar.fn.copy_u(h.relu()), "sum"))


class InTraining(TwoLayers):
    """Which exchanges rows in training only."""

    def forward(self, blocks, x):
        self.calls = [0] if self.training else []
        return super().forward(blocks, x)


class Silent(TwoLayers):
    """Whose ``train`` returns nothing, which only a chain of calls would miss."""

    def train(self, mode=True):
        super().train(mode)


def test_a_model_whose_train_returns_nothing(graph, parts):
    step = compiled(graph, stage_of(parts), Silent([0]).double(), (-1, -1))
    assert float(next(step.epoch(graph.train_idx, 7))) > 0


def test_a_model_of_ones_own(graph, parts, real_captures, tmp_path):
    step = compiled(graph, stage_of(parts), TwoLayers([0]).double(), (-1, -1))
    losses, taken = [], []
    run(step, graph, 8, losses, taken)
    assert sum(losses[-5:]) < sum(losses[:5])
    report = step.report()
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert "Historical embeddings" in str(report) and "never pushed" in str(report)


@pytest.mark.parametrize(
    ("model", "fanouts", "stage", "options", "error", "said"),
    [
        (TwoLayers([]), (2, 2), {}, {}, ConfigError, r"TwoLayers.forward calls .*historical no times for blocks\[0\]"),
        (InTraining([0]), (2, 2), {}, {}, ConfigError, r"for blocks\[0\], in evaluation mode.*whatever the mode"),
        (TwoLayers([0, 0]), (2, 2), {}, {}, ConfigError, r"historical 2 times for blocks\[0\]"),
        (TwoLayers([0], True), (2, 2), {}, {}, ConfigError, r"needs the block's destinations, float \[\d+, C\]"),
        (None, (2,), {}, {}, ConfigError, "makes a single block: GraphSAGE has no hidden layer"),
        (TwoLayers([0]), (2, 2), {"dtype": torch.float16}, {}, ConfigError, "expected float32 or bfloat16"),
        (TwoLayers([0]), (2, 2), {"max_age": -1}, {}, ConfigError, "max_age must be a number of macro-batches"),
        (TwoLayers([0]), (2, 2), {"ahead": 1}, {}, ConfigError, "ahead= keeps 1 hops, and the sampler makes 2"),
        (TwoLayers([0]), (2, 2), {}, {"memory": 2000}, ConfigError, "memory=2.0 KiB is too small.*history"),
        (TwoLayers([0]), (2, 2), {}, {"tune": True}, ConfigError, "tune=True does not go with"),
    ],
    ids=["no-call", "in-training", "twice", "heads", "one-layer", "dtype", "age", "ahead", "memory", "tune"],
)  # fmt: skip
def test_what_cannot_be_is_said(graph, parts, model, fanouts, stage, options, error, said):
    model = model_of(layers=1) if model is None else model.double()
    with pytest.raises(error, match=said):
        compiled(graph, stage_of(parts, **stage), model, fanouts, **options)


def test_partitions_of_another_graph_and_other_things(graph, parts, tmp_path):
    other = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, EDGES)), NODES)
    wrong = joestar.partition(other, PARTS, passes=1)
    with pytest.raises(DataError, match="was made for another graph"):
        compiled(graph, stage_of(wrong))
    with pytest.raises(ConfigError, match=r"expected what joestar.partition returned.*got int"):
        joestar.Partitions(7, 2)
    with pytest.raises(DataError, match="no such file"):
        joestar.Partitions(tmp_path / "none.npz", 2)
    model = model_of()
    with pytest.raises(ConfigError, match="goes with epochs: give loss_fn and optimizer"):
        joestar.compile(model, joestar.NeighborSampler(graph, [2, 2, 2]), first_stage=stage_of(parts), memory="64MiB")


def test_edge_data_do_not_travel_yet(graph, parts):
    other = joestar.Graph.from_csc(graph.indptr, graph.indices, dict(graph.ndata), {"w": torch.rand(graph.num_edges)})
    other.train_idx = graph.train_idx
    with pytest.raises(ConfigError, match=r"edge data \(w\) do not travel with partitions yet"):
        compiled(other, stage_of(parts))


class ByDegree(joestar.NeighborSampler):
    def sample(self, graph, seeds):
        blocks = []
        for fanout in self.fanouts:
            columns = graph[:, seeds]
            weights = columns.apply_edges(joestar.fn.copy_u(graph.in_degrees().float()[:, None] + 1))[:, 0]
            blocks.append(columns.individual_sample(fanout, slice_probs=weights))
            seeds = blocks[-1].srcs
        return blocks[::-1]


@pytest.mark.parametrize("ahead", [None, 2, [3, -1], [-1, -1]])
def test_picks_by_weight_behind_picks_ahead_are_warned_of(graph, parts, ahead):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, sampler = TwoLayers([0]).double(), ByDegree(graph, [2, 2])
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        joestar.compile(
            model, sampler, torch.nn.functional.cross_entropy, sgd, backend="eager", warm_up=2, memory="64MiB",
            batch_size=BATCH, first_stage=stage_of(parts, ahead=ahead),
        )  # fmt: skip
    warned = [one for one in said if "picks uniformly before" in str(one.message)]
    assert len(warned) == (ahead == [3, -1]), [str(one.message) for one in said]


CHANGED = {
    "waiting: ids": ("waiting", "layers", lambda ids, rows: (ids[:3], rows), r"rows \[3, \d+\]"),
    "waiting: width": ("waiting", "layers", lambda ids, rows: (ids, rows[:, :1]), r"got \[\d+, 1\]"),
    "waiting: dtype": ("waiting", "layers", lambda ids, rows: (ids, rows.bfloat16()), "torch.bfloat16"),
    "waiting: beyond": ("waiting", "layers", lambda ids, rows: (ids + 5000, rows), r"node ids \[m\] below"),
    "waiting: a layer": ("waiting", "layers", lambda ids, rows: None, "pairs of tensors, one per hidden layer"),
    "undo: width": ("undo", "before", lambda rows, stamps: (rows[:, :1], stamps), "rows written over"),
    "undo: stamps": ("undo", "before", lambda rows, stamps: (rows, stamps[:1]), "their stamps"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_pushes_under_way_that_were_changed_are_refused(graph, parts, case):
    """By a name for what is wrong, before anything is taken over: the step trains on as if nothing had happened."""
    step = compiled(graph, stage_of(parts))
    list(step.epoch(graph.train_idx, BATCH))
    state = copy.deepcopy(step.state_dict())
    name, part, change, said = CHANGED[case]
    (entry, *_) = (entry for entry in state["history"][name] if entry["layers"][0][0].numel() > 3)
    changed = change(*entry[part][0])
    entry[part] = [*entry[part][1:]] if changed is None else [list(changed), *entry[part][1:]]
    before = step.exchange.latest, step.exchange.store.tables[0].clone()
    with pytest.raises(CheckpointError, match=rf"history, '{name}': expected .*{said}"):
        step.load_state_dict(state)
    assert step.exchange.latest == before[0] and torch.equal(step.exchange.store.tables[0], before[1])
    assert isinstance(next(step.epoch(graph.train_idx, BATCH)).item(), float)


def test_checkpoints_of_other_runs_are_refused(graph, parts, tmp_path):
    step = compiled(graph, joestar.Partitions(parts.save(tmp_path / "parts.npz"), GROUP))
    next(step.epoch(graph.train_idx, BATCH))
    state = step.state_dict()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    refused = {
        "has no history": {key: value for key, value in state.items() if key != "history"},
        "other partitions, groups or hubs": state | {"history": state["history"] | {"parts": "others"}},
        "belongs to another model, graph, partitioning or training set": state
        | {"history": state["history"] | {"tables": state["history"]["tables"] | {"tables": []}}},
    }
    for said, wrong in refused.items():
        with pytest.raises(CheckpointError, match=said):
            step.load_state_dict(wrong)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    step.restart()
    assert step.exchange.latest == -1 and not step.exchange.store.pushed_rows(0)
    assert isinstance(next(step.epoch(graph.train_idx, BATCH)).item(), float)


def other_step(graph, parts, kind):
    """A step of the same model that does not train over these partitions."""
    if kind == "large":
        return compiled(graph, joestar.LargeBatch(14))
    return compiled(graph, None, memory=None, execution=kind)


@pytest.mark.parametrize("kind", ["exact", "padded", "large"])
@pytest.mark.parametrize("without", [(), ("history",), ("under_way",)])
def test_a_state_over_partitions_is_not_for_steps_without(graph, parts, kind, without):
    """Else the epoch went on in another order: seeds were trained on twice, others never."""
    step = compiled(graph, stage_of(parts))
    epoch = step.epoch(graph.train_idx, BATCH)
    next(epoch)
    state = copy.deepcopy(step.state_dict())
    for name in without:
        state = state | {name: []} if name == "under_way" else {key: state[key] for key in state.keys() - {name}}
    other = other_step(graph, parts, kind)
    next(other.epoch(graph.train_idx, BATCH))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=r"is of training over partitions.*first_stage=joestar.Partitions"):
        other.load_state_dict(state)
    assert same(other.state_dict(), before)
    other.load_state_dict({key: value for key, value in state.items() if key != "history"} | {"under_way": []})
    assert len(other.epoch(graph.train_idx, BATCH)) == -(-graph.train_idx.numel() // BATCH)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def set_in(where, name, value):
    return lambda state: where(state).__setitem__(name, value)


def the_history(state):
    return state["history"]


def the_epoch(state):
    return state["under_way"][0]


def the_room(state):
    return state["room"]


def the_state(state):
    return state


WRONG = {
    "latest: text": (set_in(the_history, "latest", "x"), "history, 'latest'"),
    "latest: below": (set_in(the_history, "latest", -5), "history, 'latest'"),
    "base: none": (set_in(the_history, "base", None), "history, 'base'"),
    "base: beyond": (set_in(the_history, "base", 10**6), "history, 'base'.*from 0 to"),
    "epoch: text": (set_in(the_history, "epoch", "a"), "history, 'epoch'"),
    "epoch: a float": (set_in(the_history, "epoch", 1.0), "history, 'epoch'"),
    "position: beyond": (set_in(the_epoch, "position", 10**6), "'position': expected .* at most 49; got 1000000"),
    "position: below": (set_in(the_epoch, "position", -1), "'position'"),
    "position: a flag": (set_in(the_epoch, "position", True), "'position'"),
    "number: none": (set_in(the_epoch, "number", None), "'number'"),
    "batch size: 0": (set_in(the_epoch, "batch_size", 0), "'batch_size'"),
    "lanes: short": (set_in(the_epoch, "lanes", [[0, 1]]), "'lanes'"),
    "lanes: behind": (set_in(the_epoch, "lanes", [[0, 1, 7], [40, 1, 7]]), "'lanes'"),
    "lanes: none": (set_in(the_epoch, "lanes", []), "'lanes'"),
    "under way: text": (set_in(the_state, "under_way", "x"), "'under_way': expected a list"),
    "no digest": (lambda state: the_epoch(state).pop("digest"), "'digest'"),
    "macro-batch: text": (set_in(the_state, "macro_batch", "x"), "'macro_batch': expected a number of seeds"),
    "macro-batch: 0": (set_in(the_state, "macro_batch", 0), "'macro_batch'"),
    "room: incomplete": (set_in(the_state, "room", {"hot": 1}), "'room': expected numbers"),
    "room: below": (set_in(the_room, "cold", -1), "'room'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def under_way(graph, parts):
    """A step, and a state of it from the middle of an epoch that it has ended since."""
    step = compiled(graph, stage_of(parts))
    epoch = step.epoch(graph.train_idx, BATCH)
    for _ in range(5):
        next(epoch)
    state = copy.deepcopy(step.state_dict())
    list(epoch)
    return step, state


@pytest.mark.parametrize("case", WRONG)
def test_states_that_were_changed_are_refused(under_way, case):
    """Before anything is replaced."""
    step, state = under_way[0], copy.deepcopy(under_way[1])
    change, said = WRONG[case]
    change(state)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(CheckpointError, match=said):
        step.load_state_dict(state)
    assert same(step.state_dict(), before)
