"""Sizes of sampled sets used as numbers become counts: padded equals exact and eager, or is refused."""

import math

import pytest
import sympy
import torch
from torch import fx

from joestar.errors import PaddingError
from joestar.lowering.symbolic import emit, evaluate

from .harness import NEWER, WIDTH, assert_refused, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")


def test_arithmetic():
    check_rows({
        "x / n": lambda m, b, h: h / b.num_dst + h.sum(0) / h.shape[0] + h / len(h),
        "x * n, x + n, n - x": lambda m, b, h: h * b.num_src + (h + b.num_src) / b.num_src + (b.num_src - h),
        "n / x": lambda m, b, h: b.num_src / (h.abs() + 1),
        "x // n": lambda m, b, h: h * (b.graph_degrees("src") // b.num_dst)[:, None],
        "x % n": lambda m, b, h: h * (b.graph_degrees("src") % b.num_dst)[:, None],
        "x * (1 / n)": lambda m, b, h: h * (1.0 / b.num_src),
        "integers * (1 / n)": lambda m, b, h: h * (b.graph_degrees("src") * (1.0 / b.num_src))[:, None],
        "integers / n": lambda m, b, h: h * (b.graph_degrees("src") / b.num_src)[:, None],
        "sqrt": lambda m, b, h: h / math.sqrt(b.num_src) + h / b.num_src**0.5,
        "powers": lambda m, b, h: h * b.num_src**-1 + h / b.num_src**2 + h * (b.num_src / b.num_dst) ** 2,
        "n - 1": lambda m, b, h: h.sum(0) / (b.num_src - 1) + h,
        "n / m": lambda m, b, h: h * (b.num_src / b.num_dst),
        "n // m, n % m": lambda m, b, h: h * (b.num_src // b.num_dst + b.num_src % b.num_dst),
        "1000 // n": lambda m, b, h: h * (1000 // b.num_src + 1000 % b.num_src),
        "edges": lambda m, b, h: h / b.num_edges + h / h.numel(),
        "min, max": lambda m, b, h: h / min(b.num_src, 10) + h / max(b.num_src, 15, b.num_edges),
        "min of a fraction": lambda m, b, h: h * min(b.num_src / 9, 2.5),
        "abs": lambda m, b, h: h / (1 + abs(b.num_dst - b.num_src)) + h / -b.num_src,
        "rounding": lambda m, b, h: h * (round(b.num_src / 4) + int(b.num_src / 3) + math.ceil(b.num_src / 5)),
        "log2": lambda m, b, h: h / math.log2(b.num_src),
    })  # fmt: skip


def test_in_tensors():
    check_rows({
        "tensor": lambda m, b, h: h / torch.tensor(b.num_src) + h / torch.tensor(float(b.num_src)),
        "full": lambda m, b, h: h / torch.full((), b.num_src) + h * torch.full((WIDTH,), 1 / b.num_src).double(),
        "full rows": lambda m, b, h: h / torch.full((b.num_src, 1), b.num_src, dtype=h.dtype),
        "full_like, new_full": lambda m, b, h: h / torch.full_like(h, b.num_src) + h / h.new_full((WIDTH,), b.num_dst),
        "comparison": lambda m, b, h: h * (h > 1 / b.num_dst) + h * (h < b.num_dst),
        "masked_fill": lambda m, b, h: h.masked_fill(h > 1, b.num_dst) + h.masked_fill(h > 1, 1 / b.num_dst),
        "where": lambda m, b, h: torch.where(h > 0, h, 1 / b.num_dst) + torch.where(h > 0, b.num_dst, h),
        "clamp": lambda m, b, h: h.clamp(max=b.num_dst / 10),
        "lerp": lambda m, b, h: torch.lerp(h, h.relu(), 1 / b.num_dst),
        "arange": lambda m, b, h: h * torch.arange(b.num_src)[:, None] / b.num_src,
        "every other": lambda m, b, h: h + h[torch.arange(0, b.num_src, 2)].sum(0),
        "last rows": lambda m, b, h: h + h[torch.arange(b.num_dst) + (b.num_src - b.num_dst)].sum(0),
    })  # fmt: skip


@NEWER
def test_new_tensor_and_powers():
    check_rows({
        "new_tensor": lambda m, b, h: h / h.new_tensor(b.num_src),
        "powers": lambda m, b, h: h.sigmoid() ** b.num_dst + b.num_dst ** h.sigmoid(),
    })  # fmt: skip


def test_refused_sizes():
    place = "in a place where only constants may stand"
    assert_refused({
        "comparison of sizes": (lambda m, b, h: h * (b.num_src > b.num_dst + 9), place),
        "alpha": (lambda m, b, h: torch.add(h, h, alpha=b.num_dst), place),
        "slope": (lambda m, b, h: torch.nn.functional.leaky_relu(h, 1 / b.num_dst), place),
        "shift": (lambda m, b, h: h.roll(b.num_src, 1), place),
        "two bounds": (lambda m, b, h: h.clamp(min=0.1, max=b.num_dst), place),
        "sine": (lambda m, b, h: h * (b.num_src & 3), "has no padded form"),
    }, "test_padding_sizes.py")  # fmt: skip


X, Y = sympy.symbols("x y", integer=True, positive=True)


@pytest.mark.parametrize(
    "expr",
    [X + Y + 3, 2 * X - Y, X * Y, sympy.Integer(7) * X, sympy.Max(X, Y, 9), sympy.Min(X, 4), sympy.Abs(X - Y), X**3],
    ids=str,
)
def test_emit_agrees_with_evaluate(expr):
    values = {X: 5, Y: 13}
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
    counts = {symbol: gm.graph.placeholder(symbol.name) for symbol in (X, Y)}
    gm.graph.output(emit(gm, expr, counts.__getitem__, counts[X]))
    gm.recompile()
    assert gm(torch.tensor(5), torch.tensor(13)).item() == evaluate(expr, values, counts[X])


def test_evaluate_refuses_what_no_set_has():
    with pytest.raises(PaddingError, match="does not come from a sampled set"):
        evaluate(X + Y, {X: 5}, fx.Graph().placeholder("x"))
