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


def with_biases(shapes, dtype=SHORT, early=False, computed=False) -> fx.Graph:
    """The joint of two weights, and vectors that are converted behind it; ``early``: in front of it."""
    graph = joined()
    (node,) = graph.find_nodes(op="call_function", target=JOIN)
    outputs = next(iter(graph.find_nodes(op="output")))
    casts = []
    for i, shape in enumerate(shapes):
        with graph.inserting_before(next(iter(graph.nodes))):
            bias = graph.placeholder(f"b{i}")
        with FakeTensorMode():
            bias.meta["val"] = torch.empty(shape, device="cuda")
        with graph.inserting_before(node if early else outputs):
            given = bias
            if computed:
                given = graph.call_function(torch.ops.aten.neg.default, (bias,))
                given.meta["val"] = bias.meta["val"]
            cast = graph.call_function(CONVERT, (given, dtype))
        cast.meta["val"] = bias.meta["val"].to(dtype)
        casts.append(cast)
    outputs.args = ((*outputs.args[0], *casts),)
    return graph


def test_biases_are_converted_with_the_weights():
    shapes = [(5,), (1,), (700,)]
    graph, before = with_biases(shapes), module(with_biases(shapes))
    assert join_casts.run(graph) == 1
    graph.lint()
    after = module(graph)
    assert count(after, CONVERT) == 0 and count(after, JOIN) == 1
    (node,) = graph.find_nodes(op="call_function", target=JOIN)
    assert node.args[1:] == ([*COUNTS, 1, 1, 1], [*WIDTHS, 1, 1, 1], "bfloat16")
    values = [torch.randn(*shape) for shape in (*reversed(shapes), *PARTS)]
    (outputs,) = graph.find_nodes(op="output")
    for out, ours, theirs in zip(outputs.args[0], after(*values), before(*values), strict=True):
        made = out.meta["val"]
        assert (made.dtype, made.shape) == (ours.dtype, ours.shape) and torch.equal(ours, theirs)


@pytest.mark.parametrize(("graph", "target"), [(joined(), JOIN), (with_biases([(5,)]), JOIN), (split(), SPLIT)])
def test_what_pytorch_noted_of_other_arguments_is_forgotten(graph, target):
    """Inductor gives a node the strides that its arguments had where it was traced: there have to be as many."""
    for node in graph.find_nodes(op="call_function", target=target):
        node.meta |= {"eager_input_vals": (node.args, {}), "arg_kwarg_vals": (node.args, {}), "stack_trace": "here"}
    assert join_casts.run(graph) == 1
    (node,) = graph.find_nodes(op="call_function", target=target)
    assert node.meta.keys() == {"val", "stack_trace"}


@pytest.mark.parametrize(("shapes", "options", "left"), [
    ([(5, 5)], {}, 1), ([(2**14 + 1,)], {}, 1), ([(0,)], {}, 1), ([(5,)], {"dtype": torch.float16}, 1),
    ([(5,)], {"early": True}, 1), ([(5,)], {"computed": True}, 1), ([(5,)] * 20, {}, 7),
], ids=str)  # fmt: skip
def test_biases_that_stay(shapes, options, left):
    """Matrices, long ones, of another dtype, converted in front of the joint or behind an op, too many for a launch."""
    graph = with_biases(shapes, **options)
    assert join_casts.run(graph) == 1
    graph.lint()
    assert count(module(graph), CONVERT) == left


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
