"""Parts of the gradient of activated rows: which are added up where it is masked, and that nothing else changes."""

import operator

import pytest
import torch
from torch import fx

from joestar.fusion.backend.gradient_sums import run

from .graphs import ATEN, JOESTAR, count

N, M, D = 9, 4, 5
GRAD = JOESTAR.bias_relu_grad.default


def traced(build):
    """A graph of what ``build(call, a, b, first, weight, kept)`` makes; (it, its inputs)."""
    random = torch.Generator().manual_seed(0)
    shapes = ((N, D), (N, D), (M, D), (D, D))
    values = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]
    values.append(torch.randint(-(2**31), 2**31, (N, 1), generator=random, dtype=torch.int32))
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value

    def call(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*given[0], **given[1])
        return node

    graph.output(build(call, *inputs))
    return fx.GraphModule(torch.nn.Module(), graph), values


def padded(call, first, start=0):
    zeros = call(ATEN.full.default, [N, D], 0, dtype=torch.float64)
    return call(ATEN.slice_scatter.default, zeros, first, 0, start, start + M)


def masked(call, rows, kept, biased=True):
    grad = call(GRAD, rows, kept, 2.0, biased)
    return call(operator.getitem, grad, 0), call(operator.getitem, grad, 1)


def product_and_first(call, a, b, first, weight, kept):
    """FiLM: a product adds to the gradient of the first rows."""
    return masked(call, call(ATEN.add.Tensor, padded(call, first), call(ATEN.mm.default, a, weight)), kept)


def two_products(call, a, b, first, weight, kept):
    rows = call(ATEN.add.Tensor, call(ATEN.mm.default, a, weight), call(ATEN.mm.default, b, weight))
    return masked(call, rows, kept, False)


def three_parts(call, a, b, first, weight, kept):
    """Attention: keys, values and own rows."""
    rows = call(ATEN.add.Tensor, call(ATEN.mm.default, a, weight), padded(call, first))
    return masked(call, call(ATEN.add.Tensor, rows, call(ATEN.mm.default, b, weight)), kept)


@pytest.mark.parametrize(("build", "parts"), [(product_and_first, 1), (two_products, 1), (three_parts, 2)])
def test_sums_are_read_in_parts(build, parts):
    gm, values = traced(build)
    before = gm(*values)
    assert run(gm.graph) == 1
    gm.graph.lint()
    gm.recompile()
    (node,) = gm.graph.find_nodes(op="call_function", target=GRAD)
    assert len(node.args[4]) == parts and "val" in node.meta
    for target in (ATEN.add.Tensor, ATEN.slice_scatter.default, ATEN.full.default):
        assert count(gm, target) == 0
    for ours, theirs in zip(gm(*values), before, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert run(gm.graph) == 0


def read_twice(call, a, b, first, weight, kept):
    rows = call(ATEN.add.Tensor, padded(call, first), call(ATEN.mm.default, a, weight))
    return *masked(call, rows, kept), call(ATEN.mm.default, rows, weight)


def elsewhere(call, a, b, first, weight, kept):
    """Not the first rows: these are a part that the backend makes."""
    return masked(call, call(ATEN.add.Tensor, padded(call, first, 2), call(ATEN.mm.default, a, weight)), kept)


def pointwise(call, a, b, first, weight, kept):
    return masked(call, call(ATEN.add.Tensor, call(ATEN.sin.default, b), call(ATEN.mm.default, a, weight)), kept)


def no_sum(call, a, b, first, weight, kept):
    return masked(call, call(ATEN.mm.default, a, weight), kept)


def scaled(call, a, b, first, weight, kept):
    product = call(ATEN.mm.default, a, weight)
    return masked(call, call(ATEN.add.Tensor, product, call(ATEN.mm.default, b, weight), alpha=2), kept)


@pytest.mark.parametrize("build", [read_twice, elsewhere, pointwise, no_sum, scaled])
def test_must_not_fire(build):
    gm, _ = traced(build)
    before = str(gm.graph)
    assert run(gm.graph) == 0 and str(gm.graph) == before
