"""What one may do inside ``for loss in step.epoch(...)``: anything. Compared with the same loop in plain PyTorch."""

import contextlib
import itertools

import pytest
import torch

import joestar
from joestar.ops import hashing
from joestar.runtime.prediction import PREDICTED
from joestar.runtime.seeds import SHUFFLE_SITE, shuffled
from tests.runtime.common import CLASSES, FEATURES, NODES, make_step, planted_graph, tight_bounds, train
from tests.runtime.plain import PlainLoop

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)
PLAIN = {"model_options": {"dropout": 0.0, "norm": "batch_norm"}}


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def pair(optimizer=adam, execution="padded", **options):
    """A compiled step and a plain loop that begin alike."""
    options = {**PLAIN, **options}
    step = make_step(execution, optimizer=optimizer, **options)
    net = joestar.nn.GraphSAGE(FEATURES, 16, **{"num_layers": 2, "out_channels": CLASSES, **options["model_options"]})
    net = net.double()
    net.load_state_dict(step.model.state_dict())
    return step, PlainLoop(net, joestar.NeighborSampler(step.graph, [5, 3]), optimizer(net.parameters()))


def same(step, plain) -> None:
    """The same parameters, buffers and moments."""
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(step.model.state_dict()[name], value, rtol=1e-8, atol=1e-8, msg=name)
    own = step._runner.optimizer.optimizer
    for mine, other in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        for name, value in plain.optimizer.state[other].items():
            if value is not None:
                torch.testing.assert_close(own.state[mine][name].double(), value.double(), rtol=1e-8, atol=1e-8)


def test_evaluation_and_prediction_leave_the_epoch_alone(monkeypatch):
    tight_bounds(monkeypatch, 1.0)  # some batches overflow, in training and in prediction
    step, plain = pair(patience=1000)
    ours = []
    for position, loss in enumerate(step.epoch(IDX, 100)):
        ours.append(loss.item())
        if position % 2:
            assert 0 <= step.evaluate(VAL, 50)["accuracy"] <= 1
            assert step.predict(VAL[:7]).shape == (7, CLASSES)
    assert ours == pytest.approx(list(plain.epoch(IDX, 100)), rel=1e-9) and len(ours) == 8
    assert step.counters.fallbacks > 1
    same(step, plain)


def test_single_steps_and_a_second_epoch_run_beside():
    """Batches of another size, other numbers of seeds: every run keeps its own place."""
    step, plain = pair()

    def loop(one, first, second, call):
        found = []
        for a, b in zip(first, itertools.chain(second, itertools.repeat(0.0)), strict=False):
            found += [float(a), float(b)]
            if len(found) in (4, 11):
                found.append(float(call(torch.arange(300, 340))))
        return found

    ours = loop(step, step.epoch(IDX, 100), step.epoch(VAL, 64), step)
    theirs = loop(plain, plain.epoch(IDX, 100), plain.epoch(VAL, 64), plain.call)
    assert len(ours) == 18 and ours == pytest.approx(theirs, rel=1e-9)
    same(step, plain)


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_state_between_two_losses_is_that_after_the_step(execution):
    step, plain = pair(execution=execution)
    for _, _ in zip(step.epoch(IDX, 200), plain.epoch(IDX, 200), strict=True):
        same(step, plain)


def test_loading_model_and_optimizer_in_the_middle():
    """A roll-back on a loss spike."""
    step, plain = pair()
    for one, epoch in ((step, step.epoch(IDX, 100)), (plain, plain.epoch(IDX, 100))):
        own = step._runner.optimizer.optimizer if one is step else plain.optimizer
        for position, _ in enumerate(epoch):
            if position == 2:
                kept = {k: v.clone() for k, v in one.model.state_dict().items()}
                moments = torch.utils._pytree.tree_map(
                    lambda v: v.clone() if isinstance(v, torch.Tensor) else v, own.state_dict()
                )
            if position == 5:
                one.model.load_state_dict(kept)
                own.load_state_dict(moments)
    same(step, plain)


