"""Values near the end of float16's range: under autocast programs are finite wherever the program as written is."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest, passes_for
from lowering.harness import NUM_FEATURES, seeded, small_graph
from torch import nn

import joestar
from joestar import fn
from joestar import nn as jnn
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .graphs import ALL
from .layer_forms import FORMS, Form

WIDTH = 6
SEEDS = torch.tensor([9, 3, 22, 45, 1, 47, 2, 17])  # the last nodes have no edges
RANGE = 65504.0
EXTENTS = (1.0, RANGE / 8, RANGE)
"""Largest entries of features, and of the gradient of the results."""


class Heads(Form):
    """``joestar.nn.GATConv`` of two heads; ``loops``: nodes without edges attend to themselves."""

    def __init__(self, inputs: int, outputs: int, loops: bool = False):
        super().__init__()
        self.conv = jnn.GATConv(inputs, outputs // 2, heads=2, dropout=0.0, add_self_loops=loops)

    def forward(self, block, x):
        return self.conv(block, x)


class Weighted(Form):
    """A sum of products with weights of edges, or a mean, or a sum of rows with factors."""

    def __init__(self, inputs: int, outputs: int, kind: str = "weights"):
        super().__init__()
        self.lin, self.kind = nn.Linear(inputs, outputs, bias=False), kind

    def forward(self, block, x):
        h = self.lin(x)
        if self.kind == "weights":
            return block.pull(fn.u_mul_e(h, block.edata["w"].to(h.dtype)), "sum")
        if self.kind == "mean":
            return block.pull(fn.copy_u(h), "mean")
        factors = (1 / (block.out_degrees() + 1))[:, None]
        return block.pull(fn.copy_u(h * factors), "sum") / block.in_degrees().clamp(min=1)[:, None]


class Behind(Weighted):
    """The product follows the aggregation, and a factor of destinations the product."""

    def forward(self, block, x):
        if self.kind == "sum":
            return self.lin(block.pull(fn.copy_u(x), "sum"))
        if self.kind == "mean":
            return self.lin(block.pull(fn.copy_u(x), "mean"))
        return self.lin(block.pull(fn.copy_u(x), "sum")) * (block.in_degrees() * 30.0)[:, None]


LAYERS = {name: form for name, (form, options) in FORMS.items() if not options} | {
    "GAT": Heads,
    "GAT, loops": functools.partial(Heads, loops=True),
    **{f"product first, {kind}": functools.partial(Weighted, kind=kind) for kind in ("weights", "mean", "factors")},
    **{f"product last, {kind}": functools.partial(Behind, kind=kind) for kind in ("sum", "mean", "factors")},
}


CLAMPED = {"mean and deviation", "PNA"}
"""Layers with a difference of squares: whether it is negative, and its gradient none, is a matter of rounding."""


class Two(nn.Module):
    """Two layers with ``act`` in between; the results may be normalised, which gives zeros infinite gradients."""

    def __init__(self, form, act, normalise: bool):
        super().__init__()
        initial = getattr(form, "wants_initial", False)
        self.begin = nn.Linear(NUM_FEATURES, WIDTH) if initial else None
        self.layers = nn.ModuleList([form(WIDTH if initial else NUM_FEATURES, WIDTH), form(WIDTH, WIDTH)])
        self.act, self.normalise = act, normalise

    def forward(self, blocks, x):
        initial = ()
        if self.begin is not None:
            x = self.begin(x)
            initial = (x,)
        x = self.layers[1](blocks[1], self.act(self.layers[0](blocks[0], x, *initial)), *initial)
        return F.normalize(x) if self.normalise else x


def graph_of(scale: float):
    graph = small_graph(isolated=6)
    x = graph.ndata["x"].float()
    graph.ndata["x"] = x / x.abs().max() * scale
    generator = torch.Generator().manual_seed(2)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=generator) * 2 - 1
    return graph


def outcome(program: Program, large: float):
    y = program.exact(SEEDS.to(program.graph.indices.dtype), step_key(0, 0, 0, "cpu"))[0][0]
    weights = torch.linspace(-1, 1, y.numel()).view_as(y) * large
    parameters = dict(program.model.named_parameters())
    grads = torch.autograd.grad((y.float() * weights).sum(), list(parameters.values()), allow_unused=True)
    return {"": y.detach()} | {name: g for name, g in zip(parameters, grads, strict=True) if g is not None}


def variants(program: Program):
    """The program under its default choices, and with the other option at every place, one after another."""
    yield {}, program
    for site in program.sites:
        for option in site.options:
            if option != site.taken and site.kind != "backward":  # its forms are those of a device
                choices = {site.key: option}
                yield choices, program.variant(replace(program.options, choices=choices))


def lost(name: str, normalise: bool) -> list[str]:
    """Where a program is not finite, and as written it is."""
    rng, found = random.Random(f"{name} {normalise}"), []
    act = rng.choice((torch.relu, F.elu, F.gelu, torch.tanh, F.leaky_relu))
    model = seeded(Two(LAYERS[name], act, normalise)).float().train()
    graph = graph_of(1.0)
    first = Program("logits", model, joestar.NeighborSampler(graph, [-1, -1]), None, Options("eager", ()))
    with cheaper(cheapest):
        first.trace(SEEDS.to(graph.indices.dtype), step_key(0, 0, 0, "cpu"))
    plain = first.variant(Options("eager", ALL, torch.float16))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    features = graph.ndata["x"].clone()
    made = list(variants(first.variant(Options("eager", (), torch.float16))))
    for extent in EXTENTS:
        graph.ndata["x"].copy_(features * extent)
        for _, program in made:
            program.refresh()
        for (choices, program), large, small in itertools.product(made, EXTENTS, (1.0, 1e-3)):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value * small)
            expected, got = outcome(plain, large), outcome(program, large)
            if name in CLAMPED:
                expected = {"": expected[""]}
            bad = [key for key, value in expected.items() if (torch.isfinite(value) & ~torch.isfinite(got[key])).any()]
            if bad:
                found.append(f"{choices}, features to {extent:g} and gradients to {large:g}, weights x {small}: {bad}")
    return found


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def rewritten_for(request, monkeypatch):
    """Programs are rewritten as for a device, and run on the CPU."""
    passes_for(monkeypatch, request.param)


@pytest.mark.parametrize("normalise", [False, True], ids=["as they are", "normalised"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.every(32)
def test_finite_where_the_program_as_written_is(name, normalise):
    assert not (found := lost(name, normalise)), "\n".join(found)
