"""Training over partitions: against plain PyTorch with dictionaries, and what happens between two steps."""

import contextlib
import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real

import joestar
from joestar.errors import StageError
from joestar.nn import historical
from joestar.staged.partition_planning import PartitionPlanner
from joestar.staged.partitioned import PartitionedStep
from joestar.stages.arena import Arena
from tests.runtime.partitioned import (
    BATCH,
    NODES,
    PARTS,
    compiled,
    model_of,
    replayed,
    run,
    stage_of,
)

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def test_the_arena_knows_the_tables_that_its_loads_write(graph, parts, monkeypatch):
    """It keeps their memory while a load goes on: ``stages/test_arena.py``."""
    kept, keep = [], Arena._read_on
    monkeypatch.setattr(Arena, "_read_on", staticmethod(lambda given, *t: kept.extend(t) or keep(given, *t)))
    step = compiled(graph, stage_of(parts))
    device = step.exchange.device
    wanted = [*device.tables.places, *device.tables.pulled, *device.tables.usable, *device.pushed, *device.written]
    assert {table.data_ptr() for table in wanted} <= {table.data_ptr() for table in kept}


CASES = {
    "sage": ({"kind": "GraphSAGE"}, {}, {}),
    "gat": ({"kind": "GAT", "heads": 2}, {}, {}),
    "gcn-exact": ({"kind": "GCN"}, {}, {"execution": "exact"}),
    "gcn-graph-norm": ({"kind": "GCN", "gcn_norm": "graph"}, {}, {}),
    "gin-bfloat16-norm": ({"kind": "GIN", "norm": "layer_norm"}, {"dtype": torch.bfloat16}, {}),
    "sage-batch-norm": ({"kind": "GraphSAGE", "norm": "batch_norm"}, {"max_age": 3}, {}),
    "gcn-batch-norm-exact": ({"kind": "GCN", "norm": "batch_norm"}, {}, {"execution": "exact"}),
    "sage-aged": ({"kind": "GraphSAGE"}, {"max_age": 3}, {}),
    "sage-accumulate": ({"kind": "GraphSAGE"}, {}, {"accumulate": 3}),
    "sage-overflows": ({"kind": "GraphSAGE"}, {}, {"slack": 0, "warm_up": 1, "patience": 1}),
}


@pytest.mark.filterwarnings("ignore:GCNConv")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(4)
def test_training_is_that_of_plain_pytorch_with_dictionaries(graph, parts, case):
    model, stage, options = CASES[case]
    ours, theirs = model_of(**model), model_of(**model)
    step = compiled(graph, stage_of(parts, **stage), ours, **options)
    assert isinstance(step, PartitionedStep)
    losses, taken = [], []
    run(step, graph, 4, losses, taken)
    expected, plain = replayed(graph, parts, theirs, taken, options.get("accumulate", 1), **stage)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in ours.state_dict().items():
        assert torch.allclose(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-8), name
    for steps in taken:
        assert sorted(v for seeds in steps for v in seeds) == sorted(graph.train_idx.tolist())
    record = step.report().feeding.history
    assert [row.width for row in record] == [4, 4] and all(row.pulled and row.pushed for row in record)
    assert step.counters.overflows > 0 or case != "sage-overflows"
    assert (record[0].too_old > 0) == ("max_age" in stage)
    store = step.exchange.store
    step.exchange.begin(0)
    step.exchange._apply(step.exchange.latest)
    plain.apply(plain.number)
    for layer, history in enumerate(plain.history):
        for node, (row, when) in history.items():
            if store.has_row(layer, torch.tensor([node])):
                values, stamps = store.peek(layer, torch.tensor([node]))
                assert int(stamps) == when
                assert torch.allclose(values[0].double(), row.double(), rtol=2e-2 if stage.get("dtype") else 1e-4)


