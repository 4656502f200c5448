"""Tensors that steps write and that are not in the model's state: a state has them, and runs go on with them.

Captured in the real way: that gives a tensor the name that it has in the program.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import CheckpointError, JoestarWarning
from tests.runtime.common import CLASSES, FEATURES, RunningLoss, planted_graph

IDX = torch.arange(2, 170)


class Net(nn.Module):
    """A count in a plain attribute, and one in a buffer that is not saved; ``running`` is."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, CLASSES).double()
        self.plain = torch.ones((), dtype=torch.float64)
        self.register_buffer("hidden", torch.ones(2, dtype=torch.float64), persistent=False)
        self.register_buffer("running", torch.ones((), dtype=torch.float64))

    def forward(self, blocks, x):
        if self.training:
            self.plain.mul_(1.1)
            self.hidden.add_(0.5)
            self.running.mul_(0.9)
        return self.conv(blocks[0], x) * self.plain / self.hidden.sum() + self.running


def made(kind: str = "loss", data: bool = False):
    torch.manual_seed(0)
    graph, net = planted_graph(nodes=400, dtype=torch.float64), Net()
    if data:
        graph.ndata["memory"] = torch.zeros(400, dtype=torch.float64)
    bank, running = torch.zeros(3, dtype=torch.float64), RunningLoss(0.5)

    def loss(out, y):
        bank.add_(out.detach().mean())
        return running(out, y) + bank.sum()

    sampler, adam = joestar.NeighborSampler(graph, [3], seed=1), torch.optim.Adam(net.parameters(), 1e-2)
    given = {"loss": running, "closure": loss, "callable": None}[kind]
    options = {"backend": "eager", "warm_up": 2}
    if given is None:
        return joestar.compile(net, sampler, **options), (net, adam)
    return joestar.compile(net, sampler, given, adam, **options), (net, adam)


def steps(step, more, count: int) -> list[float]:
    """Of the epoch that is under way, or of the next."""
    _, adam = more
    if step._runner is not None:
        return [float(loss) for loss, _ in zip(step.epoch(IDX, 40), range(count), strict=False)]
    found = []
    for seeds in IDX.split(40)[:count]:
        loss = F.cross_entropy(step(seeds), step.graph.ndata["y"][seeds])
        adam.zero_grad()
        loss.backward()
        adam.step()
        found.append(loss.item())
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["loss", "closure", "callable"])
@pytest.mark.each("kind")
def test_a_run_goes_on_as_if_it_had_not_been_broken_off(kind, begun, tmp_path):
    """In a step that has not begun, and in one that has trained something else; by a file that holds tensors alone."""
    step, more = made(kind)
    steps(step, more, 5)
    torch.save({"step": step.state_dict(), "adam": more[1].state_dict()}, tmp_path / "state.pt")
    expected = [steps(step, more, 5), steps(step, more, 3)]
    again, others = made(kind)
    if begun:
        steps(again, others, 3)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state["step"])
    if kind == "callable":
        others[1].load_state_dict(state["adam"])
    saved = copy.deepcopy(again.state_dict()["written"])  # also in front of the first step
    assert [steps(again, others, 5), steps(again, others, 3)] == expected
    assert saved.keys() == state["step"]["written"].keys()
    assert all(torch.equal(value, saved[name]) for name, value in state["step"]["written"].items())


def test_what_is_saved():
    """Not what the model's state has already."""
    step, more = made("closure")
    assert step.state_dict()["written"] == {}, "nothing is known yet"
    steps(step, more, 1)
    written = step.state_dict()["written"]
    assert len(written) == 4 and not any("running" in name for name in written)
    assert sorted(tuple(value.shape) for value in written.values()) == [(), (), (2,), (3,)]


def test_states_of_other_losses_are_refused():
    step, more = made("closure")
    steps(step, more, 1)
    state = copy.deepcopy(step.state_dict())
    for wrong in ([], {"a": 1}):
        with pytest.raises(CheckpointError, match="'written' must be tensors by name"):
            step.load_state_dict(state | {"written": wrong})
    name = next(name for name, value in state["written"].items() if value.dim() == 1 and value.numel() == 3)
    before = {name: value.clone() for name, value in step.state_dict()["written"].items()}
    with pytest.raises(CheckpointError, match=rf"has {name} of shape \[4\].*writes one of shape \[3\]"):
        step.load_state_dict(state | {"written": state["written"] | {name: torch.zeros(4, dtype=torch.float64)}})
    with pytest.raises(CheckpointError, match=r"has other of shape \[7\].*writes no such tensor"):
        step.load_state_dict(state | {"written": state["written"] | {"other": torch.zeros(7)}})
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict()["written"].items())
    renamed = {"another_" * value.dim() + name: value + 1 for name, value in state["written"].items()}
    step.load_state_dict(state | {"written": renamed})  # the same loss under another name
    assert all(torch.equal(value, before[name] + 1) for name, value in step.state_dict()["written"].items())
    with pytest.warns(JoestarWarning, match=r"does not have .*, which steps have written"):
        step.load_state_dict({key: value for key, value in state.items() if key != "written"})  # of an earlier version


