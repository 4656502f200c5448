"""Padded training equals exact-only training, also when batches overflow in the middle."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from tests.runtime.common import CLASSES, make_step, planted_graph, states_agree, tight_bounds, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 730)  # the last batch is smaller


def _sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def _adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


@pytest.mark.parametrize("model", ["GraphSAGE", "GCN", "GAT", "GIN"])
def test_padded_equals_exact(model):
    padded, exact = make_step("padded", model=model), make_step("exact", model=model)
    assert train(padded, IDX) == pytest.approx(train(exact, IDX), rel=1e-10)
    states_agree(padded, exact, 1e-8)
    assert padded.counters.padded_steps == padded.counters.steps == 16
    assert exact.counters.exact_steps == 16


@pytest.mark.parametrize("optimizer", [None, _sgd, _adamw], ids=["adam", "sgd", "adamw"])
def test_overflows_are_redone_exactly(monkeypatch, optimizer):
    tight_bounds(monkeypatch, 1.0)
    options = {"norm": "batch_norm"} if optimizer is _sgd else {}
    make = {"optimizer": optimizer, "model_options": options}
    exact = make_step("exact", **make)
    losses = train(exact, IDX)
    padded = make_step("padded", patience=1000, **make)
    assert train(padded, IDX) == pytest.approx(losses, rel=1e-9)
    states_agree(padded, exact, 1e-7)
    counters = padded.counters
    assert counters.fallbacks > 2 and counters.padded_steps > 2 and counters.recompiles == 0
    assert counters.steps == 16 and counters.exact_steps == counters.fallbacks == counters.overflows


class _Diagonal(torch.nn.Module):
    """Aggregations and elementwise work alone: no matrix product, whose library sums in an order that sizes decide."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 2, 12, dtype=torch.float64))

    def forward(self, blocks, x):
        for block, reduce in zip(blocks, ("sum", "mean"), strict=True):
            x = F.elu(block.pull(joestar.fn.copy_u(x * self.scale), reduce) + x[: block.num_dst])
        return x[:, :CLASSES]


def test_deterministic_sums_agree_bit_for_bit(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    graph = planted_graph(dtype=torch.float64)

    def logits(execution):
        sampler = joestar.NeighborSampler(graph, [5, 3], seed=7)
        step = joestar.compile(_Diagonal(), sampler, execution=execution, backend="eager", patience=1000)
        return step.predict(IDX, 100), step.counters

    (padded, counters), (exact, _) = logits("padded"), logits("exact")
    assert torch.equal(padded, exact)
    assert 1 < counters.fallbacks < 8


def test_a_step_behind_the_raised_flag_changes_nothing():
    """What captures and the tuner rely on: parameters, moments, buffers and the cursor stay as they are."""
    step = make_step("padded", model_options={"norm": "batch_norm"})
    train(step, IDX, epochs=1)
    runner = step._runner
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    launch = runner.dry_run(IDX.int(), 100)
    for position in (0, 3):
        launch(position)
        assert bool(runner.state.flag) and int(runner.state.key[2]) == position
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_repeated_overflow_widens_the_bounds(monkeypatch):
    tight_bounds(monkeypatch, 0.9)
    padded, exact = make_step("padded", patience=2), make_step("exact")
    assert train(padded, IDX, epochs=3) == pytest.approx(train(exact, IDX, epochs=3), rel=1e-9)
    assert padded.counters.recompiles >= 1
    assert padded.counters.fallbacks < padded.counters.steps / 2


def test_inductor_matches_exact():
    graph = planted_graph()
    padded = make_step("padded", graph=graph, backend="inductor", model_options={"norm": "batch_norm"})
    exact = make_step("exact", graph=graph, model_options={"norm": "batch_norm"})
    assert train(padded, IDX) == pytest.approx(train(exact, IDX), rel=1e-4)


def test_passes_change_nothing():
    every = ("dce", "cse", "extract-select", "sample-gather-aggregate", "dce-after")
    plain, fused = make_step(disable_passes=every), make_step()
    assert train(plain, IDX) == pytest.approx(train(fused, IDX), rel=1e-12)


def test_same_seed_same_run_other_seed_other_run():
    losses = train(make_step(), IDX)
    assert train(make_step(), IDX) == losses
    step = make_step()
    step.restart(8)
    assert train(step, IDX) != losses


def test_restart_repeats_the_run():
    step = make_step()
    weights = {name: value.clone() for name, value in step.model.state_dict().items()}
    first = train(step, IDX)
    step.model.load_state_dict(weights)
    step.restart()
    assert train(step, IDX) == first
    assert step.counters.recompiles == 0


def test_size_recording_leaves_everything_bit_identical():
    step = make_step(model_options={"norm": "batch_norm"})
    random = torch.get_rng_state()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    executor = step._executor("train")
    executor.prepare(IDX.to(torch.int32), 100, step.seed, 0)
    assert step.counters.warm_up_batches > 0 and executor.program.run is not None
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not step._runner.optimizer.optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_callable_form_in_a_loop_of_ones_own(monkeypatch, training):
    tight_bounds(monkeypatch, 1.0)

    def run(execution):
        torch.manual_seed(0)
        graph = planted_graph(dtype=torch.float64)
        net = joestar.nn.GraphSAGE(12, 16, 2, out_channels=CLASSES, dropout=0.3, norm="batch_norm").double()
        net.train(training)
        compiled = joestar.compile(
            net, joestar.NeighborSampler(graph, [5, 3], seed=7), execution=execution, backend="eager", patience=1000
        )
        optimizer, losses = torch.optim.Adagrad(net.parameters(), 0.05), []
        for seeds in torch.arange(600).split(100):
            optimizer.zero_grad()
            logits = compiled(seeds)
            assert logits.shape == (seeds.numel(), CLASSES)
            loss = F.cross_entropy(logits, graph.ndata["y"][seeds])
            if training:
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses, compiled

    padded, compiled = run("padded")
    exact, _ = run("exact")
    assert padded == pytest.approx(exact, rel=1e-9)
    assert compiled.counters.fallbacks > 0


def test_predict_rows_are_in_order_and_sampled_alike():
    step = make_step(fanouts=[-1, -1])
    train(step, IDX, epochs=1)
    nodes = torch.tensor([5, 900, 5, 0, 1, 77])
    together = step.predict(nodes, batch_size=4)
    assert together.shape == (6, CLASSES) and torch.equal(together[0], together[2])
    for row, node in zip(together, nodes, strict=True):
        torch.testing.assert_close(step.predict(node.view(1))[0], row, rtol=1e-9, atol=1e-9)
