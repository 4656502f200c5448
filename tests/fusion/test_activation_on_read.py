"""Activations and norms that aggregations compute where they read rows: where, what stays the same, and when not."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS
from torch import fx, nn

import joestar.nn as jnn
from joestar.fusion import run_passes

from .graphs import ATEN, JOESTAR, Model, again, captured, count, mean, only, reasons
from .layer_forms import FORMS, Sage
from .together import captured_together, cases_together, check_each

PATTERN = "activation-on-read"
FUSED = JOESTAR.aggregate_activated.default
FIRST = ("spmm-gemm-order",)
"""Left out: sums come before products, as they do on large graphs."""
FUNCTIONS = {
    "elu": F.elu, "celu": lambda u: F.celu(u, 0.7), "selu": F.selu, "relu6": F.relu6, "gelu": F.gelu,
    "tanh gelu": nn.GELU("tanh"), "silu": F.silu, "mish": F.mish, "tanh": torch.tanh, "leaky": nn.LeakyReLU(0.2),
    "sigmoid": torch.sigmoid, "logsigmoid": F.logsigmoid, "softplus": nn.Softplus(2.0), "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "hardtanh": nn.Hardtanh(-0.5, 0.7),
}  # fmt: skip
"""Activations as people call them."""


@pytest.fixture
def gpu_choices(monkeypatch):
    """Programs are rewritten as for a GPU, and run on the CPU."""
    passes_for(monkeypatch, "cuda")


class Activated(nn.Module):
    """Two sums over neighbours and own rows, with ``f`` and dropout in between."""

    def __init__(self, f, norm: nn.Module | None = None, dropout: float = 0.0, conv=Sage):
        super().__init__()
        self.first, self.second = conv(NUM_FEATURES, 8), conv(8, NUM_CLASSES)
        self.f, self.norm, self.dropout = f, norm or nn.Identity(), dropout

    def forward(self, blocks, x):
        h = self.f(self.norm(self.first(blocks[0], x)))
        return self.second(blocks[1], F.dropout(h, self.dropout, self.training))


def norms() -> dict[str, nn.Module]:
    made = {
        "affine": nn.LayerNorm(8), "no shift": nn.LayerNorm(8, bias=False), "plain": nn.LayerNorm(8, 0.1, False),
    }  # fmt: skip
    for norm in made.values():
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def models(dropout: float) -> dict[str, nn.Module]:
    """Every activation, with a norm and without, in front of sums of three kinds."""
    convs = [Sage, FORMS["mean with self-loops"][0], FORMS["GIN, eps a number"][0]]
    made = {name: Activated(f, None, dropout, convs[i % 3]) for i, (name, f) in enumerate(FUNCTIONS.items())}
    for i, (kind, norm) in enumerate(norms().items()):
        made[f"{kind} norm"] = Activated((F.gelu, torch.relu, nn.Identity())[i], norm, dropout, convs[i])
    return made


@pytest.mark.usefixtures("gpu_choices")
@pytest.mark.parametrize(("dropout", "some"), [(0.0, 6), (0.4, 4), pytest.param(0.0, 0, marks=pytest.mark.fuzz)])
def test_every_activation_is_fused_and_agrees(dropout, some):
    """Without dropout with PyTorch; under it with the program without passes, whose masks are the same."""
    torch.manual_seed(0)
    made = {name: model.double() for name, model in list(models(dropout).items())[-some:]}
    cases = cases_together(made, fanouts=(3, 2), tight=True, disable=FIRST)
    found = check_each(cases, (SEEDS, (5, 5, 47)), plain=not dropout, tolerance=1e-7)  # see ops/test_activated.py
    assert not found, "\n".join(found)
    for name, case in cases.items():
        assert count(case.program.captured.gm, FUSED) == 1, name
        assert count(case.program.captured.gm, ATEN.layer_norm.default) == 0, name


def test_apart_on_a_cpu_unless_chosen():
    looped = FORMS["mean with self-loops"][0]
    case = captured(Activated(F.elu, dropout=0.5, conv=looped), disable=only(PATTERN))
    assert reasons(case, PATTERN) == ["the rows come from no norm, and no activation but ReLU", "apart is chosen"]
    (site,) = (site for site in case.program.sites if site.kind == "activation")
    assert (site.key, site.options, site.default) == ("activation:hop0", ("apart", "on-read"), "apart")
    fused = again(case, choices={site.key: "on-read"}).program.captured.gm
    (node,) = (n for n in fused.graph.nodes if n.target is FUSED)
    assert (node.args[6], *node.args[8:10]) == (2.0, False, "elu 1.0 1.0 1.0")
    assert count(fused, ATEN.elu.default) == count(fused, JOESTAR.keyed_dropout.default) == 0


def _read_twice(model, blocks, x):
    h = torch.tanh(model.conv(blocks[0], x))
    return torch.cat([mean(blocks[1], h), h[: blocks[1].num_dst] * 2], 1)


def _normed(norm):
    return lambda model, blocks, x: mean(blocks[1], norm(model.conv(blocks[0], x)).tanh())


REFUSED = {
    "the rows come from no norm, and no activation but ReLU": lambda m, b, x: mean(b[1], m.conv(b[0], x).relu()),
    "the activated rows have another reader": _read_twice,
    "the norm has no eps": _normed(lambda h: F.layer_norm(h, (8,), eps=0.0)),
    "what is activated is no matrix of floats": lambda m, b, x: mean(
        b[1], m.conv(b[0], x).unflatten(1, (2, 4)).tanh()
    ).flatten(1),
}


def test_must_not_fire():
    widths = {"the activated rows have another reader": 16}
    made = {reason: Model(f, widths.get(reason, 8), conv=Sage(NUM_FEATURES, 8)) for reason, f in REFUSED.items()}
    looped = FORMS["mean with self-loops"][0]
    wide = Activated(torch.tanh, nn.LayerNorm(300))
    wide.first, wide.second = looped(NUM_FEATURES, 300), looped(300, NUM_CLASSES)
    made["the norm is over more than 256 columns"] = wide
    cases = captured_together({r: m.double() for r, m in made.items()}, disable=only(PATTERN))
    for reason, case in cases.items():
        assert reason in reasons(case, PATTERN)
        assert count(case.program.captured.gm, FUSED) == 0


@pytest.mark.parametrize(("autocast", "fused"), [(None, 2), (torch.bfloat16, 1), (torch.float16, 1)])
def test_what_autocast_keeps_in_float32_is_not_rounded(autocast, fused):
    """No product reads the sums; where one does, see ``test_norms_autocast.py``."""
    case = normed_and_not()
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    roles, sizes = list(case.program.lowered_roles), case.program.sizes
    _, context = run_passes(gm, roles, only(PATTERN), device="cuda", sizes=sizes, autocast=autocast)
    assert count(gm, FUSED) == fused
    kept = [place.detail for place in context.places if "is in float32" in place.detail]
    assert len(kept) == 2 - fused


@functools.cache
def normed_and_not():
    """Sums of rows behind a norm, and behind an activation alone."""
    norm = nn.LayerNorm(8)
    both = lambda m, b, x: mean(b[1], F.gelu(norm(m.conv(b[0], x)))) + mean(b[1], F.elu(m.conv(b[0], x)))  # noqa: E731
    return captured(Model(both, 8, conv=Sage(NUM_FEATURES, 8), norm=norm), disable=only(PATTERN))


def test_a_bias_is_added_on_reading_as_well(gpu_choices):
    torch.manual_seed(0)
    model = jnn.GraphSAGE(NUM_FEATURES, 40, 3, NUM_CLASSES, act="elu").double()
    case = captured(model, (3, 2, 2), disable=FIRST)
    taken = {site.key: "on-read" for site in case.program.sites if site.kind == "bias"}
    assert len(taken) == 2
    on = again(case, choices=taken)
    for node in (n for n in on.program.captured.gm.graph.nodes if n.target is FUSED):
        assert len(node.args) == 14 and node.args[2].target is ATEN.linear.default and len(node.args[2].args) == 2
    expected = case.eager(case.seeds(), 0)
    for run in (case.exact, on.exact, on.padded):
        found = run(case.seeds(), 0)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-12)
        for name, grad in expected.grads.items():
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-10, atol=1e-12)


def test_rows_are_stored_once():
    """What autograd keeps of a layer are its product's rows, not those behind norm, activation and dropout."""
    x = torch.randn(6, 40, requires_grad=True)
    gain = torch.ones(40, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda value: value):
        bits = torch.full((6, 2), -1, dtype=torch.int32)
        args = None, None, bits, 2.0, "sum", True, "gelu none", gain, None, 1e-5
        JOESTAR.aggregate_activated(torch.tensor([0, 1]), torch.tensor([2]), x, *args)
    assert sorted(list(value.shape) for value in saved) == [[1], [2], [6, 2], [6, 40], [40]]
