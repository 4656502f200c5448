"""Hoisting: what no step changes is computed once, again when it was written in place, and nothing else is touched."""

import pytest
import torch
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS, same, small_graph
from torch import nn

import joestar
import joestar.nn as jnn
from joestar import fn
from joestar.fusion.clean import hoist
from joestar.fusion.clean.hoist import Hoisted
from joestar.lowering.inputs import Kind

from .graphs import ATEN, Model, captured, captured_each, count, mean, only

PATTERN = "hoist"
BASE = ("extract-select",)
ON, OFF = only(*BASE, PATTERN), only(*BASE)


def normalised(m, blocks, x):
    """Degrees of the whole graph, in every step."""
    graph = blocks[0].graph
    scale = graph.in_degrees().clamp(min=1).double().rsqrt()
    return mean(blocks[1], blocks[0].pull(fn.copy_u(x * scale[blocks[0].srcs.long()][:, None]), "sum"))


def hoisted(case) -> list[list[int]]:
    return [list(value.value.shape) for value in case.program.hoisted]


def test_before_and_after():
    before, after = captured_each(Model(normalised), disables=(OFF, ON))
    assert (count(before.trace(), ATEN.rsqrt.default), count(after.trace(), ATEN.rsqrt.default)) == (1, 0)
    assert hoisted(after) == [[48]]
    degrees = after.graph.in_degrees().clamp(min=1).double()
    torch.testing.assert_close(after.program.hoisted[0].value, degrees.rsqrt())
    assert sum(role.held for role in after.program.captured.roles) == 1 + sum(
        role.held for role in before.program.captured.roles
    )
    last = after.program.captured.roles[-1]
    assert last.kind is Kind.HOISTED


def test_same_numbers():
    models = (lambda: Model(normalised), lambda: jnn.GCN(NUM_FEATURES, 8, 2, NUM_CLASSES))
    for make in models:
        on, off = captured_each(make(), disables=(ON, OFF))
        for step, batch in enumerate((SEEDS, (5, 5, 47))):
            expected = off.exact(off.seeds(batch), step)
            same(on.exact(on.seeds(batch), step), expected, 1e-12)
            same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_a_bias_of_sampling_is_prepared_once():
    graph = small_graph()
    graph.edata["w"] = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Biased:
        def __init__(self):
            self.graph = graph

        def sample(self, graph, seeds):
            probs = graph.edata["w"].square().float() + 0.1
            return [graph[:, seeds].individual_sample(3, probs=probs)]

    case = captured(Model(lambda m, blocks, x: mean(blocks[0], x)), graph=graph, sampler=Biased(), disable=ON)
    assert [graph.num_edges] in hoisted(case)


def test_must_not_fire():
    """Parameters, buffers of the model, batch statistics and plain views."""

    def model_tensors(m, blocks, x):
        y = mean(blocks[0], x * (m.weight.exp() + m.counter.exp()))
        return mean(blocks[1], y + blocks[1].graph.ndata["x"].T.T.mean() * 0 * m.weight.sum())

    class Own(Model):
        def __init__(self):
            super().__init__(model_tensors)
            self.weight = nn.Parameter(torch.randn(NUM_FEATURES))
            self.register_buffer("counter", torch.ones(NUM_FEATURES))

    case = captured(Own(), disable=ON)
    assert hoisted(case) == [[]], "the mean of all features, and nothing of the model"
    assert count(case.program.captured.gm, ATEN.exp.default) == 2
    assert not hoisted(captured(Model(lambda m, b, x: mean(b[1], mean(b[0], x)), disable=ON)))


WRITES = {
    "in place": lambda t: t.mul_(2),
    "an entry": lambda t: t.__setitem__(5, 9.0),
    "through NumPy": lambda t: t.numpy().__setitem__(slice(3, 9), 4.0),
    "two exchanged through NumPy": lambda t: t.numpy().__setitem__([1, 2], t.numpy()[[2, 1]]),
    "through .data": lambda t: t.data.add_(1),
    "through memory": lambda t: torch.from_dlpack(t).add_(1),
}
UNCOUNTED = ("through NumPy", "two exchanged through NumPy", "through .data", "through memory")
FORMS = {
    "vector": lambda t: t, "transposed": lambda t: t.view(24, 2).t(), "number": lambda t: t[5],
    "64 bits": lambda t: t.double(), "16 bits": lambda t: t.half(), "integers": lambda t: t.int(),
}  # fmt: skip


def squared(source) -> Hoisted:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(ATEN.square.default, (graph.placeholder("x"),)))
    return Hoisted(source.square(), torch.fx.GraphModule(nn.Module(), graph), [source])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_writes_that_are_seen(form):
    """Every write to a small tensor in the computer's memory, whoever makes it; and nothing else."""
    for how, write in WRITES.items():
        base = torch.linspace(0.5, 50, 48)
        source = form(base)
        value = squared(source)
        assert not value.refresh()
        own = source if source.untyped_storage().data_ptr() != base.untyped_storage().data_ptr() else base
        write(own)
        if source.dim() == 0 and "exchanged" in how:
            continue  # another part of the memory
        assert value.refresh() and not value.refresh(), how
        assert torch.equal(value.value, source.square())


def test_writes_to_large_tensors_are_those_that_pytorch_counts(monkeypatch):
    monkeypatch.setattr(hoist, "WATCHED_BYTES", 100)
    for how, write in WRITES.items():
        source = torch.linspace(0.5, 50, 48)
        value = squared(source)
        write(source)
        assert value.refresh() is (how not in UNCOUNTED), how
        torch.autograd.graph.increment_version(source)  # what a user says after a write that is not counted
        assert value.refresh()


def test_contents_on_another_device_are_not_read():
    """A checksum would wait for a GPU."""
    assert hoist._checksum(torch.empty(5, device="meta")) == 0


def test_parts_of_what_steps_write_are_not_hoisted():
    """Features that are a part of a parameter's memory, and a buffer that is written through a view."""
    table = torch.rand(50, NUM_FEATURES, dtype=torch.float64)
    parameter = nn.Parameter(table)
    graph = small_graph()
    graph.ndata["part"] = parameter.detach()[2:]

    def f(m, blocks, x):
        scale = blocks[0].graph.ndata["part"].square()
        return mean(blocks[0], x) + m.table.mean(0) + torch.index_select(scale, 0, blocks[0].dsts)

    model = Model(f)
    model.table = parameter
    case = captured(model, fanouts=(3,), disable=ON, graph=graph)
    assert not hoisted(case)


def test_written_in_place_between_epochs():
    """Features written with copy_ are read anew, hoisted values included."""
    torch.manual_seed(0)
    graph = small_graph()
    graph.ndata["scale"] = torch.rand(48, dtype=torch.float64) + 0.5

    def f(m, blocks, x):
        factor = blocks[0].graph.ndata["scale"].square()
        return mean(blocks[1], blocks[0].pull(fn.copy_u(x * factor[blocks[0].srcs.long()][:, None]), "sum"))

    model = Model(f).double().eval()
    steps = [joestar.compile(model, joestar.NeighborSampler(graph, [3, 2]), backend="eager", disable_passes=disable)
             for disable in ((), (PATTERN,))]  # fmt: skip
    seeds = torch.arange(20)
    results = []
    for _ in range(2):
        on, off = (step.predict(seeds, 10) for step in steps)
        torch.testing.assert_close(on, off, rtol=1e-12, atol=1e-12)
        results.append(on)
        graph.ndata["scale"].numpy()[:] *= 2
    assert not torch.allclose(results[0], results[1])
