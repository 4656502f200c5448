"""Groups of batches, loss scale and averages of weights, within the step, against the same written in plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from joestar.errors import CheckpointError, ConfigError
from joestar.runtime.seeds import shuffled
from tests.runtime.common import make_step, planted_graph, tight_bounds, train
from tests.runtime.plain import plain_logits

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)
OPTIONS = {"model_options": {"dropout": 0.0}}


class PlainUpdates:
    """A loop as people write it: ``loss / k``, ``GradScaler``, clipping, ``AveragedModel``."""

    def __init__(self, step, loss=F.cross_entropy, accumulate=1, scaler=None, decay=None, clip=None):
        self.model, self.sampler, self.loss = copy.deepcopy(step.model), step.sampler, loss
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.accumulate, self.clip = accumulate, clip
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        average = None if decay is None else get_ema_multi_avg_fn(decay)
        self.average = None if decay is None else AveragedModel(self.model, multi_avg_fn=average)
        self.scales = []

    def group(self, batches, epoch, first):
        self.optimizer.zero_grad()
        values = []
        for position, seeds in enumerate(batches, first):
            outputs = plain_logits(self.model, self.sampler, seeds.to(torch.int32), epoch, position)
            value = self.loss(outputs, self.sampler.graph.ndata["y"][seeds])
            self.scaler.scale(value / len(batches)).backward()
            values.append(value.item())
        self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        before = [p.clone() for p in self.model.parameters()]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        moved = any(not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True))
        if self.average is not None and moved:
            self.average.update_parameters(self.model)
        return values

    def epoch(self, number, idx=IDX, batch=100, with_seeds=None, kept=None):
        """Losses of an epoch; ``with_seeds``: a loss that takes the seeds, too; kept: how many of the order."""
        batches = list(shuffled(idx, 7, number)[:kept].split(batch))
        for first in range(0, len(batches), self.accumulate):
            group = batches[first : first + self.accumulate]
            if with_seeds is not None:
                turns = iter(group)
                self.loss = lambda out, y, turns=turns: with_seeds(out, y, next(turns))
            yield from self.group(group, number, first)


def agrees(step, plain, tolerance=1e-9):
    for (name, ours), theirs in zip(step.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)
    if plain.average is not None:
        for (name, ours), theirs in zip(step.ema.items(), plain.average.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("execution", ["padded", "exact", "overflowing"])
def test_groups_of_batches(execution, monkeypatch):
    """Eight batches in groups of three: the last has two. Clipped, averaged, some redone, a single step in between."""
    if execution == "overflowing":
        tight_bounds(monkeypatch, 1.0)
    how = "exact" if execution == "exact" else "padded"
    step = make_step(how, accumulate=3, ema=0.8, clip_grad_norm=0.05, patience=1000, **OPTIONS)
    plain = PlainUpdates(step, accumulate=3, decay=0.8, clip=0.05)
    for number in range(2):
        ours, theirs, updated = step.epoch(IDX, 100), plain.epoch(number), []
        for position, loss in enumerate(ours):
            assert loss.item() == pytest.approx(next(theirs), rel=1e-9)
            updated.append(ours.updated)
            if position == 2:  # behind a group
                assert step(IDX[:20]).item() == pytest.approx(*plain.group([IDX[:20]], -2 - number, 0), rel=1e-9)
        assert updated == [False, False, True, False, False, True, False, True]
        agrees(step, plain)
    assert (step.counters.fallbacks > 2) == (execution == "overflowing")


def test_runs_that_take_turns_have_sums_of_their_own():
    """A single step, and another epoch, in the middle of a group."""

    def losses(turns):
        step, found = make_step(accumulate=4, optimizer=lambda p: torch.optim.SGD(p, 0.0), **OPTIONS), []
        first = step.epoch(IDX, 100)
        for position, loss in enumerate(first):
            found.append(loss.item())
            if turns and position == 1:
                step(IDX[:30])
                next(step.epoch(VAL, 50))
            if position == 3:
                found.append([p.grad.clone() for p in step.model.parameters()])
        return found

    with_turns, alone = losses(True), losses(False)
    for ours, theirs in zip(with_turns[4], alone[4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_going_on_in_the_middle_of_a_group():
    """Sums, scale and averages are part of the state."""
    options = {"accumulate": 3, "loss_scale": {"initial": 64.0, "interval": 2}, "ema": 0.9, **OPTIONS}
    whole, broken = make_step(**options), make_step(**options)
    expected = train(whole, IDX, epochs=2)
    found = [next(epoch := broken.epoch(IDX, 100)).item(), next(epoch).item()]
    state = copy.deepcopy(broken.state_dict())
    other = make_step(seed=5, **options)
    train(other, VAL, epochs=1)
    other.load_state_dict(state)
    found += [loss.item() for loss in list(other.epoch(IDX, 100))]
    found += train(other, IDX, epochs=1)
    assert found == expected and other.loss_scale == whole.loss_scale
    for ours, theirs in zip(other.ema.values(), whole.ema.values(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(CheckpointError, match="saved with ema, this step was compiled without"):
        make_step(accumulate=3, loss_scale=True, **OPTIONS).load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved without loss_scale, this step was compiled with"):
        make_step(loss_scale=True, **OPTIONS).load_state_dict(make_step(**OPTIONS).state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scale(accumulate):
    """Scales and parameters as with ``torch.amp.GradScaler``, where some batches have gradients that are not finite."""
    graph = planted_graph(dtype=torch.float64)
    weight = torch.ones(graph.num_nodes, dtype=torch.float64)
    weight[torch.tensor([5, 300])] = torch.inf

    def loss(out, y, seeds):
        return (F.cross_entropy(out, y, reduction="none") * weight[seeds]).mean()

    settings = {"initial": 1024.0, "growth": 4.0, "backoff": 0.25, "interval": 2}
    step = make_step(graph=graph, loss=loss, accumulate=accumulate, loss_scale=settings, ema=0.7, **OPTIONS)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
    )  # fmt: skip
    plain = PlainUpdates(step, None, accumulate, scaler, 0.7)
    scales = []
    for number in range(2):
        theirs, epoch = plain.epoch(number, with_seeds=loss), step.epoch(IDX, 100)
        for value in epoch:
            assert value.item() == pytest.approx(next(theirs), rel=1e-9)
            scales += [step.loss_scale.item()] if epoch.updated else []
    assert scales == plain.scales and len(set(scales)) > 2
    agrees(step, plain)


def test_float16_comes_with_a_scale():
    step = make_step(graph=planted_graph(), autocast=torch.float16, **OPTIONS)
    losses = train(step, IDX, epochs=2)
    assert step.loss_scale == 65536 and losses[-1] < losses[0]
    assert make_step(autocast=torch.bfloat16).loss_scale is None
    assert make_step(autocast=torch.float16, loss_scale=False).loss_scale is None


def test_averages_are_used_by_choice():
    step = make_step(ema=0.9)
    history = step.fit(IDX, VAL, 2, 100, ema=True)
    assert history.best_val == step.evaluate(VAL, 100)["accuracy"], "the model holds the best averages"
    train(step, IDX, epochs=1)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    score = step.evaluate(VAL, 100, ema=True)
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    averages = step.weights(ema=True)
    step.model.load_state_dict(averages)
    assert step.evaluate(VAL, 100) == score
    assert any(not torch.equal(value, before[name]) for name, value in averages.items())
    step.restart()
    assert all(torch.equal(step.ema[name], p) for name, p in step.model.named_parameters())


def test_a_step_behind_the_flag_changes_nothing():
    """As the warm-up of a captured graph runs it: sums, scale, averages, moments and logged values stay."""

    def loss(out, y):
        return F.cross_entropy(out, y), {"mean": out.mean()}

    for kind in (torch.optim.Adam, torch.optim.NAdam):
        step = make_step(
            loss=loss, accumulate=3, loss_scale={"interval": 1}, ema=0.9, optimizer=lambda p, kind=kind: kind(p, 0.01)
        )
        list(zip(step.epoch(IDX, 100), range(4), strict=False))
        update, runner = step._runner.update, step._runner

        def everything(step=step, update=update, runner=runner):
            state = step.optimizer.state
            moments = [v for p in step.model.parameters() for v in state[p].values()]
            mine = [*step.model.state_dict().values(), *moments, *update.sums, *update.average.weights.values()]
            return [v.clone() for v in (*mine, update.scale.scale, update.scale.steps, update.average.updates,
                                        runner.state.logged, runner.state.losses)]  # fmt: skip

        before = everything()
        launch = runner.dry_run(IDX.int(), 100)
        for position in range(4):
            launch(position)
        for ours, theirs in zip(before, everything(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_drop_last_and_seeds():
    step, whole = make_step(**OPTIONS), make_step(**OPTIONS)
    epoch = step.epoch(IDX, 100, drop_last=True, with_seeds=True)
    assert len(epoch) == 7
    pairs = list(epoch)
    order = shuffled(IDX, 7, 0)
    assert torch.equal(torch.cat([seeds for _, seeds in pairs]).long(), order[:700])
    assert [loss.item() for loss, _ in pairs] == [loss.item() for loss in list(whole.epoch(IDX, 100))][:7]
    first = step.epoch(IDX, 100, drop_last=True)
    next(first)
    again = make_step(**OPTIONS)
    again.load_state_dict(step.state_dict())
    with pytest.raises(CheckpointError, match=r"another drop_last \(True; now False\)"):
        again.epoch(IDX, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1; got 0"),
        ({"ema": 1.0}, "ema must be a decay between 0 and 1"),
        ({"loss_scale": {"start": 3}}, "loss_scale must be True, a number, or a dict"),
        ({"loss_scale": {"backoff": 2.0}}, "needs initial > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        make_step(**options)


def test_averages_that_are_not_there():
    with pytest.raises(ConfigError, match=r"ema=True needs averages of the weights: joestar.compile"):
        make_step().evaluate(VAL, ema=True)
