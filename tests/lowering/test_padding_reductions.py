"""Reductions and products over padded rows: padded equals exact and eager, or is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar import fn

from .harness import WIDTH, assert_refused, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")


def on_edges(f):
    """``f`` of the sources' values on the edges."""
    return lambda m, b, h: h + f(b.apply_edges(fn.copy_u(h)))


def test_over_nodes():
    check_rows({
        "sum": lambda m, b, h: h + h.sum(0),
        "sum of all": lambda m, b, h: h + h.sum(),
        "sum of degrees": lambda m, b, h: h / b.graph_degrees("src").sum(),
        "mean": lambda m, b, h: h - h.mean(0),
        "mean of all": lambda m, b, h: h - h.mean(),
        "mean keepdim": lambda m, b, h: h - h.mean((0, 1), keepdim=True),
        "mean of heads": lambda m, b, h: h + h.view(-1, 2, 4).mean((0, 1)).repeat(2),
        "mean dtype": lambda m, b, h: h * b.graph_degrees("src").mean(dtype=torch.float64),
        "max": lambda m, b, h: h - h.max(0).values,
        "max of negative": lambda m, b, h: h + (-h.exp()).max(0)[0],
        "max of all": lambda m, b, h: h - h.max(),
        "max of integers": lambda m, b, h: h / (1 + b.graph_degrees("src").max()),
        "max of booleans": lambda m, b, h: h * (h > 0).max(0)[0],
        "position of the maximum": lambda m, b, h: h * h.max(0).indices + h.argmin(0),
        "min": lambda m, b, h: h - h.min(0)[0] - h.amin(),
        "prod": lambda m, b, h: h + (h.tanh() * 0.5 + 1.2).prod(0),
        "any, all": lambda m, b, h: h * (h > 2).any(0) + (h > -9).all(0),
        "count_nonzero": lambda m, b, h: h * torch.count_nonzero(h > 0, 0),
        "nansum": lambda m, b, h: h - h.nansum(0),
    })  # fmt: skip


def test_statistics_over_nodes():
    dead = torch.tensor([0.0] + [1.0] * (WIDTH - 1))
    check_rows({
        "var": lambda m, b, h: h / (h.var(0) + 1),
        "var, correction 2": lambda m, b, h: h / (1 + torch.var(h, dim=0, correction=2)),
        "var of all": lambda m, b, h: h / (h.var(unbiased=False) + 1),
        "std": lambda m, b, h: h / h.std(0, keepdim=True),
        "std of all": lambda m, b, h: h / h.std(),
        "std of a dead column": lambda m, b, h: h + (h.relu() * m.dead).std(0),
        "logsumexp": lambda m, b, h: h - h.logsumexp(0),
        "softmax": lambda m, b, h: h * h.softmax(0),
        "norm": lambda m, b, h: h / h.norm(dim=0) + h / h.norm(),
        "norm 1, inf": lambda m, b, h: h / torch.linalg.vector_norm(h, ord=1, dim=0) + h.norm(p=float("inf"), dim=0),
        "Frobenius": lambda m, b, h: h / torch.linalg.matrix_norm(h),
        "normalize": lambda m, b, h: F.normalize(h, dim=0),
    }, dead=dead)  # fmt: skip


def test_products_over_nodes():
    check_rows({
        "x.T @ x": lambda m, b, h: h @ (h.T @ h),
        "matmul": lambda m, b, h: h * (h[:, 0] @ h),
        "einsum": lambda m, b, h: torch.einsum("nd,de->ne", h, torch.einsum("nd,ne->de", h, h)),
        "mv, dot": lambda m, b, h: h * torch.mv(h.t(), h[:, 1]) * torch.dot(h[:, 0], h[:, 1]),
        "addmm": lambda m, b, h: h @ torch.addmm(h.new_zeros(WIDTH, WIDTH), h.t(), h),
        "addbmm": lambda m, b, h: h + torch.addbmm(h.new_zeros(WIDTH, WIDTH), h[:, :, None], h[:, None, :]).sum(),
        "bmm": lambda m, b, h: h + torch.bmm(h[:, :, None], h[:, None, :]).sum(2),
        "attention": lambda m, b, h: (h @ h.T / WIDTH**0.5).softmax(-1) @ h,
        "linear attention": lambda m, b, h: (F.elu(h) + 1) @ ((F.elu(h) + 1).T @ h) / b.num_src,
        "sum of both": lambda m, b, h: h + (h @ h.T).sum() / 100,
        "mean of one": lambda m, b, h: h + (h @ h.T).mean(1, keepdim=True),
        "triangle": lambda m, b, h: (h @ h.T).tril() @ h / 10,
        "identity": lambda m, b, h: (h @ h.T / 10 + torch.eye(b.num_src, dtype=h.dtype)) @ h,
        "distances": lambda m, b, h: h + (h[:, None] - h[None]).norm(dim=-1).sum() / 100,
        "covariance": lambda m, b, h: h @ torch.linalg.inv((h.T @ h) / b.num_src + torch.eye(WIDTH, dtype=h.dtype)),
    })  # fmt: skip


