"""Products with an epilogue: which are rewritten, and that numbers and what others read stay the same."""

import operator

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch._subclasses import FakeTensorMode

from joestar.fusion.backend import product_epilogue
from joestar.ops.aggregate import gather_attend
from joestar.ops.registry import decompositions

from .graphs import ATEN, JOESTAR, count

pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

pytestmark = pytest.mark.usefixtures("tf32")

ROWS = product_epilogue._ROWS


def begun(dtype, device):
    """(a graph, what adds an input to it, what adds a call), of values that only pretend to be there."""
    graph = fx.Graph()

    def given(name, *shape, dtype=dtype):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device=device)
        return node

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    return graph, given, call


def built(rows=ROWS, inner=24, columns=40, dtype=torch.float32, device="cuda", again=False, more=False, turned=False):
    """Both directions of a layer: a graph that gives all that is read."""
    graph, given, call = begun(dtype, device)
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


def of_heads(rows=ROWS, heads=4, inner=24, columns=32, dtype=torch.float32, device="cuda", again=False, more=False,
             biased=True, tied=False, read=False):  # fmt: skip
    """The same with a product per head: the forward one in front, that of the gradient behind, its weight made late."""
    graph, given, call = begun(dtype, device)
    with FakeTensorMode():
        x, w, b = given("x", rows, heads, inner), given("w", heads, columns, inner), given("b", heads * columns)
        bits = given("bits", rows, -(-heads * columns // 32), dtype=torch.int32)
        e = given("e", rows, heads * columns)
        h = call(ATEN.view.default, call(JOESTAR.head_linear.default, x, w), [rows, heads * columns])
        y = call(JOESTAR.bias_relu.default, h, b, bits, 2.0, *([h] if again else []))
        kept = call(operator.getitem, y, 1)
        g = call(JOESTAR.bias_relu_grad.default, e, kept, 2.0, biased, *([[e]] if more else []))
        sums = call(operator.getitem, g, 1)
        split = call(ATEN.view.default, call(operator.getitem, g, 0), [rows, heads, columns])
        of_weight = call(JOESTAR.head_linear_weight_grad.default, x, split)
        late = call(ATEN.mul.Tensor, of_weight if tied else w, w)
        through = call(JOESTAR.head_linear.default, split, call(ATEN.permute.default, late, [0, 2, 1]))
        more_of_it = (call(ATEN.neg.default, split),) if read else ()
        graph.output((call(operator.getitem, y, 0), kept, sums, of_weight, through, *more_of_it))
    graph.lint()
    return graph


def given_values(graph, rows):
    """For the placeholders, with fewer rows."""
    random = torch.Generator().manual_seed(0)
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shape = (rows, *value.shape[1:]) if value.shape[0] == ROWS else value.shape
        if value.dtype == torch.int32:
            yield torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)
        else:
            yield torch.randn(shape, generator=random, dtype=torch.float64)


def same_results(before, after, rows=ROWS):
    values = list(given_values(before, rows))
    before, after = (fx.GraphModule(torch.nn.Module(), graph) for graph in (before, after))
    for ours, theirs in zip(after(*values), before(*values), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_before_and_after():
    graph = built()
    assert product_epilogue.run(graph) == 2
    graph.lint()
    after = fx.GraphModule(torch.nn.Module(), graph)
    assert not count(after, ATEN.mm.default) and not count(after, JOESTAR.bias_relu.default)
    assert count(after, JOESTAR.mm_bias_relu.default) == count(after, JOESTAR.mm_bias_relu_grad.default) == 1
    same_results(built(), graph, 7)
    assert product_epilogue.run(graph) == 0
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_heads(heads, biased):
    graph = of_heads(heads=heads, biased=biased)
    assert product_epilogue.run(graph) == 2
    graph.lint()
    after = fx.GraphModule(torch.nn.Module(), graph)
    gone = JOESTAR.head_linear, JOESTAR.head_linear_weight_grad, JOESTAR.bias_relu, JOESTAR.bias_relu_grad
    assert not any(count(after, op.default) for op in gone)
    same_results(of_heads(heads=heads, biased=biased), graph)
    assert product_epilogue.run(graph) == 0
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta
    (new,) = graph.find_nodes(op="call_function", target=JOESTAR.head_linear_bias_relu_grad.default)
    shapes = [(ROWS, heads, 24), (heads, 32, 24), (heads * 32 * biased,)]
    assert [tuple(value.shape) for value in new.meta["val"]] == shapes


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": ROWS - 1}, {"heads": 8}, {"heads": 3}, {"inner": 129}, {"columns": 48}, {"columns": 8},
        {"columns": 128}, {"dtype": torch.float64}, {"device": "cpu"},
    ],
    ids=str,
)  # fmt: skip
def test_heads_must_not_fire(settings):
    graph = of_heads(**settings)
    before = str(graph)
    assert product_epilogue.run(graph) == 0
    assert str(graph) == before


