"""Callable steps whose losses read only some of what the model returns: gradients are plain PyTorch's, or ``None``.

Through the default backend, whose backward pass gives zeros for what a loss leaves out.
"""

import copy
import gc

import pytest
import torch
from torch import nn

import joestar
from joestar.errors import CaptureError
from joestar.runtime.output_gradients import Gates
from tests.runtime.common import CLASSES, FEATURES, planted_graph

SEEDS = torch.arange(2, 42)


class Heads(nn.Module):
    """Two heads on a trunk, one of which reads a layer of its own; in training mode a number beside them."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, 8)
        self.first, self.between, self.second = nn.Linear(8, CLASSES), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x).relu()
        rows = {"a": self.first(h), "b": self.second(self.between(h).tanh()) + self.shift}
        return rows | ({"c": h.square().mean()} if self.training else {})


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    graph, net = planted_graph(nodes=400), Heads()
    return joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), slack=0.5, warm_up=2)


def plain(compiled, net, seeds):
    """What a copy of the model returns for the sample of the latest call."""
    graph = compiled.graph
    blocks = compiled.sampler.sample(graph.keyed(compiled.seed, 0, compiled._calls), seeds.to(graph.indices.dtype))
    return net(blocks, graph.ndata["x"][blocks[0].srcs])


LOSSES = {
    "a": lambda out: out["a"].square().mean(),
    "b": lambda out: out["b"].sum(),
    "c": lambda out: out["c"] * 3,
    "ab": lambda out: out["a"].mean() + out["b"].square().mean(),
    "bc": lambda out: out["b"].mean() * out["c"],
    "by rows": lambda out: out["a"][:7].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(compiled, name):
    net, twin = compiled.model, copy.deepcopy(compiled.model)
    for seeds in (SEEDS, SEEDS[:23]):
        net.zero_grad()
        twin.zero_grad()
        LOSSES[name](compiled(seeds)).backward()
        LOSSES[name](plain(compiled, twin, seeds)).backward()
        for (key, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), key
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)],
)
def test_tasks_that_take_turns_train_as_in_plain_pytorch(compiled, optimizer):
    """An optimizer leaves a head alone that has no gradient: neither weight decay nor momentum move it."""
    net, state = compiled.model, copy.deepcopy(compiled.model.state_dict())
    twin = copy.deepcopy(net)
    ours, theirs = optimizer(net.parameters()), optimizer(twin.parameters())
    for number in range(6):
        name = "ab"[number % 3 == 0]
        for opt, out in ((ours, compiled(SEEDS)), (theirs, plain(compiled, twin, SEEDS))):
            opt.zero_grad()
            LOSSES[name](out).backward()
            opt.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    net.load_state_dict(state)


def test_several_gradients_of_one_call(compiled):
    """``retain_graph``: one loss after another, as gradient surgery takes them; each is about its own outputs."""
    net, twin = compiled.model, copy.deepcopy(compiled.model)
    out, expected = compiled(SEEDS), plain(compiled, twin, SEEDS)
    for name in ("b", "a", "c", "ab"):
        given = {"retain_graph": name != "ab", "allow_unused": True}
        found = torch.autograd.grad(LOSSES[name](out), list(net.parameters()), **given)
        wanted = torch.autograd.grad(LOSSES[name](expected), list(twin.parameters()), **given)
        assert [grad is None for grad in found] == [grad is None for grad in wanted], name
        for a, b in zip(found, wanted, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_outputs_may_be_written_in_place(compiled):
    compiled.model.zero_grad()
    net, twin = compiled.model, copy.deepcopy(compiled.model)
    for out in (compiled(SEEDS), plain(compiled, twin, SEEDS)):
        out["a"].mul_(2).relu_()
        out["a"].sum().backward()
    assert net.second.weight.grad is None
    torch.testing.assert_close(net.first.weight.grad, twin.first.weight.grad, rtol=2e-4, atol=2e-5)
    net.zero_grad()


def test_numbers_beside_rows_are_for_training_mode(compiled):
    """Where padded and exact runs, of any number of seeds, give the number that PyTorch gives."""
    net = compiled.model
    for seeds in (SEEDS, SEEDS[:3]):
        ours, theirs = compiled(seeds), plain(compiled, net, seeds)
        assert ours["c"].shape == () and ours["a"].shape == (seeds.numel(), CLASSES)
        torch.testing.assert_close(ours["c"], theirs["c"], rtol=1e-4, atol=1e-6)


def test_hooks_are_called_with_gradients(compiled):
    """PyTorch would not call those of a parameter that is not reached: they get zeros."""
    net, seen = compiled.model, []
    handles = [net.second.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)]
    handles.append(net.between.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())))
    try:
        net.zero_grad()
        compiled(SEEDS)["a"].sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 2 and not any(grad.any() for grad in seen) and net.shift.grad is None
    net.zero_grad()


def test_a_call_leaves_nothing_behind(compiled):
    """Without garbage collection, which training on a GPU is often run without."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            compiled(SEEDS)["a"].sum().backward()
        alive = [thing for thing in gc.get_objects() if type(thing) is Gates]
    finally:
        gc.enable()
    assert not alive


class Swapped(Heads):
    """Which output comes first depends on a flag, with which the program is traced again."""

    def __init__(self):
        super().__init__()
        self.flag = nn.Dropout(0.0)

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        rows = self.first(h)[:, :3], self.second(h)
        return rows if self.flag.training else rows[::-1]


def test_of_a_program_that_was_traced_again():
    graph, net = planted_graph(nodes=400), Swapped()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), slack=0.5, warm_up=2)
    for training in (True, False):
        net.flag.train(training)
        net.zero_grad()
        step(SEEDS)[0].sum().backward()
        assert (net.first.weight.grad is not None, net.second.weight.grad is not None) == (training, not training)


class HiddenToo(Heads):
    def forward(self, blocks, x):
        return {"a": self.first(self.conv(blocks[0], x)), "x": x}


def test_rows_of_others_than_seeds_are_refused():
    graph = planted_graph(nodes=400)
    step = joestar.compile(HiddenToo(), joestar.NeighborSampler(graph, [3], seed=1), backend="eager")
    with pytest.raises(CaptureError, match=r"output\['x'\].*numbers and tensors of one shape"):
        step(SEEDS)
