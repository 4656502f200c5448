"""What hangs on an optimizer's step, hooks of it or another ``step()``, happens when it steps, and then only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import JoestarWarning
from joestar.runtime.seeds import shuffled
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_logits
from tests.runtime.tuned import made_up_times, own_cache

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(140)
OPTIMIZERS = {
    "SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "RMSprop": torch.optim.RMSprop,
}  # fmt: skip
ATTACHED = ("post hook", "pre hook", "wrapped")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = joestar.nn.SAGEConv(FEATURES, 8), nn.Linear(8, CLASSES)
        self.run = torch.zeros(8, dtype=torch.float64)
        self.double()

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        if self.training:
            self.run.lerp_(h.detach().mean(0), 0.1)
        return self.head((h - 0.1 * self.run).relu())


class Running(nn.Module):
    """A loss in units of its running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, z, y):
        loss = F.cross_entropy(z, y)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(loss, alpha=0.1)
            self.steps += 1
        return loss / self.mean


def parts(kind: str, attached: str | None):
    """(model, optimizer, sampler, calls), with a decay of one's own behind every step."""
    torch.manual_seed(0)
    model, calls = Net(), []
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)

    def decay(*given):
        calls.append(len(calls))
        with torch.no_grad():
            model.head.weight.mul_(0.95)

    if attached == "post hook":
        optimizer.register_step_post_hook(decay)
    elif attached == "pre hook":
        optimizer.register_step_pre_hook(decay)
    elif attached == "wrapped":
        own = optimizer.step

        def step(closure=None):
            own(closure)
            decay()

        optimizer.step = step
    graph = planted_graph(nodes=400, dtype=torch.float64)
    return model, optimizer, joestar.NeighborSampler(graph, [3], seed=7), calls


def by_hand(kind: str, attached: str, accumulate: int):
    model, optimizer, sampler, calls = parts(kind, attached)
    batches = shuffled(IDX, 7, 0).split(20)
    for first in range(0, len(batches), accumulate):
        group = batches[first : first + accumulate]
        optimizer.zero_grad()
        for position, seeds in enumerate(group, first):
            outputs = plain_logits(model, sampler, seeds.to(torch.int32), 0, position)
            (F.cross_entropy(outputs, sampler.graph.ndata["y"][seeds]) / len(group)).backward()
        optimizer.step()
    return model, calls


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.every(3)
def test_once_for_every_group_of_batches(kind, attached, execution):
    """They were called behind every batch, by fused optimizers: averages and decays of one's own ran three times."""
    expected, theirs = by_hand(kind, attached, 3)
    model, optimizer, sampler, calls = parts(kind, attached)
    step = joestar.compile(
        model, sampler, F.cross_entropy, optimizer, backend="eager", accumulate=3, execution=execution
    )
    list(step.epoch(IDX, 20))
    assert len(calls) == len(theirs) == 3
    for (name, ours), plain in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9, msg=name)


def test_not_for_steps_that_a_loss_scale_skips():
    model, optimizer, sampler, calls = parts("SGD", "post hook")

    sampler.graph.ndata["x"][IDX[:20]] = torch.inf
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", loss_scale={"initial": 4.0})
    before = model.head.weight.clone()
    model.run.zero_()
    step(IDX[:20])
    assert not calls and torch.equal(model.head.weight, before)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    own_cache(monkeypatch, tmp_path)
    made_up_times(monkeypatch)


def trained(tune: bool, attached: str | None, kind: str):
    model, optimizer, sampler, calls = parts(kind, attached)
    loss = Running()
    step = joestar.compile(model, sampler, loss, optimizer, backend="eager", tune=tune)
    losses = [float(value) for value in step.epoch(IDX, 20)]
    return losses, calls, model.head.weight.detach(), model.run, loss.mean, loss.steps


@pytest.mark.parametrize("attached", [None, *ATTACHED])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_trials_of_choices_call_and_write_nothing(tuned, kind, attached):
    """``tune=True`` called them thousands of times, and wrote buffers of losses and tensors in plain attributes."""
    ours, plain = (trained(tune, attached, kind) for tune in (True, False))
    assert ours[0] == pytest.approx(plain[0], rel=1e-9) and ours[1] == plain[1]
    for found, expected in zip(ours[2:], plain[2:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_hooks_on_gradients_keep_choices_from_being_tried(tuned):
    """Every trial would call them."""
    model, optimizer, sampler, _ = parts("Adam", None)
    calls = []
    model.head.weight.register_hook(lambda grad: calls.append(1))
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", tune=True)
    with pytest.warns(JoestarWarning, match=r"tune=True tries nothing: hooks on gradients"):
        list(step.epoch(IDX, 20))
    assert len(calls) == 7


def test_a_first_group_without_parameters():
    model, _, sampler, _ = parts("AdamW", None)
    optimizer = torch.optim.AdamW([{"params": [], "weight_decay": 0.1}, {"params": [*model.parameters()]}], lr=0.01)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager")
    other, same, others, _ = parts("AdamW", None)
    plain = joestar.compile(other, others, F.cross_entropy, same, backend="eager")
    assert [float(x) for x in step.epoch(IDX, 20)] == [float(x) for x in plain.epoch(IDX, 20)]


def test_averages_of_integers():
    model, optimizer, sampler, _ = parts("SGD", None)
    model.counts = nn.Parameter(torch.arange(5), requires_grad=False)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", ema=0.9)
    list(step.epoch(IDX, 20))
    assert torch.equal(step.ema["counts"], torch.arange(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_nadam_goes_on_with_the_very_bits(dtype):
    """PyTorch's ``load_state_dict`` casts its product of momenta to the parameters' dtype."""

    def made():
        torch.manual_seed(0)
        graph = planted_graph(nodes=400, dtype=dtype)
        model = Net().to(dtype)
        model.run = model.run.to(dtype)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
        sampler = joestar.NeighborSampler(graph, [3], seed=7)
        return joestar.compile(model, sampler, lambda z, y: F.cross_entropy(z.float(), y), optimizer, backend="eager")

    whole, first, second = made(), made(), made()
    expected = [float(loss) for loss in whole.epoch(IDX, 20)]
    epoch = first.epoch(IDX, 20)
    found = [float(next(epoch)) for _ in range(3)]
    second.model.run.copy_(first.model.run)
    second.load_state_dict(first.state_dict())
    assert found + [float(loss) for loss in second.epoch(IDX, 20)] == expected
    state = next(iter(second.optimizer.state.values()))
    assert state["mu_product"].dtype == torch.float32