@pytest.mark.parametrize("settings", [{"again": True}, {"more": True}, {"tied": True}, {"read": True}], ids=str)
def test_heads_must_not_fire_where_more_is_read(settings):
    """Nor where the weight is made of the rows; the other direction is rewritten."""
    graph = of_heads(**settings)
    assert product_epilogue.run(graph) == 1
    same_results(of_heads(**settings), graph)


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


def rewrites(run, layer, args, expected, trained) -> list[int]:
    """What ``run`` says of both graphs of a layer as traced for a GPU, whose loss and gradients are as ``expected``."""
    made = []

    def rewritten(gm, example):
        made.append(run(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return make_boxed_func(gm.forward)

    traced = aot_function(layer, rewritten, rewritten, decompositions=decompositions(torch.device("cuda")))
    ours, theirs = ((loss, *torch.autograd.grad(loss, trained)) for loss in (traced(*args), expected))
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted)
    return made


def test_both_graphs_of_an_attention_layer(monkeypatch):
    """As PyTorch traces them for a GPU, but for the device: loss and gradients are those of plain PyTorch."""
    for name, value in (("_on_gpu", True), ("in_tensor_cores", True), ("_ROWS", 1)):
        monkeypatch.setattr(product_epilogue, name, value if name == "_ROWS" else lambda *given: True)
    monkeypatch.setattr(gather_attend, "_in_one_pass", lambda *sizes: True)
    n, nodes, heads, width, columns = 6, 9, 4, 8, 16
    random = torch.Generator().manual_seed(0)
    indptr, indices = torch.arange(n + 1) * 2, torch.randint(0, nodes, (2 * n,), generator=random)
    table, dsts = torch.randn(nodes, width, generator=random, dtype=torch.float64), torch.arange(n)
    shapes = (heads, width), (heads, width), (heads, columns, width), (heads * columns,), (heads * columns, 3)
    trained = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]

    def layer(indptr, indices, dsts, table, v_src, v_dst, weight, bias, last):
        y, *_ = JOESTAR.gather_attend_linear(indptr, indices, dsts, table, v_src, v_dst, weight, 0.2, None, 1.0)
        h, _ = JOESTAR.bias_relu(y.flatten(1), bias, None, 1.0)
        return (h @ last).square().sum()

    def plain(v_src, v_dst, weight, bias, last):
        rows = table[indices].view(n, 2, width)
        z = torch.einsum("nef,hf->neh", rows, v_src) + (table[dsts] @ v_dst.t()).unsqueeze(1)
        y = torch.einsum("nef,neh->nhf", rows, torch.softmax(torch.nn.functional.leaky_relu(z, 0.2), 1))
        h = torch.relu(torch.einsum("nhf,hcf->nhc", y, weight).flatten(1) + bias)
        return (h @ last).square().sum()

    given = indptr, indices, dsts, table
    assert rewrites(product_epilogue.run, layer, (*given, *trained), plain(*trained), trained) == [1, 1]


def test_not_without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert product_epilogue.run(built()) == 0
