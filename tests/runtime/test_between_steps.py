"""What a loop changes between two steps of an epoch: followed as in a plain loop, or refused before the next step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ChangedAfterCompileError
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_logits

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(120)
SHARPNESS = 1.0
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Net(nn.Module):
    """Two layers, BatchNorm, a number of Python's and one in a buffer; the features are scaled as a whole."""

    def __init__(self):
        super().__init__()
        self.first, self.last = joestar.nn.SAGEConv(FEATURES, 8), joestar.nn.SAGEConv(8, CLASSES)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, blocks, x):
        h = self.drop(self.norm(self.first(blocks[0], F.normalize(x)))).relu()
        return self.last(blocks[1], h) * self.scale / self.temperature


def _parts(make):
    torch.manual_seed(0)
    graph = planted_graph(dtype=torch.float64, nodes=400)
    model = Net().double()
    return model, make(model), graph, joestar.NeighborSampler(graph, [3, 2], seed=7)


def _compiled(make, loss=F.cross_entropy, **options):
    model, optimizer, _, sampler = _parts(make)
    return joestar.compile(model, sampler, loss, optimizer, backend="eager", **options)


def _plain(make, change, epochs):
    """The run of plain PyTorch: (losses, model)."""
    model, optimizer, graph, sampler = _parts(make)
    losses = []
    for epoch in range(epochs):
        for number, seeds in enumerate(IDX.split(30)):
            optimizer.zero_grad()
            logits = plain_logits(model, sampler, seeds.to(graph.indices.dtype), epoch, number)
            loss = F.cross_entropy(logits, graph.ndata["y"][seeds])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            change(model, optimizer, graph, number)
    return losses, model


def _freeze(model, optimizer, graph, number):
    model.first.requires_grad_(number == 1)


def _freeze_modules(model, optimizer, graph, number):
    model.norm.train(number == 1)


def _write_features(model, optimizer, graph, number):
    graph.ndata["x"][:, number].mul_(5)


def _write_labels(model, optimizer, graph, number):
    graph.ndata["y"].add_(1).remainder_(CLASSES)


def _write_a_buffer(model, optimizer, graph, number):
    model.scale.mul_(0.5)


def _add_a_group(model, optimizer, graph, number):
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 0.5})


def _sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


FOLLOWED = {
    _freeze: lambda net: torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1),
    _freeze_modules: _sgd,
    _write_features: _sgd,
    _write_labels: _sgd,
    _write_a_buffer: _sgd,
    _add_a_group: lambda net: torch.optim.SGD(net.last.parameters(), 0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    "options", [{}, {"execution": "exact"}, {"prefetch": True}], ids=["padded", "exact", "a step ahead"]
)
@pytest.mark.parametrize("change", FOLLOWED)
@pytest.mark.each("change")
def test_what_is_followed(options, change):
    expected, model = _plain(FOLLOWED[change], change, epochs=2)
    step, losses = _compiled(FOLLOWED[change], **options), []
    for _ in range(2):
        for number, loss in enumerate(step.epoch(IDX, 30, shuffle=False)):
            losses.append(loss.item())
            change(step.model, step.optimizer, step.graph, number)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)  # losses are float32
    torch.testing.assert_close(dict(step.model.state_dict()), dict(model.state_dict()), **CLOSE)
    trained = [parameter.grad is not None for parameter in step.model.parameters()]
    assert trained == [parameter.grad is not None for parameter in model.parameters()]


@pytest.mark.parametrize("change", [_freeze, _freeze_modules])
def test_what_is_followed_is_so_behind_predictions(change):
    """Which look at what changed, too: steps behind them did not see it any more."""
    expected, model = _plain(FOLLOWED[change], change, epochs=2)
    step, losses = _compiled(FOLLOWED[change]), []
    for _ in range(2):
        for number, loss in enumerate(step.epoch(IDX, 30, shuffle=False)):
            losses.append(loss.item())
            change(step.model, step.optimizer, step.graph, number)
            step.evaluate(IDX[:20])
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(step.model.state_dict()), dict(model.state_dict()), **CLOSE)


