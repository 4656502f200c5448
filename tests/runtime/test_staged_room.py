"""Steps with more seeds than were planned for: room is made within the budget, or what is missing is said."""

import copy
import gc
import re
import warnings
import weakref

import captures
import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ConfigError, StageError
from joestar.profile.numbers import parse_bytes
from joestar.stages import LargeBatch, arena_graph
from joestar.stages import arena as arenas

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NODES, EDGES, BATCH, LARGER = 300, 900, 5, 64


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    src = (torch.rand(EDGES) ** 2 * NODES).long()
    made = joestar.Graph.from_edge_index(torch.stack([src, torch.randint(0, NODES, (EDGES,))]), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 16), torch.randint(0, 4, (NODES,))
    made.train_idx, made.val_idx = torch.randperm(NODES)[:75], torch.arange(NODES)
    return made


def step_of(graph, memory="64MiB", stage=None, fanouts=(-1, -1), trains=True, model="GraphSAGE", **options):
    """Macro-batches of a step each, planned for ``BATCH`` seeds; without ``memory``, a step over the whole graph."""
    torch.manual_seed(1)
    net = getattr(joestar.nn, model)(16, 8, 2, 4, dropout=0.3)
    given = (F.cross_entropy, torch.optim.Adam(net.parameters(), 0.01)) if trains else ()
    if memory is not None:
        stage = LargeBatch(BATCH) if stage is None else stage
        options = {"memory": memory, "first_stage": stage, "batch_size": BATCH} | options
    sampler = joestar.NeighborSampler(graph, list(fanouts), seed=3)
    return joestar.compile(net, sampler, *given, backend="eager", warm_up=2, **options)


def losses(step, graph, batch=BATCH):
    return [loss.item() for loss in step.epoch(graph.train_idx, batch)]


def same(a, b):
    assert all(map(torch.equal, a.model.state_dict().values(), b.model.state_dict().values()))


def held(arena) -> int:
    """Bytes of all tensors of an arena on the CPU."""
    graph = arena.graph
    tensors = [graph.indptr, graph.indices, graph.ids, graph.whole_degrees, *graph.ndata.values(), *arena._next]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


CALLS = {
    "predict": lambda step, graph: step.predict(torch.arange(NODES), LARGER),
    "evaluate": lambda step, graph: step.evaluate(graph.val_idx, LARGER, metric=["accuracy", "loss"]),
    "step": lambda step, graph: step(graph.train_idx[:LARGER]),
    "epoch": lambda step, graph: torch.stack(list(step.epoch(graph.train_idx, LARGER))),
    "fit": lambda step, graph: step.fit(graph.train_idx, graph.val_idx, epochs=1, batch_size=LARGER).records[-1].loss,
}