class SameRows(torch.nn.Module):
    """Whose hidden rows are the same for every node, in front of a norm."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 4), joestar.nn.SAGEConv(4, 4)
        self.norm = torch.nn.BatchNorm1d(4, momentum=None)  # running statistics: means over all batches

    def forward(self, blocks, x):
        h = self.a(torch.ones_like(x))[: blocks[0].num_dst]
        return self.b(blocks[1], self.norm(joestar.nn.historical(h, blocks[0])).relu())


@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_halo_rows_that_were_never_pushed_are_no_zeros_to_a_norm(graph, parts, execution):
    torch.manual_seed(1)
    model = SameRows().double()
    row = model.a(torch.ones(6).double()).detach().clone()
    step = compiled(graph, stage_of(parts, dtype=torch.float32), model, (-1, -1), execution=execution)
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
    list(step.epoch(graph.train_idx, BATCH))
    assert step.report().feeding.history[0].missing > 0
    assert torch.allclose(model.norm.running_mean, row, atol=1e-6)
    assert torch.allclose(model.norm.running_var, torch.zeros(4).double(), atol=1e-9)


class Boosted(torch.nn.Module):
    """Whose hidden rows are too large for float16 while ``boost`` is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = joestar.nn.SAGEConv(6, 4), joestar.nn.SAGEConv(4, 4)
        self.register_buffer("boost", torch.ones(()))

    def forward(self, blocks, x):
        h = (self.a(blocks[0], x) * self.boost).half()
        return self.b(blocks[1], joestar.nn.historical(h.float(), blocks[0]))


@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_rows_of_a_step_that_the_scale_skips_are_not_kept(graph, execution):
    """They were read by later macro-batches, whose steps were skipped, too."""
    graph = joestar.Graph.from_csc(graph.indptr, graph.indices, {"x": graph.ndata["x"].float(), "y": graph.ndata["y"]})
    graph.train_idx = torch.arange(48)
    model = Boosted()
    parts = joestar.partition(graph, PARTS, passes=2)
    step = compiled(graph, stage_of(parts), model, (-1, -1), execution=execution, loss_scale=True)
    epoch = step.epoch(graph.train_idx, BATCH)
    model.boost.fill_(1e9)
    before, scale = step.weights(), float(step.loss_scale)
    next(epoch)
    assert float(step.loss_scale) < scale and torch.equal(step.weights()["a.lin_l.weight"], before["a.lin_l.weight"])
    model.boost.fill_(1.0)
    assert all(loss.isfinite() for loss in epoch)
    step.exchange.begin(0)
    step.exchange._apply(step.exchange.latest)
    for table in step.exchange.store.tables:
        assert table.isfinite().all()


@pytest.mark.parametrize("kind", ["GraphSAGE", "GAT"])
def test_rows_of_weights_that_stay_give_the_losses_of_the_whole_graph(graph, parts, kind):
    """What is stored is what a forward gives: once every node was trained on, only gradients lack something."""
    everywhere = copy.copy(graph)
    everywhere.train_idx = torch.arange(NODES)
    model = model_of(kind, 2)
    step = joestar.compile(
        model, joestar.NeighborSampler(everywhere, [-1, -1], seed=3), F.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.0), backend="eager", memory="64MiB", batch_size=BATCH,
        first_stage=stage_of(parts),
    )  # fmt: skip
    losses, taken = [], []
    run(step, everywhere, 2, losses, taken)
    logits, labels = model(graph, graph.ndata["x"]).detach(), graph.ndata["y"]
    expected = [[F.cross_entropy(logits[seeds], labels[seeds]).item() for seeds in steps] for steps in taken]
    assert losses[len(taken[0]) :] == pytest.approx(expected[1], rel=1e-6)
    assert losses[: len(taken[0])] != pytest.approx(expected[0], rel=1e-3), "at first rows are missing"


def dropping():
    return model_of("GraphSAGE", 3, dropout=0.4)


def undisturbed(graph, parts, epochs=3, batch=BATCH, **options):
    step = compiled(graph, stage_of(parts, **options), dropping(), fanouts=(3, 3, 3))
    losses, taken = [], []
    run(step, graph, epochs, losses, taken, batch)
    return losses, step


@pytest.fixture(scope="module")
def expected(graph, parts):
    """Losses of three epochs, steps of each, and the step behind them."""
    losses, step = undisturbed(graph, parts)
    return losses, step


def same(ours, theirs):
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name
    states = ours.exchange, theirs.exchange
    for exchange in states:
        exchange.begin(99)
        exchange._apply(exchange.latest)
    for own, other in zip(*(s.store.tables + s.store.stamps for s in states), strict=True):
        assert torch.equal(own, other)


