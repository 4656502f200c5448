"""Inside ``for loss in step.epoch(...)`` on a GPU, where a step is one CUDA graph that reports while it runs."""

import itertools
import threading

import pytest
import torch
from runtime.common import tight_bounds

from joestar.errors import JoestarWarning, OptimizerError
from joestar.runtime import recorded

from .test_step_graph import BATCH, make, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]


def small(**options):
    return make(backend="eager", **options)


def test_everything_inside_an_epoch(monkeypatch):
    """Evaluation, single steps, a second epoch of another batch size: as exact execution, and one capture."""

    def loop(step):
        idx, found = step.graph.train_idx, []
        beside = itertools.chain(step.epoch(idx[:400], 64), itertools.repeat(torch.zeros(())))
        for position, (loss, other) in enumerate(zip(step.epoch(idx, BATCH), beside, strict=False)):
            found += [loss.item(), other.item()]
            if position % 3 == 0:
                found.append(step(idx[:50]).item())
            if position % 4 == 0:
                step.evaluate(idx[:300], 100)
        return found

    graphed, exact = small(), small(execution="exact")
    assert loop(graphed) == pytest.approx(loop(exact), rel=2e-3)
    assert graphed.counters.captures == 2, "the step, and predictions"
    assert graphed.counters.recompiles == 0


def test_losses_add_up_on_the_device_whatever_overflows(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    step, exact = small(patience=1000), small(execution="exact")
    total = torch.zeros((), device="cuda")
    for loss in step.epoch(step.graph.train_idx, BATCH):
        total += loss  # nothing waits here
    expected = sum(loss.item() for loss in list(exact.epoch(exact.graph.train_idx, BATCH)))
    assert step.counters.fallbacks > 2 and total.item() == pytest.approx(expected, rel=2e-3)


def test_state_is_that_after_the_step(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    step, exact = small(patience=1000), small(execution="exact")
    both = zip(step.epoch(step.graph.train_idx, BATCH), exact.epoch(step.graph.train_idx, BATCH), strict=True)
    for position, _ in enumerate(both):
        for name, value in step.model.state_dict().items():
            torch.testing.assert_close(value, exact.model.state_dict()[name], rtol=1e-2, atol=1e-3, msg=name)
        if position == 5:
            break
    counts = {int(s["step"]) for s in step._runner.optimizer.optimizer.state.values()}
    assert counts == {6}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_one_cycle_captures_once(kind):
    make_optimizer = {"adam": lambda p: torch.optim.AdamW(p, 1e-3),
                      "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)}[kind]  # fmt: skip
    found = []
    for options in ({}, {"cuda_graph": False}, {"execution": "exact"}):
        step = small(optimizer=make_optimizer, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(step._runner.optimizer.optimizer, 0.01, total_steps=30)
        losses = []
        for _ in range(2):
            for loss in step.epoch(step.graph.train_idx, BATCH):
                losses.append(loss)
                scheduler.step()
        found.append([loss.item() for loss in losses])
        assert step.counters.captures == (not options)
    assert found[0] == pytest.approx(found[1], rel=2e-3) and found[0][:20] == pytest.approx(found[2][:20], rel=2e-3)


def test_loading_the_optimizer_in_the_middle_of_an_epoch():
    """New moments have new addresses: the next step must not write to the old ones."""
    step = small()
    epoch = step.epoch(step.graph.train_idx, BATCH)
    own = step._runner.optimizer.optimizer
    next(epoch)
    kept = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, own.state_dict())
    next(epoch)
    own.load_state_dict(kept)
    next(epoch)
    assert {int(state["step"]) for state in own.state.values()} == {2} and step.counters.captures == 2
    assert not own.state_dict()["param_groups"][0].get("fused")


def test_user_streams_and_threads():
    """Steps taken on two streams in turn happen in order; two steps in two threads do not disturb one another."""
    expected = train(small(), 1)
    step, streams, losses = small(), [torch.cuda.Stream(), torch.cuda.Stream()], []
    epoch = step.epoch(step.graph.train_idx, BATCH)
    for position in range(len(epoch)):
        with torch.cuda.stream(streams[position % 2]):
            losses.append(next(epoch))
    torch.cuda.synchronize()
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=2e-3)
    found, steps = {}, [small(), small()]
    for one in steps:
        next(one.epoch(one.graph.train_idx, BATCH))
    threads = [
        threading.Thread(target=lambda i=i, s=s: found.update({i: train(s, 2)[15:]})) for i, s in enumerate(steps)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == pytest.approx(found[1], rel=2e-3)


def test_a_capture_that_fails_leaves_the_step_usable(monkeypatch):
    step, graph = small(), recorded.StepGraph
    epoch = step.epoch(step.graph.train_idx, BATCH)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}

    def fails(run, device, memory=None):
        run()
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(recorded, "StepGraph", fails)
    with pytest.raises(torch.OutOfMemoryError):
        next(epoch)
    assert not bool(step._runner.state.flag)
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name])
    monkeypatch.setattr(recorded, "StepGraph", graph)
    losses = [loss.item() for loss in epoch]
    assert losses == pytest.approx(train(small(), 1), rel=2e-3) and step.counters.fallbacks == 0


def test_hooks_of_the_optimizer_are_refused():
    step = small()
    step._runner.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="hooks on step"):
        next(step.epoch(step.graph.train_idx, BATCH))


def test_hooks_on_gradients_may_come_and_go():
    """A captured step has those that were there: others are captured with it anew, also within an epoch."""

    def emptied(parameter):
        parameter.grad.zero_()

    def loop(step):
        weight = next(step.model.parameters())
        found, handle = [], None
        for position, loss in enumerate(step.epoch(step.graph.train_idx, BATCH)):
            found.append(loss.item())
            if position == 2:
                handle = weight.register_hook(lambda grad: grad * -3)
            if position == 5:
                handle.remove()
            if position == 7:
                weight.register_post_accumulate_grad_hook(emptied)
            if position > 8:
                found.append(float(weight.detach().double().sum()))
        return found

    graphed, exact = small(), small(execution="exact")
    with pytest.warns(JoestarWarning, match="only while it is recorded"):
        found = loop(graphed)
    assert found == pytest.approx(loop(exact), rel=2e-3)
    assert len(found) > 12 and graphed.counters.captures == 4


def test_seeds_of_any_number_share_the_graph():
    step, idx = make(), make().graph.train_idx
    list(step.epoch(idx, BATCH))
    list(step.epoch(idx[:130], 32))
    list(step.epoch(idx[:7], BATCH))
    assert step.counters.captures == 1 and step.counters.recompiles == 0
