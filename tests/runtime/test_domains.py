"""Values that a loss or a distribution cannot take are an error with the user's line; nothing is trained on them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real
from torch import distributions as D

import joestar
from joestar.errors import DomainError
from joestar.ops.padding.expect import expect
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph, tight_bounds, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(200)


@pytest.fixture(autouse=True)
def _checked():
    """Another test may have called TorchDynamo, which switches checks of distributions off for the whole process."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


def _bits(y):
    return (y > 1).double()


LOSSES = {
    "probabilities": (
        lambda z, y, s: F.binary_cross_entropy(0.5 + s * z[:, 0], _bits(y)),
        r"F.binary_cross_entropy expects probabilities, between 0 and 1 .*; got -?[\d.]+ at .*:\d+ in ",
    ),
    "entries of it": (
        lambda z, y, s: F.binary_cross_entropy(0.5 + s * z[:, 0], _bits(y), reduction="none").mean(), "probabilities",
    ),
    "scale": (
        lambda z, y, s: -D.Normal(z[:, 0], 1 + s * z[:, 1]).log_prob(y.double()).mean(),
        r"Normal expects its scale to be greater than 0; got -[\d.]+ at .*:\d+ in ",
    ),
    "Bernoulli": (
        lambda z, y, s: -D.Bernoulli(probs=0.5 + s * z[:, 0]).log_prob(_bits(y)).mean(), "probs to be between 0 and 1",
    ),
    "Categorical": (
        lambda z, y, s: -D.Categorical(probs=1 + s * z).log_prob(y).mean(), "probabilities that add up to 1; got",
    ),
    "Dirichlet": (
        lambda z, y, s: -D.Dirichlet(1 + s * z).log_prob(torch.full_like(z, 0.25)).mean(), "concentration to be",
    ),
    "divergence": (lambda z, y, s: D.kl_divergence(D.Normal(z, 1 + s * z), D.Normal(0.0, 1.0)).mean(), "its scale"),
    "value": (
        lambda z, y, s: -D.Exponential(z.exp()).log_prob(1 + s * z).mean(),
        r"Exponential.log_prob expects every value to be at least 0; got",
    ),
    "variance": (lambda z, y, s: F.gaussian_nll_loss(z[:, 0], y.double(), 1 + s * z[:, 1]), "variances of at least 0"),
}  # fmt: skip


@functools.cache
def _graph():
    return planted_graph(dtype=torch.float64, nodes=600)


def _scaled(name: str, scale: float):
    loss, message = LOSSES[name]
    return lambda z, y: loss(z, y, scale), message


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "execution"), [*((name, "padded") for name in LOSSES), ("scale", "exact")])
def test_values_out_of_range(name, execution):
    loss, message = _scaled(name, 100.0)
    step = make_step(execution, graph=_graph(), loss=loss)
    before = step.weights()
    for _ in range(2):
        with pytest.raises(DomainError, match=message) as raised:
            next(step.epoch(IDX, 50))
        assert isinstance(raised.value, ValueError)
    assert all(torch.equal(value, before[name]) for name, value in step.weights().items())


@pytest.mark.parametrize("name", ["probabilities", "scale"])
def test_the_line_of_the_user(name):
    loss, _ = _scaled(name, 100.0)
    with cheaper(real), pytest.raises(DomainError, match=r"got -?[\d.]+ at .*test_domains.py:\d+ in <lambda>: "):
        next(make_step(graph=_graph(), loss=loss).epoch(IDX, 50))


def _unchecked(factor: float):
    def loss(z, y):
        return -D.Normal(z[:, 0], 1 + factor * z[:, 1], validate_args=False).log_prob(y.double()).mean()

    return loss


def test_values_in_range_are_trained_on():
    losses = [_scaled("scale", 0.001)[0], _unchecked(0.001)]
    steps = [make_step(graph=_graph(), loss=loss, model_options={"dropout": 0.0}) for loss in losses]
    found = [train(step, IDX, epochs=1) for step in steps]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_whoever_asks_for_no_checks_gets_none():
    assert torch.isnan(next(make_step(graph=_graph(), loss=_unchecked(100.0)).epoch(IDX, 50)))


def test_a_batch_that_does_not_fit_is_judged_by_all_of_its_values(monkeypatch):
    """Of too few neighbours values may be out of range that are not."""
    tight_bounds(monkeypatch, 0.8)
    exact = make_step("exact", graph=_graph(), loss=F.cross_entropy)
    low = float(torch.stack([exact.predict(IDX[i : i + 50]).min() for i in range(0, 200, 50)]).min())
    assert low < 0

    def loss(z, y):
        return -D.Exponential(z - 1.5 * low).log_prob(torch.ones_like(z)).mean()

    found = [train(make_step(e, graph=_graph(), loss=loss), IDX, 50, 1) for e in ("padded", "exact")]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


class Scored(torch.nn.Module):
    """A distribution within the model."""

    def __init__(self, factor: float):
        super().__init__()
        self.net, self.factor = joestar.nn.GraphSAGE(FEATURES, 8, 2, out_channels=CLASSES).double(), factor

    def forward(self, blocks, x):
        h = self.net(blocks, x)
        return D.Normal(h, 1 + self.factor * h).log_prob(torch.ones_like(h))


@pytest.mark.parametrize("factor", [100.0, 0.0])
def test_predictions(factor):
    """Also exact ones."""
    step = joestar.compile(Scored(factor), joestar.NeighborSampler(_graph(), [3, 2], seed=1), backend="eager")
    for use in (step, step.predict, functools.partial(step.predict, full=True)):
        if factor:
            with pytest.raises(DomainError, match="its scale to be greater than 0"):
                use(IDX)
        else:
            assert torch.isfinite(use(IDX)).all()


def test_marked_where_nobody_waits():
    """On a GPU: not a number, as looking would wait for the device."""
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]], requires_grad=True)
    found = expect(x, x < 0, "positive")
    assert torch.equal(found.isnan(), x < 0)
    assert torch.equal(found[1], x[1])
    ids = torch.tensor([1, -2])
    assert torch.equal(expect(ids, ids < 0, "positive"), ids)
    op = torch.ops.joestar.expect
    assert torch.autograd.gradcheck(lambda v: op(v, v > 9, "small"), x.detach().double().requires_grad_())
    torch.library.opcheck(op, (x, x > 9, "small"))
    with pytest.raises(DomainError, match="small; got -2 here"):
        op(x, x[1] > 3, "small; got {} here")