def test_what_happens_between_two_steps_changes_nothing(graph, parts, expected):
    step = compiled(graph, stage_of(parts), dropping(), fanouts=(3, 3, 3))
    losses, taken = [], 0
    for number in range(3):
        for loss in (epoch := step.epoch(graph.train_idx, BATCH)):
            losses.append(loss.item())
            taken += 1
            if taken % 4 == 1:
                step.evaluate(graph.train_idx[:20], 10)
            if taken % 5 == 2:
                step.state_dict()
        if number == 1:
            step.predict(torch.arange(9))
    assert losses == expected[0] and len(epoch) == 0
    assert step.traffic.again > 3
    same(step, expected[1])


@pytest.mark.parametrize("position", [3, 9, *(pytest.param(n, marks=pytest.mark.fuzz) for n in (1, 6, 13))])
def test_an_epoch_goes_on_elsewhere(graph, parts, expected, position, tmp_path):
    """Within macro-batches and between them, from a file."""
    step = compiled(graph, stage_of(parts), dropping(), fanouts=(3, 3, 3))
    losses = [loss.item() for loss in step.epoch(graph.train_idx, BATCH)]
    epoch = step.epoch(graph.train_idx, BATCH)
    losses += [next(epoch).item() for _ in range(min(position, len(epoch)))]
    joestar.Checkpoints(tmp_path).save(step)
    list(epoch)  # what happens here is not seen there
    other = compiled(graph, stage_of(parts), dropping(), fanouts=(3, 3, 3))
    other.load_state_dict(joestar.Checkpoints(tmp_path).latest()["step"])
    for _ in range(3 - other.epochs_done):
        losses += [loss.item() for loss in other.epoch(graph.train_idx, BATCH)]
    assert losses == expected[0]
    same(other, expected[1])


def test_an_error_in_the_loop_leaves_the_epoch_and_the_tables_whole(graph, parts, expected):
    step = compiled(graph, stage_of(parts), dropping(), fanouts=(3, 3, 3))
    losses, failures = [], iter([1, 4, 5])
    push, fails = step._runner.push, [next(failures)]

    def failing(outputs, ok):
        push(outputs, ok)
        if fails[0] == len(losses):
            fails[0] = next(failures, None)
            raise KeyboardInterrupt

    step._runner.push = failing
    for _ in range(3):
        epoch = step.epoch(graph.train_idx, BATCH)
        while len(epoch):
            with contextlib.suppress(KeyboardInterrupt):
                losses.append(next(epoch).item())
    assert fails == [None]
    assert len(losses) == len(expected[0])


def test_a_macro_batch_that_has_no_room_is_cut(graph, monkeypatch):
    """On a ring, half of the seeds need half of what is within three hops of them."""
    v = torch.arange(NODES)
    ring = joestar.Graph.from_edge_index(torch.stack([v.repeat(2), torch.cat([v + 1, v + 4]) % NODES]), NODES)
    ring.ndata["x"], ring.ndata["y"], ring.train_idx = graph.ndata["x"], graph.ndata["y"], graph.train_idx
    parts = joestar.partition(ring, PARTS, passes=2)
    losses, whole = undisturbed(ring, parts, 2, 3, ahead=3)
    plan = PartitionPlanner.plan

    def tight(self):
        found = plan(self)
        found.plan.hot, found.plan.hot_ids, found.plan.cold = 8, found.plan.hot_ids[:8], 30
        return found

    monkeypatch.setattr(PartitionPlanner, "plan", tight)
    ours, step = undisturbed(ring, parts, 2, 3, ahead=3)
    assert ours == losses and step.traffic.cut > 0 and not whole.traffic.cut
    same(step, whole)


def test_one_part_is_training_on_the_whole_graph(graph):
    """No halo: the very bits of a single stage."""
    stage = joestar.Partitions(joestar.partition(graph, 1), 1)
    ours, plain = compiled(graph, stage, dropping(), (3, 3, 3)), None
    model = dropping()
    sampler = joestar.NeighborSampler(graph, [3, 3, 3], seed=3)
    plain = joestar.compile(
        model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.2), backend="eager", warm_up=3
    )
    for _ in range(2):
        ours_losses, losses = (torch.stack(list(step.epoch(graph.train_idx, BATCH))) for step in (ours, plain))
        assert torch.equal(ours_losses, losses)
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
    assert [row.pulled for row in ours.report().feeding.history] == [0, 0]


