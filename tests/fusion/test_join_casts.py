"""Casts of joined weights and of their gradients: which become part of the joint, and that numbers stay the same."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from joestar.fusion.backend import join_casts

from .graphs import JOESTAR, count

CONVERT = torch.ops.prims.convert_element_type.default
JOIN, SPLIT = JOESTAR.join_columns_all.default, JOESTAR.split_columns_all.default
SHORT = torch.bfloat16
PARTS, COUNTS, WIDTHS = ((3, 4), (3,), (5, 2)), [2, 1], [8, 4]


def joined(dtypes=(SHORT, SHORT), plain=False, device="cuda") -> fx.Graph:
    """Two joined weights, each read in a dtype of its own; with ``plain`` the second is read as it is, too."""
    graph = fx.Graph()
    with FakeTensorMode():
        parts = [graph.placeholder(f"p{i}") for i in range(len(PARTS))]
        for part, shape in zip(parts, PARTS, strict=True):
            part.meta["val"] = torch.empty(*shape, device=device)
        both = graph.call_function(JOIN, (parts, COUNTS, WIDTHS))
        both.meta["val"] = JOIN([part.meta["val"] for part in parts], COUNTS, WIDTHS)
        items = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        for i, item in enumerate(items):
            item.meta["val"] = both.meta["val"][i]
        casts = [graph.call_function(CONVERT, pair) for pair in zip(items, dtypes, strict=True)]
        for cast, item in zip(casts, items, strict=True):
            cast.meta["val"] = item.meta["val"].to(cast.args[1])
    graph.output((*casts, *items[1:] * plain))
    return graph


def split(dtypes=(torch.float32, torch.float32), again=False, device="cuda") -> fx.Graph:
    """Gradients in 16 bits, converted and split; with ``again`` a conversion has another reader."""
    graph = fx.Graph()
    with FakeTensorMode():
        grads = [graph.placeholder(f"g{i}") for i in range(2)]
        for grad, shape in zip(grads, ((3, 8), (5, 4)), strict=True):
            grad.meta["val"] = torch.empty(*shape, dtype=SHORT, device=device)
        casts = [graph.call_function(CONVERT, pair) for pair in zip(grads, dtypes, strict=True)]
        for cast in casts:
            cast.meta["val"] = cast.args[0].meta["val"].to(cast.args[1])
        parts = graph.call_function(SPLIT, (casts, COUNTS, [4, 0, 2]))
        parts.meta["val"] = SPLIT([cast.meta["val"] for cast in casts], COUNTS, [4, 0, 2])
        items = [graph.call_function(operator.getitem, (parts, i)) for i in range(3)]
        for i, item in enumerate(items):
            item.meta["val"] = parts.meta["val"][i]
    graph.output((*items, *casts[:1] * again))
    return graph


def module(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("build", "target", "shapes", "dtype"), [
    (joined, JOIN, PARTS, torch.float32), (split, SPLIT, ((3, 8), (5, 4)), SHORT),
])  # fmt: skip
def test_before_and_after(build, target, shapes, dtype):
    graph, before = build(), module(build())
    assert join_casts.run(graph) == 1
    graph.lint()
    after = module(graph)
    assert count(after, CONVERT) == 0 and count(after, target) == 1
    assert all(node.op == "output" or "val" in node.meta for node in graph.nodes)
    (outputs,) = graph.find_nodes(op="output")
    values = [torch.randn(*shape).to(dtype) for shape in shapes]
    for node, ours, theirs in zip(outputs.args[0], after(*values), before(*values), strict=True):
        assert ours.dtype == theirs.dtype == node.meta["val"].dtype and torch.equal(ours, theirs)
    assert join_casts.run(graph) == 0


@pytest.mark.parametrize(
    "graph",
    [
        lambda: joined((SHORT, torch.float16)), lambda: joined(plain=True), lambda: joined(device="cpu"),
        lambda: split((torch.float32, torch.float64)), lambda: split(again=True), lambda: split(device="cpu"),
    ],
)  # fmt: skip
def test_must_not_fire(graph):
    graph = graph()
    before = str(graph)
    assert join_casts.run(graph) == 0
    assert str(graph) == before
