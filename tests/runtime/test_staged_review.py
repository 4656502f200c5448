"""Steps over macro-batches where they could go wrong without a word."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from stages.pressed import pressed

import joestar
from joestar.errors import ChangedAfterCompileError, JoestarError
from joestar.locks import TRACING
from joestar.runtime.program import Program
from joestar.stages import LargeBatch
from joestar.stages.pipeline import _State
from tests.runtime.staged_plans import BATCH, EDGES, NODES, Whole, plans

LOST = 5.0
"""Seconds until a thread counts as one that waits for ever."""
pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture
def graph():
    torch.manual_seed(0)
    src = (torch.rand(EDGES) ** 2 * NODES).long()
    made = joestar.Graph.from_edge_index(torch.stack([src, torch.randint(0, NODES, (EDGES,))]), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    made.train_idx = torch.randperm(NODES)[:150]
    return made


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    return plans(monkeypatch)


class Scaled(torch.nn.Module):
    """What it does to features first can be done to all of them at once."""

    def __init__(self):
        super().__init__()
        self.net = joestar.nn.GraphSAGE(8, 6, 2, 4)

    def forward(self, blocks, x):
        return self.net(blocks, torch.tanh(F.normalize(x * 2 + 1)))


def compiled(graph, staged, net=None, sampler=None, loss=F.cross_entropy, **options):
    torch.manual_seed(1)
    net = net() if net else joestar.nn.GraphSAGE(8, 6, 2, 4)
    sampler = sampler() if sampler else joestar.NeighborSampler(graph, [3, 3], seed=5)
    given = (loss, torch.optim.Adam(net.parameters(), 0.01)) if loss else ()
    stage = {"memory": "1GiB"} if staged else {}
    step = joestar.compile(net, sampler, *given, backend="eager", warm_up=4, **stage, **options)
    if staged:
        step.first_stage = Whole(step.first_stage.num_seeds)
    return step


def both(graph, **given):
    return [compiled(graph, staged, **given) for staged in (True, False)]


def test_what_is_computed_of_all_features_at_once_follows_the_macro_batches(graph):
    ours, plain = both(graph, net=Scaled)
    for _ in range(2):
        assert [x.item() for x in ours.epoch(graph.train_idx, BATCH)] == [
            x.item() for x in plain.epoch(graph.train_idx, BATCH)
        ]
        assert ours(graph.train_idx[:9]).item() == plain(graph.train_idx[:9]).item()
        assert torch.equal(ours.predict(graph.train_idx, 20), plain.predict(graph.train_idx, 20))
    ours, plain = both(graph, net=Scaled, loss=None)
    for part in graph.train_idx.split(20):
        assert torch.equal(ours(part), plain(part))


@pytest.mark.parametrize("kind", [joestar.nn.GraphSAGE, joestar.nn.GAT])
def test_backward_after_another_load_is_right_or_refused(graph, kind):
    ours, plain = both(graph, net=lambda: kind(8, 6, 2, 4), loss=None)
    seeds = graph.train_idx[:20]
    outputs = [step(seeds).square().sum() for step in (ours, plain)]
    ours(graph.train_idx[20:40])
    outputs[1].backward()
    try:
        outputs[0].backward()
    except RuntimeError:  # "modified by an inplace operation"
        return
    for a, b in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_step_dropped_in_the_middle_of_an_epoch_is_freed(graph):
    before = set(threading.enumerate())
    step = compiled(graph, True)
    epoch = step.epoch(graph.train_idx, BATCH)
    next(epoch)
    own = set(threading.enumerate()) - before
    assert own
    del epoch, step
    gc.collect()
    for thread in own:
        thread.join(60)
    assert not any(thread.is_alive() for thread in own)


def test_written_features_are_noticed(graph):
    step = compiled(graph, True)
    list(step.epoch(graph.train_idx, BATCH))
    graph.ndata["x"].mul_(2)
    with pytest.raises(ChangedAfterCompileError, match=r"'x'.*was written to after compile"):
        step.predict(graph.train_idx, 20)


def test_features_written_between_two_steps_are_noticed_before_the_next(graph):
    epoch = compiled(graph, True).epoch(graph.train_idx, BATCH)
    next(epoch)
    graph.ndata["x"].mul_(2)
    with pytest.raises(ChangedAfterCompileError, match=r"'x'.*was written to after compile"):
        next(epoch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(y=(data["y"] + 1) % 3), "'y'.* was replaced by another tensor after compile"),
        (lambda data: data.update(x=data["x"].clone()), "'x'.* was replaced by another tensor after compile"),
        (lambda data: data.update(x=data["x"][:, :3]), "'x'.* was replaced by another tensor after compile"),
        (lambda data: data.pop("x"), "'x'.* was removed after compile"),
    ],
)
def test_other_tensors_in_place_of_a_graphs_are_named_so(change, message, graph):
    """They were said to be written to through NumPy; one with the same values, or fewer columns, was another error."""
    step = compiled(graph, True)
    list(step.epoch(graph.train_idx, BATCH))
    change(graph.ndata)
    for use in (lambda: next(step.epoch(graph.train_idx, BATCH)), lambda: step.predict(graph.train_idx, 20)):
        with pytest.raises(ChangedAfterCompileError, match=message):
            use()


class Gate(torch.nn.Module):
    """A learned number per node, looked up by node id."""

    def __init__(self):
        super().__init__()
        self.net, self.table = joestar.nn.GraphSAGE(8, 6, 2, 4), torch.nn.Embedding(NODES, 8)

    def forward(self, blocks, x):
        return self.net(blocks, x + self.table(blocks[0].srcs))


class Tabled:
    """Weights of edges from a table of its own."""

    def __init__(self, graph, table):
        self.graph, self.table = graph, table

    def sample(self, graph, seeds):
        blocks = []
        for _ in range(2):
            block = graph[:, seeds].individual_sample(3, edge_probs=self.table)
            blocks, seeds = [block, *blocks], block.srcs
        return blocks


def _refused_or_equal(graph, **given):
    plain = compiled(graph, False, **given)
    expected = [x.item() for x in plain.epoch(graph.train_idx, BATCH)]
    try:
        found = [x.item() for x in compiled(graph, True, **given).epoch(graph.train_idx, BATCH)]
    except (JoestarError, IndexError, RuntimeError) as error:
        return str(error)
    assert found == expected
    return ""


def test_tables_of_the_models_own(graph, planned):
    planned(cold=130)
    assert not _refused_or_equal(graph, net=Gate)


def test_tables_of_the_samplers_own(graph):
    table = torch.rand(graph.num_edges)
    assert _refused_or_equal(graph, sampler=lambda: joestar.NeighborSampler(graph, [3, 3], probs=table))
    assert _refused_or_equal(graph, sampler=lambda: Tabled(graph, table))
    nodes = torch.rand(graph.num_nodes)
    assert _refused_or_equal(graph, sampler=lambda: joestar.LayerDependentSampler(graph, [40, 40], node_probs=nodes))


def test_embeddings_of_nodes(graph):
    del graph.ndata["x"]

    def net():
        return joestar.nn.NodeEmbedding(NODES, 8, joestar.nn.GraphSAGE(8, 6, 2, 4))

    assert not _refused_or_equal(graph, net=net)


def test_graphs_with_ids(graph):
    graph.ids = torch.arange(NODES).flip(0).int() + 7
    assert not _refused_or_equal(graph)
    graph.ids, graph.whole_degrees = None, torch.full((NODES,), 9)
    assert not _refused_or_equal(graph)


def by_ids(outputs, y, seeds):
    return (F.cross_entropy(outputs, y, reduction="none") * (seeds % 7)).mean()


def shifted(outputs, y):
    return F.cross_entropy(outputs, y - 1)


def test_losses_that_get_ids(graph):
    assert not _refused_or_equal(graph, loss=by_ids)


def test_labels_that_a_loss_computes_are_checked(graph):
    graph.ndata["y"] += 1
    graph.ndata["y"][graph.train_idx[-1]] = 9
    for staged in (False, True):
        with pytest.raises(JoestarError, match="label 8"):
            list(compiled(graph, staged, loss=shifted).epoch(graph.train_idx, BATCH, shuffle=False))


def test_an_interrupt_between_a_swap_and_its_step(graph):
    ours, plain = both(graph)
    epochs = [step.epoch(graph.train_idx, BATCH) for step in (ours, plain)]
    for _ in range(4):
        assert next(epochs[0]).item() == next(epochs[1]).item()
    show = ours.arena.show

    def interrupted(loaded):
        show(loaded)
        raise KeyboardInterrupt

    ours.arena.show = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(epochs[0])
    ours.arena.show = show
    assert [x.item() for x in epochs[0]] == [x.item() for x in epochs[1]]


@pytest.mark.parametrize("at", ["enter", "leave"])
def test_an_interrupt_in_a_swaps_locks(graph, at, monkeypatch):
    """The gate's lock was lost, and the threads that load waited for it, the main thread for them."""
    ours, plain = both(graph)
    monkeypatch.setattr(_State, "join", lambda self, seconds=LOST, wait=_State.join: wait(self, seconds))
    epochs = [step.epoch(graph.train_idx, BATCH) for step in (ours, plain)]
    losses = [[next(epoch).item()] for epoch in epochs]
    threads = ours.arena.holder()._pipeline._state.threads
    with pytest.raises(KeyboardInterrupt), pressed("leave", at):
        losses[0].extend(loss.item() for loss in epochs[0])
    for found, epoch in zip(losses, epochs, strict=True):
        found.extend(loss.item() for loss in epoch)
    assert losses[0] == losses[1] and not any(thread.is_alive() for thread in threads)