def test_a_model_that_is_not_trained_over_partitions_has_the_same_graph(graph, texts):
    """``historical`` leaves nothing behind."""
    texts = []
    for op in (historical, lambda h, block: h):
        model = model_of()
        sampler = joestar.NeighborSampler(graph, [3, 3, 3])
        with pytest.MonkeyPatch.context() as patch, cheaper(real):
            patch.setattr("joestar.nn.models.historical", op)
            step = joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
                                   backend="eager", warm_up=2)  # fmt: skip
            step(graph.train_idx[:5])
        texts.append(step.report().programs[0].graph_after)
    assert texts[0] == texts[1]


class _Late:
    """In the place of the arena's lock: a thread of an epoch that was left still has it, and writes before it ends."""

    def __init__(self, write):
        self.write, self.lock = write, threading.Lock()

    def __enter__(self):
        self.end()
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()

    def end(self):
        """It writes, and is gone."""
        write, self.write = self.write, lambda: None
        write()


@pytest.mark.parametrize("how", ["load_state_dict", "restart"])
def test_rows_are_taken_over_and_forgotten_behind_a_thread_that_is_late(graph, parts, how):
    step = compiled(graph, stage_of(parts))
    list(step.epoch(graph.train_idx, BATCH))
    state, store = copy.deepcopy(step.state_dict()), step.exchange.store
    node = store.has_row(0, torch.arange(NODES)).nonzero().flatten()[:1]
    row = torch.full((1, store.tables[0].shape[1]), 7.0)
    _, before = store.peek(0, node)
    late = step.arena.loading = _Late(lambda: store.push(0, node, row, 99))
    step.load_state_dict(state) if how == "load_state_dict" else step.restart()
    late.end()
    _, (stamp,) = store.peek(0, node)
    assert stamp.item() == (before.item() if how == "load_state_dict" else -1)


def test_what_a_stage_raises_ends_the_epoch_with_it(graph, parts, monkeypatch):
    step = compiled(graph, stage_of(parts))
    epoch = step.epoch(graph.train_idx, BATCH)
    next(epoch)

    def failing(*args):
        raise RuntimeError("out of milk")

    with monkeypatch.context() as patch:
        patch.setattr(step.exchange.store, "pull", failing)
        with pytest.raises(StageError, match="out of milk"):
            list(itertools.chain(epoch, step.epoch(graph.train_idx, BATCH)))
    assert len(list(step.epoch(graph.train_idx, BATCH)))


@pytest.mark.slow
def test_compiled_by_inductor(graph, parts, expected):
    step = compiled(graph, stage_of(parts), dropping(), fanouts=(3, 3, 3), backend="inductor")
    losses, taken = [], []
    run(step, graph, 3, losses, taken)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert step.counters.padded_steps > 0


def test_any_group_of_parts_has_room(monkeypatch):
    """Where one group of an epoch is looked at, and others are larger: without sampling ahead a cut does not help."""
    monkeypatch.setattr("joestar.staged.partition_planning.SMALL", 1)
    made = torch.Generator().manual_seed(5)
    edges = torch.rand(2, 8_000, generator=made) ** torch.tensor([[1.0], [4.0]])
    graph = joestar.Graph.from_edge_index((edges * NODES).long(), NODES)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(NODES, 6, dtype=torch.float64), torch.randint(0, 4, (NODES,))
    graph.train_idx = torch.arange(0, NODES, 2)
    parts = joestar.partition(graph, 12, passes=1)
    step, stage = compiled(graph, stage_of(parts), fanouts=(1, 1, 1)), stage_of(parts).prepare(graph)
    hot, exchange = set(step.arena.hot_ids.tolist()), step.exchange
    for pair in itertools.combinations(range(12), 2):
        macro = stage.of(torch.tensor(pair), graph.train_idx[:0].to(graph.indices.dtype), (0, 0, 0))
        assert macro.num_edges <= step.arena.edges and len(set(macro.ids.tolist()) - hot) <= step.arena.pool, pair
        assert exchange.fits(macro), pair
    for epoch in range(3):
        assert len(list(step.epoch(graph.train_idx, BATCH))) > 0, epoch
