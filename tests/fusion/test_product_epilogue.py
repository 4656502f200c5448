"""Products with an epilogue: which are rewritten, and that numbers and what others read stay the same."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from joestar.fusion.backend import product_epilogue

from .graphs import ATEN, JOESTAR, count

pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

pytestmark = pytest.mark.usefixtures("tf32")

ROWS = product_epilogue._ROWS


def built(rows=ROWS, inner=24, columns=40, dtype=torch.float32, device="cuda", again=False, more=False, turned=False):
    """Both directions of a layer, of values that only pretend to be there: a graph that gives all that is read."""
    graph = fx.Graph()

    def given(name, *shape, dtype=dtype):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device=device)
        return node

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    with FakeTensorMode():
        x, w, b, back = (
            given("x", rows, inner),
            given("w", columns, inner),
            given("b", columns),
            given("v", inner, columns),
        )
        bits = given("bits", rows, -(-columns // 32), dtype=torch.int32)
        x = call(ATEN.permute.default, given("xt", inner, rows), [1, 0]) if turned else x
        h = call(ATEN.mm.default, x, call(ATEN.permute.default, w, [1, 0]))
        y = call(JOESTAR.bias_relu.default, h, b, bits, 2.0, *([h] if again else []))
        e = call(ATEN.mm.default, x, back)
        kept = call(operator.getitem, y, 1)
        g = call(JOESTAR.bias_relu_grad.default, e, kept, 2.0, True, *([[e]] if more else []))
        graph.output(tuple(call(operator.getitem, node, i) for node in (y, g) for i in (0, 1)))
    graph.lint()
    return graph


def test_before_and_after():
    graph = built()
    before = fx.GraphModule(torch.nn.Module(), built())
    assert product_epilogue.run(graph) == 2
    graph.lint()
    after = fx.GraphModule(torch.nn.Module(), graph)
    assert not count(after, ATEN.mm.default) and not count(after, JOESTAR.bias_relu.default)
    assert count(after, JOESTAR.mm_bias_relu.default) == count(after, JOESTAR.mm_bias_relu_grad.default) == 1
    random = torch.Generator().manual_seed(0)
    shapes = ((7, 24), (40, 24), (40,), (24, 40))
    values = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]
    values.append(torch.randint(-(2**31), 2**31, (7, 2), generator=random, dtype=torch.int32))
    for ours, theirs in zip(after(*values), before(*values), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert product_epilogue.run(graph) == 0
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": ROWS - 1}, {"inner": 129}, {"columns": 129}, {"columns": 96}, {"dtype": torch.float64},
        {"device": "cpu"}, {"turned": True},
    ],
    ids=str,
)  # fmt: skip
def test_must_not_fire(settings):
    graph = built(**settings)
    before = str(graph)
    assert product_epilogue.run(graph) == 0
    assert str(graph) == before


@pytest.mark.parametrize("settings", [{"again": True}, {"more": True}], ids=str)
def test_must_not_fire_where_more_is_read(settings):
    """An addend, or parts of the gradient: the other direction is rewritten."""
    assert product_epilogue.run(built(**settings)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_16_bits(dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert product_epilogue.run(built(dtype=dtype, inner=256)) == 2


def test_not_without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert product_epilogue.run(built()) == 0
