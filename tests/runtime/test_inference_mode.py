"""First uses inside ``torch.inference_mode()``: nothing that lasts may be an inference tensor."""

import contextlib
import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph

IDX = torch.arange(0, 90)


def _tensors(thing, found: dict, depth: int = 0) -> None:
    """Every tensor that is reached from an object through attributes and containers."""
    if id(thing) in found or depth > 12:
        return
    found[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        inner = list(thing)
    else:
        inner = list(getattr(thing, "__dict__", {}).values())
    for value in inner:
        if not isinstance(value, type(sys)):
            _tensors(value, found, depth + 1)


def _inference_tensors(*roots) -> list[torch.Tensor]:
    found = {}
    for root in roots:
        _tensors(root, found)
    tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 10
    return [tensor for tensor in tensors if tensor.is_inference()]


class Weighted(torch.nn.Module):
    """Reads a value of the whole graph that is computed before the first step (hoisted)."""

    def __init__(self):
        super().__init__()
        self.convs = joestar.nn.GCN(FEATURES, 8, 2, out_channels=CLASSES)

    def forward(self, blocks, x):
        return self.convs(blocks, x * blocks[0].graph.ndata["w"].sigmoid()[blocks[0].srcs][:, None])


def test_compiled_in_inference_mode():
    """Only ``compile`` is called inside: what it makes is written in steps. ``SGD`` with momentum, averages, scores."""
    torch.manual_seed(0)
    graph, losses = planted_graph(nodes=400), []
    graph.ndata["w"] = torch.randn(400)
    sampler = joestar.NeighborSampler(graph, [3, 2], seed=7)
    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        torch.manual_seed(1)
        net = Weighted()
        adam = torch.optim.Adam(net.parameters(), 1e-2)
        with mode, cheaper(cheapest):
            step = joestar.compile(net, sampler, F.cross_entropy, adam, backend="eager", ema=0.9, accumulate=2)
        with cheaper(cheapest):
            losses.append([*map(float, step.epoch(IDX, 30)), float(step(IDX[:30])), step.evaluate(IDX)["accuracy"]])
        modules = [vars(module) for name, module in sys.modules.items() if name.split(".")[0] == "joestar"]
        assert not _inference_tensors(step, graph, *modules)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model", ["GAT", "GCN", "GraphSAGE"])
@pytest.mark.every(4)
def test_exact_inference_is_made_in_inference_mode(model):
    """Captured in the real way, which writes to new tensors; and used again outside."""
    torch.manual_seed(0)
    graph = planted_graph(nodes=400)
    net = getattr(joestar.nn, model)(FEATURES, 8, 2, out_channels=CLASSES)
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3, 2], seed=7), backend="eager")
    with torch.inference_mode():
        found = joestar.inference(net, graph, progress=False), step.predict(IDX, full=True)
    assert not _inference_tensors(step, graph)
    expected = joestar.inference(net, graph, progress=False)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], expected[IDX])
    torch.testing.assert_close(step.predict(IDX, full=True), expected[IDX])


def test_first_uses_in_inference_mode():
    torch.manual_seed(0)
    graph = planted_graph(nodes=400)
    graph.ndata["w"] = torch.randn(400)
    net = Weighted()
    sampler = joestar.NeighborSampler(graph, [3, 2], seed=7)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-2), backend="eager")
    net.eval()
    callable_form = joestar.compile(net, sampler, backend="eager")
    with torch.inference_mode():
        rows = step.predict(IDX)
        first = callable_form(IDX[:20])
        accuracy = step.evaluate(IDX[:30])["accuracy"]
    assert not rows.requires_grad and not first.requires_grad
    modules = [vars(module) for name, module in sys.modules.items() if name.split(".")[0] == "joestar"]
    gc.collect()
    lasting = _inference_tensors(step, callable_form, graph, *modules)
    assert not lasting, [tuple(tensor.shape) for tensor in lasting]
    assert torch.equal(step.predict(IDX), rows) and step.evaluate(IDX[:30])["accuracy"] == accuracy
    net.train()
    with cheaper(cheapest):
        list(step.epoch(IDX, 30))
        callable_form(IDX[:20]).sum().backward()
    rows = step.predict(IDX)
    graph.ndata["w"].add_(1.0)  # what was hoisted is computed again
    assert not torch.equal(step.predict(IDX), rows)


@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_steps_in_and_out_of_inference_mode(execution):
    """Training goes on wherever it was begun: nothing that a step keeps or gives is an inference tensor."""

    def losses(guards):
        step, found = make_step(execution), []
        for guard in guards:
            with guard:
                for loss in step.epoch(IDX, 30):
                    assert not loss.is_inference()
                    found.append(loss)
                found.append(step(IDX[:20]))
                assert step.predict(IDX[:4]).requires_grad is False
        return torch.stack(found)

    modes = [torch.inference_mode(), contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()]
    with cheaper(cheapest):
        expected = losses([contextlib.nullcontext()] * 4)
    assert torch.equal(losses(modes), expected)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.each("guard")
def test_the_callable_form_follows_no_grad(execution, guard):
    """A model in training mode, too: losses that are only logged must not keep what a backward pass would need."""
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(FEATURES, 8, 2, out_channels=CLASSES)
    sampler = joestar.NeighborSampler(planted_graph(nodes=400), [3, 2])
    compiled = joestar.compile(net, sampler, backend="eager", execution=execution)
    with guard():
        assert not compiled(IDX[:20]).requires_grad
    assert compiled(IDX[:20]).requires_grad
    with guard():
        assert not compiled(IDX[:20]).requires_grad
