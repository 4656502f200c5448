"""Sizes are compared in one way, values are of one fake mode: what keeps two classes of errors from coming back."""

import ast
import pathlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import joestar
import joestar.nn as jnn
from joestar.errors import VerificationError
from joestar.fusion import Pass, run_passes
from joestar.fusion.match.emit import emit
from joestar.lowering import fakes
from joestar.lowering.inputs import KEY, constant
from joestar.lowering.sizes import same_shape, same_size

from .harness import NUM_FEATURES, Case, same

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SOURCE = pathlib.Path(joestar.__file__).parent


@pytest.fixture(scope="module")
def symbols():
    """Two sizes of sampled sets, as they are while traced."""
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return [mode.from_tensor(torch.empty(n, 3), symbolic_context=context).shape[0] for n in (1009, 2022)]


def test_same_size(symbols):
    s, t = symbols
    for left, right, equal in (
        (s, s, True), (s, t, False), (s, 1009, False), (1009, s, False), (s + 1, 1 + s, True), (s * 2, s + s, True),
        (s, s + 1, False), (s + t, t + s, True), (1, 1, True), (1, 8, False), (8, 1, False), (0, 0, True),
        (s - s, 0, True), (s * 0 + 5, 5, True), (s * 0 + 5, 6, False),
    ):  # fmt: skip
        assert same_size(left, right) is equal, (left, right)
    assert same_shape((s, 4), (s, 4)) and not same_shape((s, 4), (s, 4, 1)) and not same_shape((1, 4), (s, 4))


def comparisons(source: str) -> list[int]:
    """Lines that compare what ``expression`` returns, ``None`` for every plain integer, by ``==`` or ``!=``."""
    found, tree = [], ast.parse(source)
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        named = set()
        for node in ast.walk(function) if function is not tree else ():
            if isinstance(node, ast.Assign) and any(map(_is_expression, ast.walk(node.value))):
                named |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if not isinstance(node, ast.Compare) or not any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops):
                continue
            sides = [node.left, *node.comparators]
            if any(_is_expression(side) or (isinstance(side, ast.Name) and side.id in named) for side in sides):
                found.append(node.lineno)
    return sorted(set(found))


def _is_expression(node) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "expression"


def test_the_search_finds_comparisons():
    for text in ("a = expression(x) == expression(y)", "def f():\n a, b = expression(x), expression(y)\n return a != b",
                 "sizes.expression(x) == n"):  # fmt: skip
        assert comparisons(text), text
    for text in ("a = expression(x) is None", "same_size(x, y)", "a = other(x) == b", "expression(x) in known"):
        assert not comparisons(text), text


def test_sizes_are_compared_in_one_place():
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if path.name != "sizes.py" or path.parent.name != "lowering"
        if "expression(" in (text := path.read_text())
        for line in comparisons(text)
    }
    assert not found, f"compare sizes with lowering.sizes.same_size: {', '.join(sorted(found))}"


# --- values of one fake mode ---


def test_no_value_is_made_outside_the_graphs_mode():
    """``device="meta"`` makes a tensor that no op of the graph can be run on together with the others.

    ``ops/ahead.py`` makes them for calls that only compile.
    """
    found = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if 'device="meta"' in path.read_text()
             and path.parent.name != "store" and path != SOURCE / "ops" / "ahead.py"]  # fmt: skip
    assert not found, f"use lowering.fakes.run in {found}"


@pytest.mark.parametrize(
    "model", ["GraphSAGE", "GAT", *(pytest.param(m, marks=pytest.mark.fuzz) for m in ("GCN", "GIN"))]
)
def test_nothing_sampled_and_narrow_rows_with_dropout(model):
    """The canonical model of Cora: all neighbours, 16 hidden, dropout 0.5. Then the sampler takes no key."""
    net = getattr(jnn, model)(NUM_FEATURES, 16, 2, 4, dropout=0.5)
    case = Case(net, fanouts=(-1, -1))
    gm = case.trace()
    assert not list(fakes.strangers(gm.graph))
    assert KEY in case.program.captured.roles
    bare = Case(net, fanouts=(-1, -1), disable=tuple(record.name for record in case.program.passes))
    for step, batch in enumerate(((9, 3, 22, 1, 40, 2, 17), (5,))):
        expected = bare.exact(bare.seeds(batch), step)
        same(case.exact(case.seeds(batch), step), expected, 1e-10)
        same(case.padded(case.seeds(batch), step), expected, 1e-10)


def _of_another_mode(value):
    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.empty(8, 4))


BROKEN = {
    "a tensor": (lambda value: torch.empty(8, 4), "with a Tensor on cpu for a value"),
    "a meta tensor": (lambda value: torch.empty(8, 4, device="meta"), "with a Tensor on meta for a value"),
    "another mode": (_of_another_mode, "with a fake tensor of another mode for a value"),
    "another shape": (lambda value: value.new_empty(value.shape[0], 5), "with another value than aten.linear"),
    "another dtype": (lambda value: value.float(), "with another value than aten.linear"),
}


