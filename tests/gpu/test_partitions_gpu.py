"""Training over partitions on a GPU: hidden rows exchanged within the captured step, loaded and kept beside it."""

import copy

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BATCH = 20


@pytest.fixture(scope="module")
def graph():
    return planted("tiny")


@pytest.fixture(scope="module")
def parts(graph):
    return joestar.partition(graph, 8, passes=3)


def compiled(graph, parts, device, kind="GraphSAGE", dtype=torch.float32, **options):
    torch.manual_seed(0)
    heads = {"heads": 2} if kind == "GAT" else {}
    model = getattr(joestar.nn, kind)(graph.ndata["x"].shape[1], 8, 3, graph.num_classes, dropout=0.3, **heads)
    model = model.to(device)
    sampler = joestar.NeighborSampler(graph, [4, 4, 4], seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    stage = joestar.Partitions(parts, min(2, parts.parts), ahead=3, dtype=dtype)
    given = {"memory": "2GiB", "batch_size": BATCH, "first_stage": stage, "warm_up": 4} | options
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, **given)


def losses_of(step, graph, epochs=3):
    return torch.stack([loss.cpu() for _ in range(epochs) for loss in step.epoch(graph.train_idx, BATCH)])


def tables_of(step):
    """The history behind all steps so far."""
    step.exchange.begin(10**6)
    step.exchange._apply(step.exchange.latest)
    return step.exchange.store


@pytest.mark.parametrize("kind", ["GraphSAGE", "GAT", "GCN"])
def test_training_is_that_on_a_cpu(graph, parts, kind):
    ours, theirs = (
        compiled(graph, parts, device, kind, **options)
        for device, options in (("cuda", {}), ("cpu", {"backend": "eager"}))
    )
    ours_losses, losses = losses_of(ours, graph), losses_of(theirs, graph)
    assert torch.allclose(ours_losses, losses, rtol=2e-3, atol=2e-3)
    own, other = tables_of(ours), tables_of(theirs)
    for layer in range(2):
        assert torch.equal(own.stamps[layer], other.stamps[layer])
        assert torch.allclose(own.tables[layer], other.tables[layer], rtol=2e-2, atol=2e-2)
    counts = [(row.pulled, row.missing, row.pushed) for row in ours.report().feeding.history]
    assert counts == [(row.pulled, row.missing, row.pushed) for row in theirs.report().feeding.history]
    assert ours.counters.captures >= 1 and ours.counters.padded_steps > 0


def test_steps_that_overflow_are_done_again(graph, parts):
    tight = compiled(graph, parts, "cuda", backend="eager", slack=0.0, warm_up=1)
    roomy = compiled(graph, parts, "cuda", backend="eager", slack=0.5)
    assert torch.allclose(losses_of(tight, graph), losses_of(roomy, graph), rtol=2e-3, atol=2e-3)
    assert tight.counters.overflows and not roomy.counters.overflows
    for a, b in zip(tables_of(tight).stamps, tables_of(roomy).stamps, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_happens_between_two_steps_changes_nothing_and_runs_go_on_elsewhere(graph, parts, dtype):
    options = {"backend": "eager", "deterministic": True, "dtype": dtype}
    plain, step = (compiled(graph, parts, "cuda", **options) for _ in range(2))
    expected, losses = losses_of(plain, graph), []
    for _ in range(3):
        epoch = step.epoch(graph.train_idx, BATCH)
        while len(epoch):
            losses.append(next(epoch).cpu())
            if len(losses) % 7 == 3:
                step.evaluate(graph.val_idx[:60])
            if len(losses) == 35:
                state = copy.deepcopy(step.state_dict())
                step = compiled(graph, parts, "cuda", **options)
                step.load_state_dict(state)
                epoch = step.epoch(graph.train_idx, BATCH)
    assert torch.equal(torch.stack(losses), expected)
    own, other = tables_of(step), tables_of(plain)
    for a, b in zip(own.tables + own.stamps, other.tables + other.stamps, strict=True):
        assert torch.equal(a, b)


def test_one_part_is_training_on_the_whole_graph(graph):
    stage = joestar.Partitions(joestar.partition(graph, 1), 1)
    ours = compiled(graph, stage.partitioning, "cuda", backend="eager", deterministic=True, first_stage=stage)
    there = planted("tiny").to("cuda")
    torch.manual_seed(0)
    model = joestar.nn.GraphSAGE(there.ndata["x"].shape[1], 8, 3, there.num_classes, dropout=0.3).to("cuda")
    plain = joestar.compile(
        model, joestar.NeighborSampler(there, [4, 4, 4], seed=1), F.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.05), backend="eager", deterministic=True, warm_up=4,
    )  # fmt: skip
    losses = torch.stack([loss.cpu() for _ in range(3) for loss in plain.epoch(there.train_idx, BATCH)])
    assert torch.allclose(losses_of(ours, graph), losses, rtol=1e-5, atol=1e-6)
