"""Modules that the user froze stay frozen; flags that change later take effect at the next epoch or call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real, shared
from torch import nn

import joestar
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_epoch, plain_logits

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 120)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Normed(nn.Module):
    """BatchNorm between two layers, and dropout in a block of its own."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, 8)
        self.norm = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.out = joestar.nn.SAGEConv(8, CLASSES)

    def forward(self, blocks, x):
        return self.out(blocks[1], self.drop(self.norm(self.conv(blocks[0], x))))


class FreezesItself(Normed):
    """The idiom of frozen BatchNorm: ``train`` leaves it alone."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self


def _parts(kind=Normed, fanouts=(3, 2)):
    torch.manual_seed(0)
    graph = planted_graph(dtype=torch.float64, nodes=400)
    return kind().double(), joestar.NeighborSampler(graph, list(fanouts), seed=7)


def _compiled(model, sampler, **kw):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", **kw)


def _bn(model):
    return {name: value.clone() for name, value in model.norm[0].named_buffers()}


def _epochs(step, number, batch=40):
    return [[float(v) for v in list(step.epoch(IDX, batch, shuffle=False))] for _ in range(number)]


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("kind", [Normed, FreezesItself])
@pytest.mark.each("kind")
def test_frozen_modules_stay_frozen_as_in_plain_pytorch(execution, kind):
    model, sampler = _parts(kind)
    model.train()
    model.norm.eval()
    model.drop.eval()  # so that a plain loop draws nothing else
    plain = copy.deepcopy(model)
    expected = plain_epoch(plain, sampler, F.cross_entropy, torch.optim.Adam(plain.parameters(), 1e-2), IDX, 40)
    step, before = _compiled(model, sampler, execution=execution), _bn(model)
    flags = {name: module.training for name, module in model.named_modules()}
    (losses,) = _epochs(step, 1)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)  # losses are float32
    assert all(torch.equal(before[name], value) for name, value in _bn(model).items())
    assert flags == {name: module.training for name, module in model.named_modules()}
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), **CLOSE)


def test_freezing_and_thawing_between_epochs_takes_effect():
    model, sampler = _parts()
    model.drop.eval()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
    step = _compiled(model, sampler)
    for epoch, frozen in enumerate([False, True, False]):
        for net in (model, plain):
            net.norm.train(not frozen)
        expected = plain_epoch(plain, sampler, F.cross_entropy, optimizer, IDX, 40, epoch)
        torch.testing.assert_close(_epochs(step, 1)[0], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(_bn(model), _bn(plain), **CLOSE)
    assert step.report().counters.recompiles == 2


def test_evaluation_mode_of_the_whole_model_freezes_nothing_more():
    """``model.eval()`` for an evaluation of one's own, then on with ``step.epoch``: as after ``model.train()``."""
    model, sampler = _parts()
    model.norm.eval()
    step, before = _compiled(model, sampler), _bn(model)
    _epochs(step, 1)
    model.eval()
    _epochs(step, 1)
    assert all(torch.equal(before[name], value) for name, value in _bn(model).items())
    assert not model.training and not model.conv.training
    assert step.report().counters.recompiles == 0
    model, sampler = _parts()
    model.norm.eval()
    step, before = _compiled(model, sampler), _bn(model)
    model.eval()  # before anything is captured
    _epochs(step, 1)
    assert all(torch.equal(before[name], value) for name, value in _bn(model).items())
    thawed, sampler = _parts()
    thawed.eval()
    step, before = _compiled(thawed, sampler), _bn(thawed)
    _epochs(step, 1)
    assert not torch.equal(before["running_mean"], thawed.norm[0].running_mean)
    assert not any(module.training for module in thawed.modules())


def test_predictions_are_in_evaluation_mode_and_restore_every_flag():
    model, sampler = _parts()
    model.norm.eval()
    step = _compiled(model, sampler)
    flags = [module.training for module in model.modules()]
    rows = step.predict(IDX[:20])
    assert [module.training for module in model.modules()] == flags
    model.eval()
    expected = plain_logits(model, sampler, IDX[:20].to(sampler.graph.indices.dtype), -1, 0)
    torch.testing.assert_close(rows, expected, **CLOSE)


def test_the_callable_form_has_gradients_in_evaluation_mode():
    """Dropout and batch norm are off there, and training goes on; ``no_grad`` is what switches gradients off."""
    model, sampler = _parts(fanouts=(500, 500))
    other = copy.deepcopy(model)
    step = joestar.compile(model, sampler, backend="eager")
    seen, programs = [], set()
    for net in (model, other):
        net.eval()
        adam, losses = torch.optim.Adam(net.parameters(), 1e-2), []
        for number, seeds in enumerate(IDX.split(40)):
            if net is model:
                with torch.no_grad():
                    assert not step(seeds).requires_grad
                rows = step(seeds)
                programs.update(id(executor.program) for executor in step._executors.values())
            else:
                rows = plain_logits(net, sampler, seeds.to(sampler.graph.indices.dtype), 0, 1 + number)
            loss = F.cross_entropy(rows, sampler.graph.ndata["y"][seeds])
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.detach())
        seen.append(torch.stack(losses))
    torch.testing.assert_close(*seen, **CLOSE)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), **CLOSE)
    assert len(programs) == 2
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not step(IDX[:40]).requires_grad