def test_a_state_from_before_the_first_step_has_the_loss_that_is_a_module():
    """What else will be written is not known then: loading it later says that it stays."""
    step, more = made("loss")
    before = copy.deepcopy(step.state_dict())
    assert before["loss"].keys() == {"mean"} and before["written"] == {}
    expected, loss = steps(step, more, 3), step.scorer.loss_fn
    assert loss.mean != 1
    step.model.plain.fill_(1)
    step.model.hidden.fill_(1)
    with pytest.warns(JoestarWarning, match=r"does not have model.hidden, model_plain, which steps have written"):
        step.load_state_dict(before)
    assert loss.mean == 1
    assert steps(step, more, 3) == expected


def test_the_state_of_a_loss_is_loaded_at_once_and_checked():
    """Not with the first step: scores may be read before; losses of PyTorch's have no state of a run."""
    step, more = made("loss")
    steps(step, more, 3)
    state, (again, _) = copy.deepcopy(step.state_dict()), made("loss")
    again.load_state_dict(state)
    assert again.scorer.loss_fn.mean == step.scorer.loss_fn.mean != 1
    with pytest.raises(CheckpointError, match=r"of the loss, mean is missing; of the loss, other is unknown here"):
        again.load_state_dict(state | {"loss": {"other": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=r"of the loss, mean is unknown here.*take state\['loss'\] out"):
        made("closure")[0].load_state_dict(state)
    again.load_state_dict(made("closure")[0].state_dict())  # which has none
    weighted = torch.nn.CrossEntropyLoss(torch.ones(CLASSES))
    adam = torch.optim.Adam(again.model.parameters())
    assert joestar.compile(again.model, again.sampler, weighted, adam).state_dict()["loss"] == {}
    roles = step._runner.executor.program.written_roles
    name = next(role.name for role in roles if role.tensor is step.scorer.loss_fn.mean)
    earlier = {key: value for key, value in state.items() if key != "loss"}  # had it among what was written
    earlier["written"] = earlier["written"] | {name: state["loss"]["mean"]}
    again.scorer.loss_fn.mean.fill_(1)
    again.load_state_dict(earlier)
    assert steps(again, (None, None), 2) == steps(step, more, 2)


class Frozen(Net):
    """Writes only while a module is in training mode; what it wrote is read all the same."""

    def __init__(self):
        super().__init__()
        self.flag = nn.Dropout(0.0)

    def forward(self, blocks, x):
        if self.flag.training:
            self.plain.mul_(1.1)
        return self.conv(blocks[0], x) * self.plain


def frozen():
    torch.manual_seed(0)
    net = Frozen()
    sampler = joestar.NeighborSampler(planted_graph(nodes=400, dtype=torch.float64), [3], seed=1)
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    return joestar.compile(net, sampler, F.cross_entropy, adam, backend="eager", warm_up=2)


@pytest.mark.parametrize("when", ["before saving", "after loading"])
def test_what_was_written_before_a_module_was_frozen(when):
    """Programs are traced again then, and write it no more."""
    step = frozen()
    list(step.epoch(IDX, 40))
    if when == "before saving":
        step.model.flag.eval()
        list(step.epoch(IDX, 40))
    state = copy.deepcopy(step.state_dict())
    assert [value.item() for value in state["written"].values()] == [step.model.plain.item()]
    step.model.flag.eval()
    expected = [float(loss) for loss in step.epoch(IDX, 40)]
    again = frozen()
    again.load_state_dict(state)
    again.model.flag.eval()
    assert [float(loss) for loss in again.epoch(IDX, 40)] == expected
    again._runner.executor.program.forget()
    assert again.state_dict()["written"].keys() == state["written"].keys()


def test_a_state_that_does_not_fit_leaves_a_program_that_was_not_captured():
    """Every use says so, until another state is loaded."""
    step = frozen()
    list(step.epoch(IDX, 40))
    state, again = copy.deepcopy(step.state_dict()), frozen()
    again.load_state_dict(state | {"written": {"other": torch.zeros(7)}})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="has other of shape"):
            next(again.epoch(IDX, 40))
    again.load_state_dict(state)
    assert float(next(again.epoch(IDX, 40))) == float(next(step.epoch(IDX, 40)))


def test_of_two_tensors_alike_none_is_guessed():
    step, more = made("closure")
    steps(step, more, 1)
    state = copy.deepcopy(step.state_dict())
    scalars = {f"another_{name}": value for name, value in state["written"].items() if value.dim() == 0}
    assert len(scalars) == 2
    with pytest.raises(CheckpointError, match="no such tensor"):
        step.load_state_dict(state | {"written": scalars})