def test_leaving_raising_and_going_on():
    step, plain = pair()
    for position, _ in enumerate(step.epoch(IDX, 100)):
        if position == 2:
            break
    with contextlib.suppress(ZeroDivisionError):
        for loss in step.epoch(IDX, 100):
            loss / (1 // 0)
    epoch = step.epoch(IDX, 100)
    ours = [next(epoch).item(), next(epoch).item()]
    assert (len(epoch), epoch.position, epoch.steps) == (6, 2, 8)
    ours += [loss.item() for loss in epoch]
    for steps in (3, 1):
        list(itertools.islice(plain.epoch(IDX, 100), steps))
    assert ours == pytest.approx(list(plain.epoch(IDX, 100)), rel=1e-9)
    assert step.epochs_done == 3


def test_an_epoch_that_nobody_iterates_does_not_count():
    step = make_step()
    step.epoch(IDX, 100)
    assert step.epochs_done == 0 and train(step, IDX, epochs=1) == train(make_step(), IDX, epochs=1)


def test_an_error_in_the_middle_of_a_step_loses_nothing(monkeypatch):
    step, plain = pair()
    epoch, losses = step.epoch(IDX, 100), []
    program = step._runner.executor.program
    losses.append(next(epoch).item())
    run = program.step
    monkeypatch.setattr(program, "step", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    monkeypatch.setattr(program, "step", run)
    losses += [loss.item() for loss in epoch]
    assert losses == pytest.approx(list(plain.epoch(IDX, 100)), rel=1e-9)
    same(step, plain)


def test_a_stop_iteration_within_a_step_does_not_end_the_epoch(monkeypatch):
    step = make_step()
    monkeypatch.setattr(step._runner.executor, "prepare", lambda *_: next(iter(())))
    with pytest.raises(RuntimeError, match="raised StopIteration within a step"):
        list(step.epoch(IDX, 100))


def test_length_is_what_is_left():
    step = make_step()
    epoch = step.epoch(IDX, 100)
    assert len(epoch) == 8 == len(list(epoch)) and len(epoch) == 0
    assert len(step.epoch(IDX[:5], 100)) == 1


def test_losses_are_final_and_add_up_whatever_overflows(monkeypatch):
    tight_bounds(monkeypatch, 0.97)
    step, plain = pair(patience=1000)
    total, seen = torch.zeros((), dtype=torch.float64), []
    for loss in step.epoch(IDX, 100):
        assert bool(torch.isfinite(loss))
        total += loss
        seen.append((loss, loss.item()))
    assert total.item() == pytest.approx(sum(plain.epoch(IDX, 100)), rel=1e-9)
    list(step.epoch(IDX, 100))
    assert all(loss.item() == value for loss, value in seen), "a loss that was handed out changed"
    assert step.counters.fallbacks > 2 and seen[0][0].dtype == torch.float64


SCHEDULED = {
    "adam": adam,
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("optimizer", SCHEDULED.values(), ids=SCHEDULED.keys())
def test_one_cycle_per_step(optimizer):
    """Learning rate and momentum change in every step, weight decay by assignment."""
    step, plain = pair(optimizer)
    for one, run in ((step, step.epoch), (plain, plain.epoch)):
        own = step._runner.optimizer.optimizer if one is step else plain.optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(own, 0.1, total_steps=16)
        for _ in range(2):
            for position, _ in enumerate(run(IDX, 100)):
                scheduler.step()
                own.param_groups[0]["weight_decay"] = 0.01 * position
    same(step, plain)


def test_hooks_of_the_optimizer_run_once_per_step(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    step = make_step(patience=1000)
    called = []
    step._runner.optimizer.optimizer.register_step_post_hook(lambda *_: called.append(1))
    train(step, IDX, epochs=1)
    assert len(called) == 8 and step.counters.fallbacks > 0


def test_the_optimizers_state_is_that_of_one_that_nobody_took_over():
    """It loads into a plain optimizer, and a plain one's loads here, again and again."""
    step, plain = pair(lambda p: torch.optim.Adam(p, 1e-2, foreach=False))
    own = step._runner.optimizer.optimizer
    train(step, IDX, epochs=1)
    list(plain.epoch(IDX, 100))
    ours, theirs = own.state_dict(), plain.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    plain.optimizer.load_state_dict(ours)
    own.load_state_dict(theirs)
    assert own.param_groups[0]["fused"] and not plain.optimizer.param_groups[0]["fused"]
    ours, theirs = train(step, IDX, epochs=1), list(plain.epoch(IDX, 100))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_default_batches_of_predictions_are_always_the_same():
    step = make_step()
    train(step, IDX, epochs=1)
    first, everyone = step.predict(VAL), torch.arange(NODES)
    step.evaluate(VAL, 17)
    step.evaluate(VAL, 333)
    assert torch.equal(step.predict(VAL), first)
    several = step.predict(everyone)
    step.predict(everyone, NODES)  # as one batch, which samples otherwise
    for again in (step.predict(everyone), step.predict(everyone, PREDICTED)):
        torch.testing.assert_close(again, several, rtol=1e-12, atol=1e-12)


# --- bounds ---


def ascending(nodes=220):
    """Ids ascending by degree: nodes below 20 have one neighbour, those up to 40 see everyone; a chain of sets."""
    pairs = [(200, v) for v in range(20)] + [(v, 200) for v in range(nodes)]
    pairs += [(u, v) for v in range(20, 40) for u in range(nodes)]
    data = {"x": torch.randn(nodes, FEATURES, dtype=torch.float64), "y": torch.randint(0, CLASSES, (nodes,))}
    return joestar.Graph.from_edge_index(torch.tensor(pairs).T, nodes, data)


@pytest.mark.parametrize("layers", [2, 3])
def test_widened_bounds_stay_nested(layers):
    torch.manual_seed(0)
    graph = ascending()
    options = {"graph": graph, "fanouts": [-1] * layers, "slack": 0.5, "patience": 1}
    options["model_options"] = {"dropout": 0.0, "num_layers": layers}
    step, exact = make_step(**options), make_step("exact", **options)
    for idx in (torch.arange(20), torch.arange(20, 40)):
        ours, theirs = ([float(v) for v in list(s.epoch(idx, 5, shuffle=False))] for s in (step, exact))
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert step.counters.recompiles >= 1


@pytest.mark.parametrize("use", ["predict", "batches of 4", "rows"])
def test_a_prediction_for_few_nodes_sorts_none(monkeypatch, use):
    """Bounds need nodes from all over the graph; to sort the hashes of all of them took minutes on a large one."""
    graph, few = planted_graph(dtype=torch.float64, nodes=6000), torch.tensor([3, 5, 7, 9])
    step = make_step(graph=graph)
    if use == "rows":
        step = joestar.compile(step.model, step.sampler, backend="eager")
    sorted_ = []
    original = torch.argsort
    monkeypatch.setattr(torch, "argsort", lambda x, **kw: sorted_.append(x.numel()) or original(x, **kw))
    options = {"batch_size": 4} if use == "batches of 4" else {}
    rows = step(few) if use == "rows" else step.predict(few, **options)
    assert rows.shape == (4, CLASSES)
    assert max(sorted_, default=0) < 6000


def test_shuffles_are_those_of_the_hash():
    """Keys made on the host and in one kernel are those of the tensors."""
    for seed, epoch in ((0, 0), (7, 3), (2**40 + 5, -4)):
        state = hashing.key_state(torch.tensor([seed, epoch, 0]), SHUFFLE_SITE)
        assert hashing.host_key_state(seed, epoch, 0, SHUFFLE_SITE) == tuple(map(int, state))
        a, b = hashing.row_state(state, torch.arange(50))
        assert torch.equal(shuffled(torch.arange(50), seed, epoch), torch.argsort(((a >> 1) << 31) | (b >> 1)))
