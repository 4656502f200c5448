"""Bounds over partitions are of several groups of parts, which differ; nothing else comes of the look."""

import copy

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.partitioning.partitioning import Partitioning, fingerprint_of
from joestar.staged import partitioned
from tests.runtime.partitioned import BATCH, PARTS, compiled, drawn_graph, model_of, run, stage_of

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SPARSE, DENSE, PART = 4, 4, 120


@pytest.fixture(scope="module")
def two_kinds():
    """(graph, partitioning): nodes of the first parts have one neighbour, of the others a dozen, all of their part."""
    made = torch.Generator().manual_seed(2)
    nodes = (SPARSE + DENSE) * PART
    degrees = torch.ones(nodes, dtype=torch.long)
    degrees[SPARSE * PART :] = 12
    ends = torch.repeat_interleave(torch.arange(nodes), degrees)
    starts = ends // PART * PART + torch.randint(PART, ends.shape, generator=made)
    graph = joestar.Graph.from_edge_index(torch.stack([starts, ends]), nodes)
    graph.ndata["x"] = torch.randn(nodes, 6, dtype=torch.float64, generator=made)
    graph.ndata["y"] = torch.randint(0, 4, (nodes,), generator=made)
    graph.train_idx = torch.arange(0, nodes, 2)
    assignment = (torch.arange(nodes) // PART).to(torch.int32)
    return graph, Partitioning(assignment, SPARSE + DENSE, 0, fingerprint_of(graph))


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_groups_that_differ_have_room(two_kinds, first):
    """Whichever comes first: bounds were of its batches alone, so that all batches of the others outgrew them."""
    graph, parts = two_kinds
    stage = joestar.Partitions(parts, 1)
    made = stage.prepare(graph)
    seed = next(s for s in range(99) if (int(made.groups(s, 0)[0]) < SPARSE) == (first == "sparse"))
    model = model_of()
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [4, 4, 4], seed=seed), F.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.1), first_stage=stage, backend="eager", memory="64MiB", batch_size=BATCH,
    )  # fmt: skip
    losses, taken = [], []
    run(step, graph, 1, losses, taken)
    assert step.counters.padded_steps == len(losses) and not step.counters.overflows
    assert sorted(v for seeds in taken[0] for v in seeds) == graph.train_idx.tolist()
    assert step.traffic.macro_batches == SPARSE + DENSE and not step.traffic.again and not step.traffic.cut


@pytest.mark.parametrize("options", [{}, {"max_age": 2}, {"ahead": [3, 3, 3]}])
@pytest.mark.every(9)
def test_a_look_leaves_nothing_behind(monkeypatch, options):
    """Losses, weights, rows and counts are those of a step that does not look; of a new one and of one that forgot."""
    graph = drawn_graph()
    parts = joestar.partition(graph, PARTS, passes=2)
    looked, look = [], partitioned.StagedStep._look_around
    found, looks = [], [True]

    def noted(step, executor, feed, *given, **how):
        looked.append(how)
        if looks[0]:
            look(step, executor, feed, *given, **how)

    monkeypatch.setattr(partitioned.StagedStep, "_look_around", noted)
    for looks[0] in (True, False):
        step = compiled(graph, stage_of(parts, **options), fanouts=(3, 3, 3), slack=0.5)
        losses = []
        run(step, graph, 2, losses, [])
        state = copy.deepcopy(step.state_dict())
        step.restart()
        run(step, graph, 1, losses, [])
        record = step.report().feeding.history
        found.append((losses, [(row.pulled, row.missing, row.too_old, row.mean_age) for row in record], state))
    assert [how for how in looked if how] == [{"alike": False}] * 2, "before the first step, once"
    (losses, counts, state), (plain_losses, plain_counts, plain_state) = found
    assert losses == plain_losses and counts == plain_counts
    for name in ("latest", "epoch", "base"):
        assert state["history"][name] == plain_state["history"][name]
    rows, plain_rows = (each["history"]["tables"] for each in (state, plain_state))
    assert rows.keys() == plain_rows.keys()
    assert rows.pop("rows") == plain_rows.pop("rows")
    torch.testing.assert_close(rows, plain_rows, rtol=0, atol=0)


def test_a_look_that_is_broken_off_leaves_nothing_behind(two_kinds, monkeypatch):
    """The same epoch, asked once more, begins as if nothing had been."""
    graph, parts = two_kinds
    expected = []
    run(compiled(graph, joestar.Partitions(parts, 1), fanouts=(4, 4, 4)), graph, 1, expected, [])
    step = compiled(graph, joestar.Partitions(parts, 1), fanouts=(4, 4, 4))
    executor = step._runner.executor
    look, turns = executor.look, iter([0, 1])

    def broken(*given):
        if next(turns, None) == 1:
            raise KeyboardInterrupt
        return look(*given)

    monkeypatch.setattr(executor, "look", broken)
    epoch = step.epoch(graph.train_idx, BATCH)
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    assert step.exchange.is_new and not step.exchange.store.pushed_rows(0)
    assert [loss.item() for loss in epoch] == expected
