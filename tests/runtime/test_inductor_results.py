"""Results and gradients through Inductor where it goes wrong by itself: against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import seeded
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import joestar
from joestar import NeighborSampler, fn
from joestar.fusion.backend.compared import SaveCompared
from joestar.graph_api import Graph
from joestar.runtime.inductor import compile_graph
from joestar.runtime.renames import renames_kept
from joestar.runtime.rounding import rounds
from joestar.runtime.seeds import shuffled

FOLDS = {
    "product": lambda h, m: (h[m] * h.tanh()[m]).sum(0),
    "of its own": lambda h, m: (h[m].tanh() * h.tanh()[m]).tanh().mean(0),
    "three": lambda h, m: (h[m] * h.tanh()[m] * h.sigmoid()[m]).sum(0),
}


class Folded(nn.Module):
    """Rows picked twice, of values and of what is made of them: each pick's gradient is added up in place."""

    def __init__(self, fold):
        super().__init__()
        self.first, self.last, self.fold = nn.Linear(3, 34), nn.Linear(34, 4, bias=False), fold

    def forward(self, blocks, x):
        outer, inner = blocks
        factor = (outer.in_degrees() + 1).to(x.dtype).pow(-0.5)
        h = outer.pull(fn.copy_u(self.first(x)), "sum") * factor[:, None]
        mask = outer.graph.ndata["kind"][outer.dsts] > 1
        return self.last(inner.pull(fn.copy_u(h + self.fold(h, mask)), "sum"))


class Plain(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 34), nn.Linear(34, 4)

    def forward(self, blocks, x):
        h = blocks[0].pull(fn.copy_u(self.first(x)), "sum").relu()
        return self.last(blocks[1].pull(fn.copy_u(h), "mean"))


