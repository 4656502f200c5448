"""Callable steps whose losses read only some of what the model returns: gradients are plain PyTorch's, or ``None``.

Through the default backend, whose backward pass gives zeros for what a loss leaves out.
"""

import copy
import gc
import random

import pytest
import torch
from captures import cheaper, quick
from torch import nn

import joestar
from joestar.errors import CaptureError
from joestar.runtime.output_gradients import Gates
from tests.runtime.common import CLASSES, FEATURES, planted_graph

SEEDS = torch.arange(2, 42)
DRAWN = 40


class Heads(nn.Module):
    """Two heads on a trunk, one of which reads a layer of its own; in training mode a number beside them."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, 8)
        self.first, self.between, self.second = nn.Linear(8, CLASSES), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x).relu()
        none = torch.zeros_like(self.shift).sum()  # reads the parameter, whose gradient does not flow from here
        rows = {"a": self.first(h) + none, "b": self.second(self.between(h).tanh()) + self.shift}
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


def test_hooks_are_called_where_plain_pytorch_calls_them(compiled):
    """Not those of a parameter that a loss does not reach; and as before where another part of the loss reads it."""
    net, twin, seen = compiled.model, copy.deepcopy(compiled.model), ([], [])
    handles = []
    for model, mine in zip((net, twin), seen, strict=True):
        model.zero_grad()
        for name in ("second", "first", "between"):
            weight = getattr(model, name).weight
            handles.append(weight.register_hook(lambda grad, name=name, mine=mine: mine.append(name) or grad * 2))
            after = weight.register_post_accumulate_grad_hook(
                lambda p, name=name, mine=mine: mine.append(name + " after")
            )
            handles.append(after)
    try:
        for extra in (False, True, False):
            for model, out in ((net, compiled(SEEDS)), (twin, plain(compiled, twin, SEEDS))):
                (out["a"].sum() + (model.second.weight.square().sum() if extra else 0)).backward()
    finally:
        for handle in handles:
            handle.remove()
    assert seen[0].count("first") == 3 and seen[0].count("second after") == 1 and "between" not in seen[0]
    assert sorted(seen[0]) == sorted(seen[1])
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-4, atol=2e-5)
    assert not net.second.weight._backward_hooks
    net.zero_grad()


def test_an_optimizer_in_the_hooks_behind_gradients(compiled):
    """As people save memory: a parameter is updated, and its gradient dropped, as soon as it is there. Another hook
    behind is called as well, and neither for a head that has no gradient."""
    net, twin = compiled.model, copy.deepcopy(compiled.model)
    state, called, handles = copy.deepcopy(net.state_dict()), ([], []), []
    for model, mine in zip((net, twin), called, strict=True):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            adam = torch.optim.AdamW([parameter], 1e-2, weight_decay=0.3)

            def step(p, adam=adam):
                adam.step()
                adam.zero_grad()

            handles.append(parameter.register_post_accumulate_grad_hook(step))
            handles.append(parameter.register_post_accumulate_grad_hook(lambda p, n=name, m=mine: m.append(n)))
    try:
        for name in ("ab", "a", "b", "a", "a"):
            for out in (compiled(SEEDS), plain(compiled, twin, SEEDS)):
                LOSSES[name](out).backward()
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(called[0]) == sorted(called[1]) and called[0].count("second.bias") == 2
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    net.load_state_dict(state)


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


OPS = {
    "linear": lambda m, a, b, k: m.linears[k](a),
    "scale": lambda m, a, b, k: a * m.scales[k],
    "sum": lambda m, a, b, k: a + b.tanh(),
    "product": lambda m, a, b, k: a * b,
    "detached": lambda m, a, b, k: a.detach() + 0.5 * b,
    "without gradients": lambda m, a, b, k: m.without_gradients(a, k),
    "compared": lambda m, a, b, k: (a > b).to(a.dtype) * m.scales[k],
    "chosen": lambda m, a, b, k: torch.where(a > 0, b, m.scales[k]),
    "masked": lambda m, a, b, k: b.masked_fill(a > 0, 0.5),
    "largest": lambda m, a, b, k: b.gather(1, a.argmax(1, keepdim=True).expand(-1, 4)),
    "rounded": lambda m, a, b, k: a.round() + b,
    "zeros alike": lambda m, a, b, k: torch.zeros_like(a) + b,
    "ones alike": lambda m, a, b, k: b * torch.ones_like(a),
    "new": lambda m, a, b, k: torch.cat([a.new_full((a.shape[0], 2), 0.5), b[:, :2]], 1),
    "integers": lambda m, a, b, k: b + a.long(),
    "finite": lambda m, a, b, k: b * a.isfinite(),
    "parameter alike": lambda m, a, b, k: a + torch.zeros_like(m.scales[k]),
    "detached parameter": lambda m, a, b, k: a @ m.linears[k].weight.detach(),
    "sizes": lambda m, a, b, k: b * a.shape[0] ** -0.5,
}  # fmt: skip


class Drawn(nn.Module):
    """Random operations on rows of seeds ``[n, 4]``, some of which are returned."""

    def __init__(self, number):
        super().__init__()
        draw = random.Random(f"outputs {number}")
        self.conv = joestar.nn.SAGEConv(FEATURES, 4)
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scales = nn.ParameterList(torch.rand(4) for _ in range(4))
        self.lines = [
            (draw.choice(list(OPS)), draw.randrange(max(0, row - 2), row), draw.randrange(row), draw.randrange(4))
            for row in range(1, 9)
        ]
        self.returned = draw.sample(range(1, 9), draw.randint(2, 4))

    def forward(self, blocks, x):
        rows = [self.conv(blocks[0], x).tanh()]
        for name, a, b, place in self.lines:
            rows.append(OPS[name](self, rows[a], rows[b], place))
        return tuple(rows[row] for row in self.returned)

    @torch.no_grad()
    def without_gradients(self, rows, place):
        return self.linears[place](rows).exp()


def test_every_operation_is_drawn():
    drawn = {name for number in range(DRAWN) for name, *_ in Drawn(number).lines}
    assert drawn == set(OPS)


@pytest.mark.parametrize("number", range(DRAWN))
@pytest.mark.every(8)
def test_what_reaches_an_output_is_what_autograd_finds(number):
    torch.manual_seed(number)
    graph, net = planted_graph(nodes=400), Drawn(number)
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), backend="eager")
    with cheaper(quick):
        step(SEEDS)
    reach = step._executor("logits").program.reach
    for place, out in enumerate(plain(step, net, SEEDS)):
        params = list(net.parameters())
        grads = [None] * len(params)
        if out.requires_grad:
            grads = torch.autograd.grad(out.sum(), params, allow_unused=True, retain_graph=True)
        for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
            assert (place in reach.of.get(id(param), ())) == (grad is not None), (place, name)


class Beside(nn.Module):
    """Returns what it holds: buffers, one of which it writes, a plain attribute, a parameter and views of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = joestar.nn.SAGEConv(FEATURES, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("temperature", torch.tensor(0.07))
        self.register_buffer("queue", torch.arange(12.0).view(4, 3))
        self.plain = torch.arange(5.0)

    def forward(self, blocks, x):
        self.calls += 1
        h = self.conv(blocks[0], x).relu()
        held = {"calls": self.calls, "queue": self.queue, "t": self.temperature, "plain": self.plain}
        views = {"prototypes": self.a.weight.t(), "bias": self.b.bias, "row": self.a.weight[:2], "again": self.queue}
        return {**held, "a": self.a(h), "b": self.b(h), **views} if self.training else {"a": self.a(h)}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_the_model_holds_may_be_returned_beside_rows(backend):
    """TorchDynamo gives no output for what is an input: others took its place."""
    torch.manual_seed(0)
    graph, net = planted_graph(nodes=400), Beside()
    twin = copy.deepcopy(net)
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), backend=backend, slack=0.5, warm_up=2)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01, weight_decay=1.0) for each in (net, twin)]
    for _ in range(3):
        found, wanted = step(SEEDS), plain(step, twin, SEEDS)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=name)
        for optimizer, out in zip(optimizers, (found, wanted), strict=True):
            optimizer.zero_grad()
            (out["a"] @ out["prototypes"].T / out["t"]).square().mean().backward()
            optimizer.step()
        assert net.b.weight.grad is None and net.b.bias.grad is None
        for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