def test_data_of_the_graph_is_learnt_with_a_frozen_model():
    """As explanations and prompts are: features that need gradients, a model that needs none, in evaluation mode."""
    model, sampler = _parts(fanouts=(500, 500))
    model.eval().requires_grad_(False)
    x = sampler.graph.ndata["x"].requires_grad_()
    step = joestar.compile(model, sampler, backend="eager")
    seeds = IDX[:20].to(sampler.graph.indices.dtype)
    found = torch.autograd.grad(step(IDX[:20]).square().sum(), x)
    expected = torch.autograd.grad(plain_logits(model, sampler, seeds, 0, 1).square().sum(), x)
    torch.testing.assert_close(found, expected, **CLOSE)


class SaysTwice(Normed):
    def forward(self, blocks, x):
        rows = super().forward(blocks, x)
        return {"logits": rows, "again": rows, "last": rows * 2}


def test_rows_that_are_returned_twice():
    """Dynamo gives one output for both."""
    model, sampler = _parts(SaysTwice)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    step = joestar.compile(model, sampler, lambda out, y: F.cross_entropy(out["again"], y), adam, backend="eager")
    with cheaper(real):
        list(step.epoch(IDX, 40))
        found = step.predict(IDX[:20])
    torch.testing.assert_close(found["again"], found["logits"], rtol=0, atol=0)
    torch.testing.assert_close(found["last"], found["logits"] * 2, rtol=0, atol=0)


class SaysAParameter(SaysTwice):
    def forward(self, blocks, x):
        return super().forward(blocks, x) | {"weight": self.out.lin_l.weight}


def test_a_parameter_among_outputs_has_no_row_per_seed():
    """It may be handed out in training mode, as what has one shape may, and not by predictions."""
    model, sampler = _parts(SaysAParameter)
    step = joestar.compile(model, sampler, backend="eager")
    assert torch.equal(step(IDX[:20])["weight"], model.out.lin_l.weight)
    model.eval()
    with pytest.raises(joestar.errors.CaptureError, match="one row per seed"):
        step(IDX[:20])


def test_the_callable_form_follows_every_flag():
    model, sampler = _parts(fanouts=(500, 500))
    step = joestar.compile(model, sampler, backend="eager")
    model.drop.eval()
    model.norm.eval()
    seeds = IDX[:20].to(sampler.graph.indices.dtype)
    expected = plain_logits(model, sampler, seeds, 0, 1)
    torch.testing.assert_close(step(IDX[:20]), expected, **CLOSE)
    before = _bn(model)
    model.norm.train()
    step(IDX[:20])
    assert not torch.equal(before["running_mean"], model.norm[0].running_mean)
    model.eval()
    model.drop.train()  # dropout while predicting
    first, second = step(IDX[:20]), step(IDX[:20])
    assert not torch.equal(first, second)
    model.drop.eval()
    torch.testing.assert_close(step(IDX[:20]), step(IDX[:20]), **CLOSE)


class Counts(Normed):
    """A buffer that is written with ``+=``, which assigns what it has written in place, and one that is not read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unread", torch.ones(3, dtype=torch.float64))

    def forward(self, blocks, x):
        self.calls += 1
        return super().forward(blocks, x) * (1 + 1e-3 * self.calls)


@pytest.mark.fuzz
@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_a_buffer_that_is_counted_up(execution):
    """In steps, predictions and calls of the callable form, as plain PyTorch does."""
    model, sampler = _parts(Counts, fanouts=(500, 500))
    plain, adam = copy.deepcopy(model), torch.optim.Adam(model.parameters(), 1e-2)
    step = joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", execution=execution)
    calls = joestar.compile(plain, sampler, backend="eager", execution=execution)
    with cheaper(shared):  # of both executions
        assert len(list(step.epoch(IDX, 40))) == int(model.calls)
        for net, use in ((model, step.predict), (plain, calls)):
            net.eval()
            other = copy.deepcopy(net)
            rows = use(IDX[:20])
            epoch, number = (-1, 0) if use == step.predict else (0, 1)
            expected = plain_logits(other, sampler, IDX[:20].to(sampler.graph.indices.dtype), epoch, number)
            torch.testing.assert_close(rows, expected, **CLOSE)
            assert float(net.calls) == float(other.calls)


class SaysASize(SaysTwice):
    def forward(self, blocks, x):
        return super().forward(blocks, x) | {"edges": blocks[0].num_edges}


@pytest.mark.parametrize("loss", [None, lambda out, y: F.cross_entropy(out["logits"], y)])
def test_a_size_among_outputs_is_said_to_be_one(loss):
    model, sampler = _parts(SaysASize)
    adam = () if loss is None else (loss, torch.optim.Adam(model.parameters(), 1e-2))
    step = joestar.compile(model, sampler, *adam, backend="eager")
    with cheaper(real), pytest.raises(joestar.errors.CaptureError, match=r"size of a sampled set \(block.num_edges\)"):
        step(IDX[:20])
