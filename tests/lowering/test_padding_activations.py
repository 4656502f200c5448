"""Every activation of torch.nn on nodes and edges with values that overflow in padding, against plain PyTorch."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import activation

from joestar import fn
from joestar.graph_api import Graph

from .harness import NUM_CLASSES, NUM_FEATURES, NUM_NODES, SEEDS, WIDTH, Case, same

pytestmark = pytest.mark.usefixtures("quick_captures")

EXPLAINED = {
    "RReLU": "random in training", "MultiheadAttention": "in test_padding_models",
    "Softmax2d": "of images", "GLU": "halves the width; test_padding_rows",
}  # fmt: skip
OPTIONS = {"Threshold": (0.1, -0.5), "Softmax": (1,), "Softmin": (1,), "LogSoftmax": (1,)}


def modules() -> dict[str, nn.Module]:
    """Every activation, by name, and variants."""
    names = [name for name in activation.__all__ if name not in EXPLAINED]
    found = {name: getattr(nn, name)(*OPTIONS.get(name, ())) for name in names}
    return {
        **found,
        "GELU of tanh": nn.GELU("tanh"),
        "Softplus, steep": nn.Softplus(30.0, 5.0),
        "PReLU": nn.PReLU(WIDTH),
    }


FUNCTIONS = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "sinh": torch.sinh, "cosh": torch.cosh,
    "square": torch.square, "cube": lambda x: x**3, "x * x * x": lambda x: x * x * x, "tan": torch.tan,
    "sinc": torch.sinc, "logcosh": lambda x: x.cosh().log(), "swish by hand": lambda x: x * torch.sigmoid(3 * x),
    "sigmoid by hand": lambda x: 1 / (1 + (-x).exp()), "softplus by hand": lambda x: (1 + x.exp()).log(),
    "tanh by hand": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()), "gauss": lambda x: (-(x * x)).exp(),
    "softmax by hand": lambda x: x.exp() / x.exp().sum(1, keepdim=True), "norm": lambda x: x / x.norm(dim=1)[:, None],
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)), "squash": lambda x: x * (x * x).sum(1, keepdim=True).sqrt(),
    "erfcx": torch.special.erfcx, "i1": torch.special.i1, "logit": lambda x: torch.logit(x.sigmoid()),
}  # fmt: skip


def test_every_activation_is_there():
    assert {"ReLU", "GELU", "Mish", "Hardswish", "LogSigmoid"} <= modules().keys()
    assert all(inspect.isclass(getattr(nn, name)) for name in EXPLAINED)


def graph() -> Graph:
    """Edge data that belong to their destination's features, and edges never sampled that hold NaN or 1e300.

    Edge 0, whose data padded edges read, is one of those.
    """
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(0, NUM_NODES, (170,), generator=generator)
    dst = torch.randint(0, NUM_NODES - 1, (170,), generator=generator) + 1
    dst[(dst == 30) | (dst == 31)] = 7
    bad = torch.tensor([[5, 6, 7, 8], [0, 0, 30, 31]])
    x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    w = 300 + torch.randn(170, generator=generator, dtype=torch.float64)
    w = torch.cat([torch.tensor([float("nan"), 1e300, -1e300, 1e300], dtype=torch.float64), w])
    y = torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator)
    return Graph.from_edge_index(torch.cat([bad, torch.stack([src, dst])], 1), NUM_NODES, {"x": x, "y": y}, {"w": w})


class Activated(nn.Module):
    """Every function of node rows and of edge values, each with a slope and a weight of its own.

    Arguments are what is left of about 300 when the mean over a row's edges is taken away: small in true rows, while
    in padded ones nothing is taken away.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.modules_ = nn.ModuleList(modules().values())
        self.functions = [*self.modules_, *FUNCTIONS.values()]
        count = len(self.functions)
        self.slope = nn.Parameter(torch.ones(2, count, 1))
        self.weight = nn.Parameter(torch.ones(2, count, WIDTH, NUM_CLASSES))

    def forward(self, blocks, x):
        (b,) = blocks
        h = torch.tanh(self.first(x)) + 300
        nodes = h[: b.num_dst] - b.pull(fn.copy_u(h), "mean")
        w = b.edata["w"]
        edges = w[:, None] - b.apply_edges(fn.copy_v(b.pull(fn.copy_e(w), "mean")[:, None])) + h.mean() - 300
        out = 0
        for i, f in enumerate(self.functions):
            out = out + f(nodes * self.slope[0, i].tanh()) @ self.weight[0, i]
            values = f(edges.expand(-1, WIDTH) * self.slope[1, i].tanh()) @ self.weight[1, i]
            out = out + b.pull(fn.copy_e(values), "sum")
        return out


def test_activations():
    """Losses and gradients: slopes and weights tell the function that went wrong."""
    case = Case(Activated(), loss=lambda z, y: z.sin().mean(), graph=graph(), fanouts=(4,))
    seeds = case.seeds([seed for seed in SEEDS if seed != 0])
    expected, padded = case.eager(seeds, 0), case.padded(seeds, 0)
    names, wrong = [*modules(), *FUNCTIONS], set()
    for parameter in ("slope", "weight"):
        assert expected.grads[parameter].isfinite().all()
        assert expected.grads[parameter].any(-1).any()
        off = (padded.grads[parameter] - expected.grads[parameter]).abs() > 1e-9
        bad = ~torch.isfinite(padded.grads[parameter]) | off
        wrong |= {(("nodes", "edges")[place], names[i]) for place, i, *_ in bad.nonzero().tolist()}
    assert not wrong, sorted(wrong)
    same(padded, expected, 1e-9)