def compare(net: nn.Module, loss, dtype: torch.dtype, rtol: float) -> None:
    """Losses and gradients of an epoch, padded and compiled by Inductor, against plain PyTorch on the same samples."""
    random = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(0, 38, (2, 150), generator=random), num_nodes=38)
    graph.ndata["x"] = torch.randn(38, 3, generator=random, dtype=torch.float64).to(dtype)
    graph.ndata["y"] = torch.randint(0, 4, (38,), generator=random)
    graph.ndata["kind"] = torch.randint(0, 5, (38,), generator=random)
    net, sampler = seeded(net.to(dtype), 1), NeighborSampler(graph, [3, 3], seed=0)
    step = joestar.compile(net, sampler, loss, torch.optim.SGD(net.parameters(), 0.0))
    seeds = torch.arange(20)
    order = shuffled(seeds, 0, 0)
    for index, found in enumerate(step.epoch(seeds, 7)):
        grads = [p.grad.clone() for p in net.parameters()]
        chosen = order[7 * index : 7 * (index + 1)]
        blocks = sampler.sample(graph.keyed(0, 0, index), chosen)
        expected = loss(net(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][chosen])
        assert found.item() == pytest.approx(expected.item(), rel=rtol)
        for grad, wanted in zip(grads, torch.autograd.grad(expected, net.parameters()), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.every(7)
def test_rows_that_are_picked_twice(fold):
    """They were off by a multiple of their size: a loop read a gradient that was not added up yet."""
    compare(Folded(FOLDS[fold]), F.cross_entropy, torch.float64, 1e-10)


def exponential(z: torch.Tensor) -> torch.Tensor:
    """Values that vectorised loops and others compute with other last bits."""
    return z.tanh().exp()


LARGEST = {
    "of columns": lambda h: h.amax(0).sum(),
    "of all": lambda h: h.max(),
    "those at least as large": lambda h: (h * (h >= h.amax(0))).sum(),
    "no difference": lambda h: (h * ((h - h.amax(0)) == 0)).sum(),
    "chosen": lambda h: torch.where(h <= h.amin(), h.square(), h).sum(),
    "whole parts": lambda h: (h * (h / h.amax(0)).floor()).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.every(6)
def test_entries_that_equal_a_maximum(largest, dtype):
    """They were not finite: entries were computed again, with other last bits, and none equalled the maximum."""
    rtol = 1e-10 if dtype == torch.float64 else 1e-4
    of = LARGEST[largest]
    compare(Plain(), lambda z, y: F.cross_entropy(z, y) + 0.1 * of(exponential(z)), dtype, rtol)


KEPT = {
    "compared": (lambda z, tangents: (z.exp() >= z.exp().amax(0)) * z, ["exp_1"]),
    "through views and a mask": (
        lambda z, tangents: (lambda h: h == torch.where(z > 0, h.view(4, 3), -1).amax(0, True))(z.exp()),
        ["exp", "amax"],
    ),
    "with nothing": (lambda z, tangents: (z.exp() - z.exp().amax(0)).exp(), []),
    "behind a product": (lambda z, tangents: (z.exp().amax(0, True).expand(4, 3) @ z.t()) > 0, []),
    "of integers": (lambda z, tangents: (z.long() + 1).amax(0) == z.long(), []),
    "of a gradient": (lambda z, tangents: tangents.exp() == tangents.exp().amax(0), []),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_for_the_gradient(name):
    function, kept = KEPT[name]
    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 3), torch.randn(4, 3)).graph
    SaveCompared()(graph)
    assert [node.name for node in graph.nodes if "recompute" in node.meta] == kept


ROUNDED = {
    **{name: lambda z, of=of: of((0.3 * z).tanh()) for name, of in LARGEST.items()},
    "of norms": lambda z: z.norm(dim=1).max(),
    "by index": lambda z: (0.3 * z).tanh().max(1).values.sum(),
    "at least as large as gated": lambda z: (F.silu(z) * (F.silu(z) >= F.silu(z).amax(0))).sum(),
}


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", ROUNDED)
@pytest.mark.every(6)
def test_rounded_entries_that_equal_a_maximum(largest, rounded):
    """Inductor compared them as they were before rounding, with a maximum that was rounded: none was as large."""
    found = of_rounded(ROUNDED[largest], rounded)
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


def of_rounded(largest, rounded: torch.dtype) -> list[list]:
    """A function of rows in 16 bits, and its gradient: compiled as a step's graphs are, and by plain PyTorch."""

    def function(z, weight):
        return (largest(z @ weight),)

    random = torch.Generator().manual_seed(0)
    z, weight = (torch.randn(*size, generator=random).to(rounded) for size in ((9, 5), (5, 4)))
    found = []
    for compiled in (True, False):
        given, run = [z.clone().requires_grad_(), weight.clone().requires_grad_()], function
        if compiled:
            gm = make_fx(function, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
            run = compile_graph(gm, given, z.device, (), False, rounds(gm.graph))
        (value,) = run(*given)
        found.append([value.detach(), *torch.autograd.grad(value, given)])
    return found


SUMS = {
    "of a product": lambda x, p: torch.add(x, p, alpha=2),
    "product first": lambda x, p: torch.add(p, x, alpha=-3),
    "in place": lambda x, p: x.clone().add_(p, alpha=0.5),
    "to nothing": lambda x, p: torch.add(torch.zeros_like(x), p, alpha=2),
    "of nothing": lambda x, p: torch.add(p, torch.zeros_like(x), alpha=2),
    "of a number": lambda x, p: torch.add(p, 3, alpha=2),
    "of integers": lambda x, p: torch.add(p, torch.arange(4), alpha=0.1),
    "difference": lambda x, p: torch.sub(x, p, alpha=2),
    "from": lambda x, p: torch.rsub(x, p, alpha=2),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.every(3)
def test_sums_whose_second_operand_is_scaled(name):
    """The factor was left out of sums of products: PyTorch's compiler takes them for products with a bias."""
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(*size, generator=random, dtype=torch.float64) for size in ((9, 4), (9, 5), (5, 4))]

    def function(x, a, b):
        return (SUMS[name](x, a @ b),)

    gm = make_fx(function, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    (found,) = compile_graph(gm, given, given[0].device, ())(*given)
    torch.testing.assert_close(found, function(*given)[0], rtol=1e-12, atol=1e-12)


def test_a_loop_that_is_shaped_anew_runs_behind_what_it_reads():
    """In Inductor alone: without ``renames_kept`` both results are off by more than their size (PyTorch 2.13)."""

    def added_up(grad, rows, degree, bias, valid, ids, picked):
        zero, factor = torch.zeros((), dtype=rows.dtype), torch.where(valid, (degree + 1).to(rows.dtype), 1.0).pow(-0.5)
        h = (rows + degree.to(rows.dtype)[:, None] * bias) * factor[:, None]
        t, all_valid = h.tanh(), valid.reshape(32, 1)
        sums = grad.sum(0, keepdim=True).expand(32, 34)
        given = torch.where(picked, torch.where(all_valid, sums, zero), zero)
        of_h = given * torch.where(all_valid, torch.where(picked, h[ids], zero), zero)
        of_t = torch.where(picked, torch.where(all_valid, given * t[ids], zero), zero)
        nothing = torch.zeros(32, 34, dtype=rows.dtype)
        total = grad + nothing.index_put([ids], of_h, accumulate=True) * (1 - t * t)
        total = (total + nothing.index_put([ids], of_t, accumulate=True)) * factor[:, None]
        return total, (total * degree.to(rows.dtype)[:, None]).sum(0)

    torch.manual_seed(0)
    grad, rows, bias = (torch.randn(*size, dtype=torch.float64) for size in ((32, 34), (32, 34), (34,)))
    given = (
        grad,
        rows,
        torch.randint(0, 5, (32,)),
        bias,
        torch.arange(32) < 20,
        torch.arange(32),
        torch.rand(32, 1) > 0.5,
    )
    small = {"realize_opcount_threshold": 8, "realize_cpu_opcount_threshold": 8}
    options = {name: value for name, value in small.items() if hasattr(torch._inductor.config, name)}
    options["fx_graph_cache"] = False
    with renames_kept():
        found = torch.compile(added_up, options=options)(*given)
    for value, wanted in zip(found, added_up(*given), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)