def test_over_edges():
    check_rows({
        "sum": on_edges(lambda e: e.sum(0)),
        "mean": on_edges(lambda e: e.mean(0)),
        "max": on_edges(lambda e: e.max(0)[0]),
        "std": on_edges(lambda e: e.std(0)),
        "softmax": on_edges(lambda e: (e.softmax(0) * e).sum(0)),
        "log": on_edges(lambda e: e.abs().log().mean(0)),
        "1 / e, linear": lambda m, b, h: h + m.linear(1 / b.apply_edges(fn.copy_u(h.exp()))).sum(),
        "linear, mean": lambda m, b, h: h + b.pull(fn.copy_e(m.linear(b.apply_edges(fn.copy_u(h)))), "mean").sum(0),
        "u_div_v": lambda m, b, h: h + b.apply_edges(fn.u_div_v(h, h[: b.num_dst])).mean(0) / 100,
        "bias": lambda m, b, h: h + m.linear(b.apply_edges(fn.copy_u(h))).relu().sum(0),
        "attention": lambda m, b, h: h + b.pull(fn.u_mul_e(h, scores(b, h)), "sum").sum(0),
        "softmax by hand": softmax_by_hand,
    }, linear=nn.Linear(WIDTH, WIDTH))  # fmt: skip


def scores(b, h):
    """Attention of each edge."""
    return b.edge_softmax(b.apply_edges(fn.u_dot_v(h, h[: b.num_dst])))


def softmax_by_hand(m, b, h):
    e = b.apply_edges(fn.u_add_v(h, h[: b.num_dst])).exp()
    total = b.apply_edges(fn.u_add_v(h * 0, b.pull(fn.copy_e(e), "sum")))
    return h + b.pull(fn.copy_e(b.apply_edges(fn.copy_u(h)) * (e / total)), "sum").sum(0)


def test_with_self_loops():
    """The tail behind the loops is padding too, whose length only the structure knows (sums of large values, as of
    1 / exp(e), would be as good as the machine's order of adding)."""
    check_rows({
        "pull": lambda m, b, h: h + b.add_self_loops().pull(fn.copy_u(h), "sum").sum(0),
        "in-degrees": lambda m, b, h: h / b.add_self_loops().in_degrees().sum(),
        "out-degrees": lambda m, b, h: h * b.add_self_loops().out_degrees()[:, None],
        "division": looped(lambda m, e: e / (e / 8).exp()),
        "log": looped(lambda m, e: e.exp().log()),
        "1 / e, linear": looped(lambda m, e: m.linear(e) + m.linear(e.exp())),
        "heads": looped(lambda m, e: (1 / (e / 8).exp().view(-1, 2, 4)).reshape(-1, WIDTH)),
        "twice": lambda m, b, h: h + b.add_self_loops().add_self_loops().pull(fn.copy_u(h), "sum").sum(0),
    }, linear=nn.Linear(WIDTH, WIDTH))  # fmt: skip


def looped(f):
    """``f`` of the values of edges with self-loops, aggregated."""

    def operation(m, b, h):
        b = b.add_self_loops()
        return h + b.pull(fn.copy_e(f(m, b.apply_edges(fn.copy_u(h)))), "sum").sum(0)

    return operation


def test_refused_reductions():
    square = "reduces over two padded dimensions"
    assert_refused({
        "log_softmax": (lambda m, b, h: h * h.log_softmax(0), "works across padded rows"),
        "sort": (lambda m, b, h: h.sort(0)[0], "works across padded rows"),
        "cumprod": (lambda m, b, h: h.cumprod(0), "works across padded rows"),
        "median": (lambda m, b, h: h - h.median(0)[0], "works across padded rows"),
        "var_mean": (lambda m, b, h: h - torch.var_mean(h, 0)[1], "works across padded rows"),
        "aminmax": (lambda m, b, h: h - torch.aminmax(h)[1], "works across padded rows"),
        "nanmean": (lambda m, b, h: h - h.nanmean(0), "works across padded rows"),
        "diff": (lambda m, b, h: h + h.diff(dim=0).sum(0), "works across padded rows"),
        "norm 0": (lambda m, b, h: h / torch.linalg.vector_norm(h, ord=0, dim=0), "norm of order 0"),
        "norm -inf": (lambda m, b, h: h / h.norm(p=-float("inf"), dim=0), "norm of order -inf"),
        "mean of a square": (lambda m, b, h: h + (h @ h.T).mean(), square),
        "var of a square": (lambda m, b, h: h + (h @ h.T).var(), square),
        "einsum": (lambda m, b, h: h + torch.einsum("nd,nd", h, h), "implicit einsum"),
        "trace": (lambda m, b, h: h + (h @ h.T).trace(), "has no rule"),
    }, "test_padding_reductions.py")  # fmt: skip


def own_loss(e):
    return F.mse_loss(e, e.relu())