@pytest.fixture(scope="module")
def traced():
    return Case(jnn.GraphSAGE(NUM_FEATURES, 8, 1, 4), fanouts=(3,), kind="logits").trace(), None


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_what_a_pass_leaves_is_checked(traced, change, words):
    """By its name, with the way to train without it."""
    gm = traced[0]
    old = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.linear.default)

    def bad(gm, context):
        with gm.graph.inserting_before(old):
            new = gm.graph.node_copy(old, lambda node: node)
        new.meta["val"] = change(old.meta["val"])
        return 1

    with pytest.raises(VerificationError, match=words) as caught:
        run_passes(gm, [constant(None, "value")] * 99, passes=(Pass("bad", bad),))
    gm.graph.erase_node(old.prev)
    assert str(caught.value).startswith("pass bad left node linear")
    assert 'joestar.compile(..., disable_passes=("bad",))' in str(caught.value)


ATEN = torch.ops.aten


def rewritten(gm, old, change) -> None:
    """Runs a pass that makes ``old`` again and then changes the new node; the graph is as before afterwards."""
    made = []

    def rewrite(gm, context):
        before = set(gm.graph.nodes)
        with gm.graph.inserting_before(old):
            new = emit(gm.graph, old, old.target, *old.args)
            change(gm, new)
        made.extend(node for node in gm.graph.nodes if node not in before)
        return 1

    try:
        run_passes(gm, [constant(None, "value")] * 99, passes=(Pass("bad", rewrite),))
    finally:
        for node in reversed(made):
            gm.graph.erase_node(node)


def reads(*path):
    """Lets a node read its first operand by way of some ops."""

    def change(gm, new):
        x = new.args[0]
        with gm.graph.inserting_before(new):
            for target, *args in path:
                x = emit(gm.graph, new, target, x, *args)
        new.args = (x, *new.args[1:])

    return change


def test_what_a_pass_changes_after_it_ran_an_op_is_checked(traced, monkeypatch):
    """Operands of the same forms give what the op was seen to give; those of others do not."""
    gm, ran, result = traced[0], [], fakes.result
    old = next(node for node in gm.graph.nodes if node.target is ATEN.linear.default)
    monkeypatch.setattr(fakes, "result", lambda node: ran.append(node) or result(node))
    rewritten(gm, old, lambda gm, new: None)
    rewritten(gm, old, reads((ATEN.relu.default,)))
    assert not ran
    for path in ([(ATEN.slice.Tensor, 0, 0, 1)], [(ATEN.to.dtype, torch.float32), (ATEN.unsqueeze.default, 0)]):
        with pytest.raises(VerificationError, match="pass bad"):
            rewritten(gm, old, reads(*path))
    assert len(ran) == 2


def test_calls_of_one_form_run_once(traced, monkeypatch):
    """Not those under another dtype of autocast, those that write, or those whose result depends on data."""
    graph = traced[0].graph
    linear = next(node for node in graph.nodes if node.target is ATEN.linear.default)
    x, weight = (linear.args[place].meta["val"] for place in (0, 1))
    with fakes.mode_of(graph):
        other, mask = torch.empty_like(x), torch.empty(3, dtype=torch.bool)
    first = fakes.run(graph, ATEN.linear.default, x, weight)
    assert fakes.run(graph, ATEN.linear.default, other, weight) is first
    assert fakes.run(graph, ATEN.linear.default, x[1:], weight).shape != first.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert fakes.run(graph, ATEN.linear.default, x.float(), weight.float()).dtype is torch.bfloat16
    assert fakes.run(graph, ATEN.linear.default, x.float(), weight.float()).dtype is torch.float32
    assert fakes.run(graph, ATEN.relu_.default, other) is other and fakes.run(graph, ATEN.relu_.default, x) is x
    assert not fakes.is_of_form(ATEN.nonzero.default) and not fakes.is_of_form(ATEN._local_scalar_dense.default)
    with fakes.mode_of(graph):
        numbers = [torch.tensor(value) for value in (2, 3)]
    assert [fakes.run(graph, ATEN._local_scalar_dense.default, number) for number in numbers] == [2, 3]
    assert fakes.run(graph, ATEN.logical_not.default, mask) is fakes.run(graph, ATEN.logical_not.default, mask)


def test_a_value_that_a_pass_changes_alone_is_checked(traced):
    gm = traced[0]
    linear = next(node for node in gm.graph.nodes if node.target is ATEN.linear.default)
    with gm.graph.inserting_before(linear):
        old = emit(gm.graph, linear, ATEN.relu.default, linear.args[0])

    def bad(gm, context):
        old.meta["val"] = old.meta["val"].new_empty(old.meta["val"].shape[0], 5)
        return 0

    words = r"pass bad left node relu.* with another value than aten\.relu"
    with pytest.raises(VerificationError, match=words):
        run_passes(gm, [constant(None, "value")] * 99, passes=(Pass("bad", bad),))
    gm.graph.erase_node(old)