@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.every(4)
def test_larger_steps_are_those_of_the_whole_graph(graph, call, execution):
    """Before anything was traced, between two epochs, and in the middle of one; smaller ones go on as before."""
    ours, plain = (step_of(graph, memory, model="GCN", execution=execution) for memory in ("64MiB", None))
    results = []
    for step in (ours, plain):
        found = [CALLS[call](step, graph)]
        if step is ours:  # of the plan's size again, so that the next call has no room
            step.arena.remake(step.arena.hot_ids, 1, ours.arena.edges // 4)
            step._forget_arena()
            step.plan.cold, step.plan.edges = 1, step.arena.edges
        epoch = step.epoch(graph.train_idx, BATCH)
        found += [next(epoch).item() for _ in range(3)]
        found.append(CALLS[call](step, graph))
        found += [loss.item() for loss in epoch] + losses(step, graph)
        results.append([each.tolist() if isinstance(each, torch.Tensor) else each for each in found])
    assert results[0] == results[1]
    same(ours, plain)
    assert ours.traffic.enlarged >= 2
    assert "times room was made" in str(ours.report())


def test_outputs_with_gradients(graph):
    """A loop of one's own: those of a step that was planned for as many seeds."""
    found = []
    for batch in (BATCH, LARGER):
        step = step_of(graph, trains=False, batch_size=batch)
        step.model.train()
        outputs = [step(graph.train_idx[:number]) for number in (BATCH, LARGER, BATCH)]
        assert bool(step.traffic.enlarged) == (batch == BATCH)
        F.cross_entropy(outputs[-1], graph.ndata["y"][graph.train_idx[:BATCH]]).backward()
        found.append([*outputs, *(parameter.grad for parameter in step.model.parameters())])
    assert all(map(torch.equal, *found))


def tight(graph, hot=4096, **options):
    """A step whose plan leaves next to nothing of its budget: about the least, and so many bytes for hot nodes."""
    with pytest.raises(ConfigError, match="too small") as caught:
        step_of(graph, memory="8KiB", **options)
    least = parse_bytes(re.search(r"Give ([\d.]+ \w+)", str(caught.value))[1])
    return step_of(graph, memory=least + hot, **options)


def test_hot_nodes_give_up_their_slots(graph):
    """Where the budget is full; and the arena takes no more than that."""
    wide = joestar.Graph.from_csc(graph.indptr, graph.indices, dict(graph.ndata))
    wide.train_idx, wide.val_idx = graph.train_idx, graph.val_idx
    for name in "abcdef":
        wide.ndata[name] = torch.randn(NODES, 16)
    step, plain = tight(wide, 6 << 10), step_of(wide, None)
    hot, before = step.plan.hot, held(step.arena)
    assert hot > 100 and step.plan.memory > 0.95 * step.plan.budget
    assert torch.equal(step.predict(wide.val_idx, 24), plain.predict(wide.val_idx, 24))
    assert 0 < step.traffic.enlarged <= 3 and 0 < step.plan.hot < hot
    assert step.plan.memory <= step.plan.budget and held(step.arena) <= before
    assert step.arena.hot == step.plan.hot == step.plan.hot_ids.numel()
    assert torch.equal(step.arena.hot_ids.long(), step.plan.hot_ids.sort().values)
    assert losses(step, wide) == losses(plain, wide)


def test_where_the_device_keeps_the_book(graph):
    """As a GPU does: that slots are missing is known when a macro-batch is loaded, not when it is made."""
    pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")
    from .device_book import book_on_device

    with book_on_device():
        step, plain = tight(graph, 1), step_of(graph, None)
        step.plan.budget = 1 << 20
        step.arena.remake(step.arena.hot_ids, 8, step.arena.edges)
        step.plan.cold = 8
        assert step.arena.own_book
        assert losses(step, graph, 8) == losses(plain, graph, 8)
        assert torch.equal(step.predict(graph.val_idx, LARGER), plain.predict(graph.val_idx, LARGER))
    assert step.traffic.enlarged >= 2


def test_a_number_of_hot_nodes_that_was_given_stays(graph):
    step = step_of(graph, stage=LargeBatch(BATCH, hot=30))
    step.predict(graph.val_idx, LARGER)
    assert step.plan.hot == step.arena.hot == 30 and step.traffic.enlarged


@pytest.mark.parametrize("call", CALLS)
def test_what_has_no_room_is_refused_with_what_helps(graph, call):
    """The memory and the size of batches that are named do, and an epoch under way goes on."""
    step, plain = tight(graph), step_of(graph, None)
    epochs = [step.epoch(graph.train_idx, BATCH), plain.epoch(graph.train_idx, BATCH)]
    assert [next(epochs[0]).item() for _ in range(3)] == [next(epochs[1]).item() for _ in range(3)]
    state = {name: value.clone() for name, value in step.model.state_dict().items()}
    arena, plan = held(step.arena), step.plan
    with pytest.raises(StageError, match=r"single step of \d+ seeds has .* the arena has room for") as caught:
        CALLS[call](step, graph)
    assert all(torch.equal(value, state[name]) for name, value in step.model.state_dict().items())
    assert held(step.arena) == arena and step.plan is plan
    if call in ("predict", "evaluate"):  # others count as steps or epochs
        assert [loss.item() for loss in epochs[0]] == [loss.item() for loss in epochs[1]]
        same(step, plain)
    else:
        assert len(list(epochs[0])) == len(epochs[1])
    text = str(caught.value)
    memory, smaller = re.search(r'Give memory="([\d.]+ \w+)", or take batches of ([\d,]+) seeds', text).groups()
    assert f"memory={step.plan.budget / 1024:.1f} KiB" in text
    CALLS[call](step_of(graph, memory), graph)
    step.predict(graph.val_idx, int(smaller))


def test_nothing_holds_on_to_the_arena_that_was(graph):
    step = step_of(graph)
    losses(step, graph)
    epoch = step.epoch(graph.train_idx, BATCH)
    next(epoch), step.predict(graph.val_idx, BATCH)
    captures._MADE.clear()  # else a test that runs alone keeps what it captured for others
    old = [weakref.ref(tensor) for tensor in (step.graph.indices, step.graph.indptr, step.graph.ndata["x"])]
    seen = []
    made = arena_graph.graph_of_slots

    def noting(*given):
        gc.collect()
        seen.extend(ref() is None for ref in old)
        return made(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arenas, "graph_of_slots", noting)
        step.predict(graph.val_idx, LARGER)
    assert seen and all(seen)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_fails_while_room_is_made_loses_nothing(graph, monkeypatch, error):
    step, plain = step_of(graph), step_of(graph, None)
    epochs = [step.epoch(graph.train_idx, BATCH), plain.epoch(graph.train_idx, BATCH)]
    found = [[next(epoch).item() for _ in range(3)] for epoch in epochs]
    made, fails = arena_graph.graph_of_slots, [True]

    def failing(*given):
        if fails.pop():
            fails.append(False)
            raise error("no memory")
        fails.append(False)
        return made(*given)

    monkeypatch.setattr(arenas, "graph_of_slots", failing)
    with pytest.raises(error):
        step.predict(graph.val_idx, LARGER)
    assert not step.traffic.enlarged
    for losses, epoch in zip(found, epochs, strict=True):
        losses += [loss.item() for loss in epoch]
    assert found[0] == found[1]
    assert torch.equal(step.predict(graph.val_idx, LARGER), plain.predict(graph.val_idx, LARGER))


def test_a_run_that_goes_on_has_the_room_that_was_made(graph):
    """Sampled macro-batches that are cut for want of room have other neighbours than whole ones."""
    stage = {"stage": LargeBatch(4 * BATCH), "fanouts": (2, 2)}
    one = step_of(graph, **stage)
    one.predict(graph.val_idx, 2 * LARGER)
    assert one.traffic.enlarged
    epoch = one.epoch(graph.train_idx, BATCH)
    next(epoch)
    state = one.state_dict()
    other = step_of(graph, **stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
    assert (
        other.plan.layout
        == one.plan.layout
        == type(one.plan.layout)(other.arena.hot, other.arena.pool, other.arena.edges)
    )
    assert losses(other, graph) == [loss.item() for loss in epoch]
    same(one, other)


def test_a_state_from_before_has_the_room_from_before(graph):
    step = step_of(graph, stage=LargeBatch(4 * BATCH), fanouts=(2, 2))
    epoch, planned = step.epoch(graph.train_idx, BATCH), step.plan
    next(epoch)
    state = copy.deepcopy(step.state_dict())
    expected = [loss.item() for loss in epoch]
    step.predict(graph.val_idx, 2 * LARGER)
    assert step.plan.enlarged and "room was made since" in str(step.plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.load_state_dict(state)
    assert step.plan == planned and (step.arena.hot, step.arena.pool, step.arena.edges) == (
        planned.hot, planned.cold, planned.edges
    )  # fmt: skip
    assert losses(step, graph) == expected


def test_several_ranks_plan_for_larger_steps(graph):
    """Each has an arena of its own, and programs are compiled by all together: none makes room alone."""
    step = step_of(graph)
    step.growth.planner.ranks = object()
    with pytest.raises(StageError, match=rf"single step of {LARGER} seeds.*compile\(..., batch_size={LARGER}\)"):
        step.predict(graph.val_idx, LARGER)


@pytest.mark.parametrize("memory", ["tight", pytest.param("64MiB", marks=pytest.mark.fuzz)])
def test_over_partitions(graph, memory):
    """Predictions and single steps; hidden rows stay, and epochs go on. Their tables have as many slots as before."""
    parts = joestar.partition(graph, 6)
    found = []
    for batch in (BATCH, LARGER):

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.first, self.second = joestar.nn.SAGEConv(16, 8), joestar.nn.SAGEConv(8, 4)

            def forward(self, blocks, x):
                h = joestar.nn.historical(self.first(blocks[0], x).relu(), blocks[0])
                return self.second(blocks[1], h)

        net = Net()
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [-1, -1], seed=3), F.cross_entropy,
            torch.optim.SGD(net.parameters(), 0.1), backend="eager", warm_up=2, memory="64MiB", batch_size=batch,
            first_stage=joestar.Partitions(parts, 1),
        )  # fmt: skip
        if batch == BATCH:
            step.plan.budget = step.plan.memory if memory == "tight" else step.plan.budget
        epoch = step.epoch(graph.train_idx, BATCH)
        results = [next(epoch).item() for _ in range(4)]
        if memory == "tight" and batch == BATCH:
            with pytest.raises(StageError, match=rf"joestar.compile\(..., batch_size={LARGER}\)"):
                step(graph.val_idx[:LARGER])
        predicted = step.predict(graph.val_idx, LARGER)  # in pieces
        results += [loss.item() for loss in epoch]
        found.append((results, predicted, step))
    assert found[0][0] == found[1][0]
    same(found[0][2], found[1][2])
    torch.testing.assert_close(found[0][1], found[1][1])