def test_layers_are_thawed_one_epoch_after_the_other():
    """Frozen before ``compile``; momentum of what is thawed begins as in a new optimizer."""

    def make(net):
        net.first.requires_grad_(False)
        return _sgd(net)

    def thaw(model, optimizer, graph, number):
        if number == 3:
            model.first.requires_grad_(True)

    expected, model = _plain(make, thaw, epochs=3)
    step, losses = _compiled(make), []
    for _ in range(3):
        losses += [loss.item() for loss in step.epoch(IDX, 30, shuffle=False)]
        step.model.first.requires_grad_(True)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(step.model.state_dict()), dict(model.state_dict()), **CLOSE)
    assert step.report().counters.recompiles == 1


def _accumulated(epochs, freeze_behind):
    """Plain PyTorch over groups of two batches: (losses, model)."""
    model, optimizer, graph, sampler = _parts(_sgd)
    losses = []
    for epoch in range(epochs):
        for number, seeds in enumerate(IDX.split(30)):
            logits = plain_logits(model, sampler, seeds.to(graph.indices.dtype), epoch, number)
            loss = F.cross_entropy(logits, graph.ndata["y"][seeds])
            (loss / 2).backward()
            losses.append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            if number == freeze_behind:
                model.first.requires_grad_(epoch == 1)
    return losses, model


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_layers_freeze_between_groups_of_batches(execution):
    expected, model = _accumulated(3, 1)
    step, losses = _compiled(_sgd, execution=execution, accumulate=2), []
    for number in range(3):
        epoch = step.epoch(IDX, 30, shuffle=False)
        for position, loss in enumerate(epoch):
            losses.append(loss.item())
            if position == 1:
                assert epoch.updated
                step.model.first.requires_grad_(number == 1)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(step.model.state_dict()), dict(model.state_dict()), **CLOSE)


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("change", [_freeze, _add_a_group])
def test_what_is_trained_stays_within_a_group_of_batches(change, execution):
    """Sums of its gradients would be lost, or those of other parameters."""
    step = _compiled(FOLLOWED[change], execution=execution, accumulate=2)
    losses = step.epoch(IDX, 30)
    next(losses)
    before = step.weights()
    change(step.model, step.optimizer, step.graph, 0)
    with pytest.raises(ChangedAfterCompileError, match="within a group of accumulate=2 batches"):
        next(losses)
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())


def _sharpened(logits, y):
    return F.cross_entropy(logits * SHARPNESS, y)


def _temperature(step, monkeypatch):
    step.model.temperature = 0.5


def _global(step, monkeypatch):
    monkeypatch.setitem(globals(), "SHARPNESS", 2.0)


def _dropout(step, monkeypatch):
    step.model.drop.p = 0.5


def _momentum(step, monkeypatch):
    step.model.norm.momentum = 0.5


def _new_buffer(step, monkeypatch):
    step.model.scale = step.model.scale * 2


def _new_features(step, monkeypatch):
    step.graph.ndata["x"] = step.graph.ndata["x"] * 2


def _moved_key(step, monkeypatch):
    step.model.drop.register_buffer("scale", torch.ones(()))


REFUSED = {
    _temperature: r"model.temperature was changed from 1.0 to 0.5.* model.name.fill_\(new\)",
    _global: "SHARPNESS was changed from 1.0 to 2.0",
    _dropout: "model.drop.p was changed from 0.0 to 0.5",
    _momentum: "model.norm.momentum was changed from 0.1 to 0.5",
    _new_buffer: "model.scale was replaced by another tensor",
    _new_features: r"graph.ndata\['x'\] was replaced by another tensor",
    _moved_key: "model.drop.scale was added",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused_before_the_next_step(change, monkeypatch):
    step = _compiled(_sgd, _sharpened)
    losses = step.epoch(IDX, 30)
    next(losses)
    before = step.weights()
    with monkeypatch.context() as patch:
        change(step, patch)
        with pytest.raises(ChangedAfterCompileError, match=REFUSED[change]):
            next(losses)
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    assert len(losses) == 3


def test_what_is_refused_before_the_first_step_of_an_epoch():
    """The call looked already, and iterating may begin much later; put back, the epoch goes on as it would have."""
    step = _compiled(_sgd)
    losses, before = step.epoch(IDX, 30), step.weights()
    step.model.temperature = 0.5
    with pytest.raises(ChangedAfterCompileError, match=r"model\.temperature was changed from 1\.0 to 0\.5"):
        next(losses)
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    step.model.temperature = 1.0
    found = [loss.item() for loss in losses]
    assert found == [loss.item() for loss in _compiled(_sgd).epoch(IDX, 30)] and len(found) == 4
