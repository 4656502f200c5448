"""Classes with ``train`` and ``eval`` of their own: those that freeze do as in plain PyTorch, others are refused."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ConfigError, JoestarWarning
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_epoch

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 80)


class LowRank(nn.Linear):
    """Merges its low-rank part into the weight for evaluation, as layers of LoRA do."""

    noted = False

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.zeros(sizes[1], 2))
        if self.noted:
            self.merged = False

    def train(self, mode: bool = True):
        before = self.training
        super().train(mode)
        if mode != before:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
            if self.noted:
                self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) + (x @ self.a.t() @ self.b.t() if self.training else 0)


class Noted(LowRank):
    """The same, and says so in an attribute."""

    noted = True


class Assigned(nn.Linear):
    """The weight has other memory in evaluation, which no operation writes."""

    def train(self, mode: bool = True):
        if mode != self.training:
            self.weight.data = self.weight.data + (-1.0 if mode else 1.0)
        return super().train(mode)


class Swapped(nn.Linear):
    """Another parameter for evaluation."""

    def train(self, mode: bool = True):
        if not mode:
            self.weight = nn.Parameter(self.weight.detach() * 0.5)
        return super().train(mode)


class Raises(nn.Linear):
    """Nothing of what it did remains."""

    def train(self, mode: bool = True):
        if not mode:
            self.weight.data.zero_()
            raise RuntimeError("made up")
        return super().train(mode)


class Net(nn.Module):
    """A layer, a norm and a head."""

    def __init__(self, head=nn.Linear):
        super().__init__()
        self.conv, self.norm = joestar.nn.SAGEConv(FEATURES, 8), nn.BatchNorm1d(8)
        self.head = head(8, CLASSES)

    def forward(self, blocks, x):
        return self.head(self.norm(self.conv(blocks[0], x)).relu())


class FreezesItself(Net):
    """The idiom of a frozen norm, with its parameters."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        self.norm.weight.requires_grad_(False)
        return self


def parts(model):
    torch.manual_seed(0)
    graph = planted_graph(dtype=torch.float64, nodes=400)
    return model.double(), joestar.NeighborSampler(graph, [3], seed=7)


def compiled(model, sampler):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", [LowRank, Noted, Assigned, Swapped, Raises])
def test_what_does_more_than_set_modes_is_refused_and_undone(head, training):
    """They were called while predictions were traced, and left the weight merged; also where it was zero."""
    model, sampler = parts(Net())
    model.train(training)
    model.head = head(8, CLASSES).double()
    held = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    weight, own = model.head.weight, dict(vars(model.head))
    error = RuntimeError if head is Raises else ConfigError
    for use in (lambda: compiled(model, sampler), lambda: joestar.inference(model, sampler.graph, layers=1)):
        message = (
            "made up" if head is Raises else rf"{head.__mro__[head is Noted].__name__}.*test_mode_overrides.py:\d+"
        )
        with pytest.raises(error, match=message):
            use()
        assert flags == {name: module.training for name, module in model.named_modules()}
        assert model.head.weight is weight and vars(model.head) == own
        torch.testing.assert_close(dict(model.state_dict()), held, rtol=0, atol=0)


def test_a_norm_that_train_freezes_is_told_if_train_was_never_called():
    model, sampler = parts(FreezesItself())
    with pytest.warns(JoestarWarning, match=r"FreezesItself.train .*py:\d+\) puts norm into evaluation mode"):
        compiled(model, sampler)
    assert model.norm.training and model.norm.weight.requires_grad, "only looked at"


@pytest.mark.parametrize("mode", [True, False])
def test_a_norm_that_train_freezes_is_frozen_as_in_plain_pytorch(mode):
    model, sampler = parts(FreezesItself())
    model.train().train(mode)
    plain = copy.deepcopy(model).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", JoestarWarning)
        step = compiled(model, sampler)
    for epoch in range(2):
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1)
        expected = plain_epoch(plain, sampler, F.cross_entropy, optimizer, IDX, 40, epoch)
        losses = [float(loss) for loss in step.epoch(IDX, 40, shuffle=False)]
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        step.predict(IDX[:5])
        assert model.training is mode and not model.norm.weight.requires_grad
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-9, atol=1e-9)


def test_parameters_that_eval_freezes_are_trained_on():
    """What they were is what they are again behind predictions."""

    class Thaws(Net):
        def train(self, mode: bool = True):
            self.head.requires_grad_(mode)
            return super().train(mode)

    model, sampler = parts(Thaws())
    step = compiled(model, sampler)
    list(step.epoch(IDX, 40))
    step.predict(IDX[:5])
    joestar.inference(model, sampler.graph, layers=1)
    assert model.head.weight.requires_grad and model.training


class Hidden(Net):
    """A module that nobody registered, and an argument that has to be given; returns nothing."""

    def __init__(self):
        super().__init__()
        self.hidden, self.tau = [nn.Dropout(0.5)], 1.0

    def train(self, mode):
        self.hidden[0].train(mode)
        self.tau = float("1.0")  # another object, of the same value
        torch.empty(2).zero_()
        super().train(mode)

    def forward(self, blocks, x):
        return self.hidden[0](super().forward(blocks, x))


@pytest.mark.parametrize("mode", [True, False])
def test_modules_that_nobody_registered_have_the_mode_of_before(mode):
    """Behind predictions they stayed in evaluation mode, and were trained so."""
    model, sampler = parts(Hidden())
    model.train(mode)
    step = compiled(model, sampler)
    assert model.hidden[0].training is mode, "only looked at"
    step.predict(IDX[:5])
    joestar.inference(model, sampler.graph, layers=1)
    assert model.hidden[0].training is mode and model.training is mode


def test_a_layer_that_takes_anothers_place_is_looked_at():
    model, sampler = parts(FreezesItself())
    joestar.inference(model.train(), sampler.graph, layers=1)
    model.head = LowRank(8, CLASSES).double()
    with pytest.raises(ConfigError, match="LowRank"):
        joestar.inference(model, sampler.graph, layers=1)
