"""Going on from checkpoints with what was asked for then, and groups of batches that something came between."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import joestar
from joestar.errors import ChangedAfterCompileError, CheckpointError, JoestarWarning
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(2, 142), torch.arange(142, 200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = joestar.nn.SAGEConv(FEATURES, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, blocks, x):
        return self.head(self.conv(blocks[0], x).relu())


def made(lr=0.05, loss=F.cross_entropy, **options):
    torch.manual_seed(0)
    model = Net()
    graph = planted_graph(nodes=400, dtype=torch.float64)
    sampler = joestar.NeighborSampler(graph, [3], seed=1)
    return joestar.compile(model, sampler, loss, torch.optim.SGD(model.parameters(), lr), backend="eager", **options)


@pytest.mark.parametrize("schedule", [None, lambda epoch: 0.5 * (1 + np.cos(epoch / 10))])
def test_numbers_of_numpy_can_be_read_again(tmp_path, schedule):
    """``np.float64`` is a ``float``: it was written, and the checkpoint was called damaged."""
    saved = joestar.Checkpoints(tmp_path)

    def fitted(epochs, **options):
        step = made(np.float64(0.05))
        scheduler = None if schedule is None else lr_scheduler.LambdaLR(step.optimizer, schedule)
        return step, step.fit(IDX, None, epochs, 70, scheduler=scheduler, **options)

    fitted(1, checkpoints=saved)
    step, history = fitted(2, checkpoints=saved, resume=True)
    _, expected = fitted(2)
    assert [record.loss for record in history.records] == [record.loss for record in expected.records]
    torch.save(step.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"]["param_groups"]


ASKED = {
    "metric": ({"metric": "f1_macro"}, {}),
    "default metric": ({}, {"metric": "f1_macro"}),
    "monitor": ({}, {"monitor": "train_loss"}),
    "validated": ({"val": None}, {}),
    "mode": ({"metric": lambda out, y: 0.0, "mode": "max"}, {"metric": lambda out, y: 0.0, "mode": "min"}),
}


@pytest.mark.parametrize("name", ASKED)
def test_another_idea_of_the_best_is_refused(tmp_path, name):
    """A loss was taken for the metric of then, of which more is better."""
    saved = joestar.Checkpoints(tmp_path)
    before, after = ASKED[name]
    val = before.get("val", VAL)
    made().fit(IDX, val, 1, 70, checkpoints=saved, **{k: v for k, v in before.items() if k != "val"})
    with pytest.raises(CheckpointError, match="the checkpoint is of a fit with another"):
        made().fit(IDX, VAL, 2, 70, checkpoints=saved, resume=True, **after)
    assert len(made().fit(IDX, val, 2, 70, checkpoints=saved, resume=True,
                          **{k: v for k, v in before.items() if k != "val"}).records) == 2  # fmt: skip


@pytest.mark.parametrize("asked", [{}, {"metric": "f1_macro"}, {"monitor": "train_loss"}], ids=str)
def test_wherever_it_was_left_the_best_is_by_the_same_number(tmp_path, asked):
    """In front of the first scores the default was not chosen yet, and the loss was monitored from then on."""

    def fitted(stop, **options):
        step, seen = made(2.0), []
        scheduler = lr_scheduler.ReduceLROnPlateau(step.optimizer, "min" if "monitor" in asked else "max", 0.1, 0)

        def on_step(record):
            seen.append(record)
            if len(seen) == stop:
                raise KeyboardInterrupt

        return step, step.fit(IDX, VAL, 4, 70, scheduler=scheduler, on_step=on_step, **asked, **options)

    step, whole = fitted(None)
    for stop in (1, 2, 3, 6):
        saved = joestar.Checkpoints(tmp_path / str(stop))
        with pytest.raises(KeyboardInterrupt):
            fitted(stop, checkpoints=saved)
        resumed, history = fitted(None, checkpoints=saved, resume=True)
        for name in ("metric", "mode", "best_epoch", "best_val"):
            assert getattr(history, name) == getattr(whole, name), (stop, name)
        assert [record.lr for record in history.records] == [record.lr for record in whole.records]
        assert all(map(torch.equal, resumed.model.state_dict().values(), step.model.state_dict().values()))


def test_more_patience_goes_on(tmp_path):
    saved, scores = joestar.Checkpoints(tmp_path), iter([0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    given = {"metric": {"ours": lambda out, y: next(scores)}, "mode": "max", "checkpoints": saved}
    assert len(made().fit(IDX, VAL, 4, 70, patience=1, **given).records) == 2
    assert len(made().fit(IDX, VAL, 4, 70, patience=1, resume=True, **given).records) == 2
    history = made().fit(IDX, VAL, 4, 70, patience=3, resume=True, **given)
    assert len(history.records) == 4 and history.best_epoch == 0


def test_a_schedule_of_another_length_is_told(tmp_path):
    saved = joestar.Checkpoints(tmp_path)

    def fitted(epochs, **options):
        step = made()
        scheduler = lr_scheduler.CosineAnnealingLR(step.optimizer, epochs)
        return step.fit(IDX, None, epochs, 70, scheduler=scheduler, schedule="epoch", checkpoints=saved, **options)

    fitted(2)
    with pytest.warns(JoestarWarning, match="CosineAnnealingLR goes on with T_max=2 of the checkpoint, not 4"):
        fitted(4, resume=True)


def test_another_scheduler_is_refused(tmp_path):
    saved, step, other = joestar.Checkpoints(tmp_path), made(), made()
    step.fit(IDX, None, 1, 70, scheduler=lr_scheduler.StepLR(step.optimizer, 1), checkpoints=saved)
    scheduler = lr_scheduler.ExponentialLR(other.optimizer, 0.9)
    with pytest.raises(CheckpointError, match="another scheduler: 'StepLR', this one has 'ExponentialLR'"):
        other.fit(IDX, None, 2, 70, scheduler=scheduler, checkpoints=saved, resume=True)


def test_a_state_that_was_not_gone_on_with_is_saved_as_it_was():
    """Its bounds and choices were lost: an interrupt while a resumed run compiled."""
    step, second, third = made(), made(), made(slack=0.3)
    list(step.epoch(IDX, 70))
    state = step.state_dict()
    assert state["programs"]
    second.load_state_dict(state)
    again = second.state_dict()
    assert again["programs"] == state["programs"]
    third.load_state_dict(again)
    list(third.epoch(IDX, 70))
    assert third.state_dict()["programs"]["train"]["bounds"] == state["programs"]["train"]["bounds"]


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_an_optimizer_that_fails_at_the_end_of_a_group_adds_nothing_twice(execution):
    def trained(fails):
        step, turns = made(accumulate=2, execution=execution), iter([fails])

        def hook(*given):
            if next(turns, False):
                raise RuntimeError("once")

        step.optimizer.register_step_pre_hook(hook)
        epoch, found = step.epoch(IDX, 35), []
        while len(found) < 4:
            try:
                found.append(float(next(epoch)))
            except RuntimeError:
                assert len(found) == 1
        return found, [p.detach().clone() for p in step.model.parameters()]

    (losses, weights), (expected, theirs) = trained(True), trained(False)
    assert losses == expected and all(map(torch.equal, weights, theirs))


def test_sums_under_a_scale_that_others_changed(tmp_path):
    """A group of batches that other steps came between counted its first batch under the scale of its last."""

    def trained(scale, saved=False):
        step = made(accumulate=2, loss_scale=scale)
        epoch = step.epoch(IDX, 70)
        next(epoch)
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(5):
            step(IDX[:20])
        if saved:
            state = step.state_dict()
            step = made(accumulate=2, loss_scale=scale)
            step.load_state_dict(state)
            epoch = step.epoch(IDX, 70)
        for group in step.optimizer.param_groups:
            group["lr"] = 0.05
        next(epoch)
        return [p.detach().clone() for p in step.model.parameters()]

    expected = trained(None)
    for saved in (False, True):
        for ours, plain in zip(trained({"initial": 1024.0, "interval": 1}, saved), expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_sums_of_parameters_that_were_frozen_since_are_refused():
    """They were dropped without a word, and new ones began in the middle of a group."""
    step, other = made(accumulate=2), made(accumulate=2)
    begun = step.epoch(IDX, 70)
    next(begun)
    other.load_state_dict(step.state_dict())
    other.model.head.requires_grad_(False)
    epoch = other.epoch(IDX, 70)
    with pytest.raises(ChangedAfterCompileError, match="other parameters are trained than when the group"):
        next(epoch)


def test_seconds_of_an_interrupted_epoch_are_kept(tmp_path):
    saved = joestar.Checkpoints(tmp_path)

    def stop(record):
        if record.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made().fit(IDX, None, 1, 35, checkpoints=saved, on_step=stop)
    assert saved.latest()["fit"]["seconds"] > 0


def test_parameters_are_their_own_where_memory_for_averages_is_over(monkeypatch):
    step = made(ema=0.9)
    list(step.epoch(IDX, 70))
    step.evaluate(VAL, 50)
    before, turns, clone = step.weights(), iter(range(99)), torch.Tensor.clone

    def fails(tensor, *given, **further):
        if next(turns) == 2:
            raise torch.OutOfMemoryError("made up")
        return clone(tensor, *given, **further)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", fails)
        with pytest.raises(torch.OutOfMemoryError):
            step.evaluate(VAL, 50, ema=True)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