def test_float64_and_strided_features(graph):
    graph.ndata["x"] = torch.randn(8, NODES).t()
    assert not _refused_or_equal(graph)
    graph.ndata["x"] = torch.randn(NODES, 8, dtype=torch.float64)
    assert not _refused_or_equal(graph, net=lambda: joestar.nn.GraphSAGE(8, 6, 2, 4).double())


def test_first_stages_of_ones_own_are_used(graph):
    step = compiled(graph, True, first_stage=Whole(64))
    assert isinstance(step.first_stage, Whole)


def test_samplers_do_not_run_while_a_program_is_traced(graph, monkeypatch):
    """``torch.compiler.is_compiling()`` would be true in their thread, too, and their Python take other ways."""
    tracing, second, trace = [False], threading.Event(), Program.trace

    def told(self, seeds, key):
        with TRACING:
            tracing[0] = True
            second.wait(0.2)
            trace(self, seeds, key)
            tracing[0] = False

    class Told(Whole):
        def sample(self, graph, sampler, seeds, key):
            said.append(tracing[0])
            if len(said) > 1:
                second.set()
            return super().sample(graph, sampler, seeds, key)

    said = []
    monkeypatch.setattr(Program, "trace", told)
    step = compiled(graph, True, execution="exact")  # no bounds: the epoch's own first macro-batch is traced on
    step.first_stage = Told(48)
    list(step.epoch(graph.train_idx, BATCH))
    assert said == [False] * 4


def test_macro_batches_are_as_large_as_before_after_a_resume(graph, planned):
    """A plan depends on measured speeds and free memory: it may be another one next time."""
    one = compiled(graph, True)
    one.first_stage = LargeBatch(48)
    epoch = one.epoch(graph.train_idx, BATCH)
    for _ in range(2):
        next(epoch)
    state = copy.deepcopy(one.state_dict())
    planned(seeds=96)
    other = compiled(graph, True)
    other.first_stage = LargeBatch(96)
    other.load_state_dict(state)
    assert [x.item() for x in other.epoch(graph.train_idx, BATCH)] == [x.item() for x in epoch]


class ByDegree(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = joestar.nn.GraphSAGE(8, 6, 2, 4)

    def forward(self, blocks, x):
        degrees = blocks[0].graph.in_degrees()[blocks[0].srcs]
        return self.net(blocks, x * torch.rsqrt(1.0 + degrees)[:, None])


def test_degrees_are_those_in_the_whole_graph(graph):
    assert not _refused_or_equal(graph, net=ByDegree)


def test_degrees_of_the_whole_graph_go_with_a_part_to_another_device(graph):
    graph.whole_degrees = torch.full((NODES,), 9)
    assert graph.to("meta").whole_degrees.device.type == "meta"
