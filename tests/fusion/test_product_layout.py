"""Products backward with many rows read a weight that is turned: which are rewritten, and numbers stay the same."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from joestar.fusion.backend import gradient_sums, product_layout
from joestar.fusion.backend.first import FirstPasses

pytestmark = pytest.mark.usefixtures("tf32")

ATEN = torch.ops.aten
ROWS = product_layout._ROWS


def product(rows=ROWS, inner=24, columns=40, dtype=torch.float32, device="cuda", turned=False) -> fx.Graph:
    """``mm(grad, w)`` of values that only pretend to be there, ``w`` of a weight as it is or turned already."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        grad, weight = graph.placeholder("grad"), graph.placeholder("w")
        grad.meta["val"] = torch.empty(rows, inner, dtype=dtype, device=device)
        weight.meta["val"] = torch.empty(inner, columns, dtype=dtype, device=device)
        if turned:
            weight.meta["val"] = torch.empty(columns, inner, dtype=dtype, device=device).t()
        node = graph.call_function(ATEN.mm.default, (grad, weight))
        node.meta["val"] = torch.empty(rows, columns, dtype=dtype, device=device)
    graph.output(node)
    return graph


def test_before_and_after():
    graph = product()
    assert product_layout.run(graph) == 1
    graph.lint()
    (new,) = graph.find_nodes(op="call_function", target=ATEN.mm.default)
    weight = new.args[1].meta["val"]
    assert weight.shape == (24, 40) and weight.stride() == (1, 24)
    values = torch.randn(7, 24, dtype=torch.float64), torch.randn(24, 40, dtype=torch.float64)
    assert torch.allclose(fx.GraphModule(torch.nn.Module(), graph)(*values), values[0] @ values[1], rtol=1e-12, atol=0)


def test_weights_that_are_there_are_turned_in_one_launch():
    """Each once, whoever reads it; one that is made in between for itself, behind what makes it."""
    graph, like = fx.Graph(), {"device": "cuda"}
    with FakeTensorMode():
        values = [torch.empty(ROWS, 24, **like), torch.empty(24, 40, **like), torch.empty(40, 24, **like)]
    grad, w, v = (graph.placeholder(name) for name in ("grad", "w", "v"))
    for node, value in zip((grad, w, v), values, strict=True):
        node.meta["val"] = value
    node = grad
    for weight, target in ((w, None), (v, ATEN.cos.default), (w, None), (v, None)):
        if target is not None:
            made = graph.call_function(target, (weight,))
            made.meta["val"] = weight.meta["val"].clone()
            weight = made
        node = graph.call_function(ATEN.mm.default, (node, weight))
        node.meta["val"] = node.args[0].meta["val"].new_empty(ROWS, weight.meta["val"].shape[1])
    graph.output(node)
    assert product_layout.run(graph) == 4
    graph.lint()
    turned = graph.find_nodes(op="call_function", target=torch.ops.joestar.turn_all.default)
    assert [[weight.name for weight in node.args[0]] for node in turned] == [["w", "v"], ["cos_default"]]
    grad, w, v = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 24), (24, 40), (40, 24)))
    found = fx.GraphModule(torch.nn.Module(), graph)(grad, w, v)
    torch.testing.assert_close(found, grad @ w @ v.cos() @ w @ v)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": ROWS - 1},
        {"inner": 1024, "columns": 1024},
        {"inner": 1},
        {"columns": 1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"device": "cpu"},
        {"turned": True},
    ],
    ids=str,
)
def test_must_not_fire(settings):
    graph = product(**settings)
    before = str(graph)
    assert product_layout.run(graph) == 0
    assert str(graph) == before


def test_not_without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert product_layout.run(product()) == 0


def test_passes_that_are_switched_off_do_nothing():
    graph = product()
    FirstPasses((product_layout.NAME,))(graph)
    assert len(graph.nodes) == 4
    FirstPasses((gradient_sums.NAME,))(graph)
    assert len(graph.nodes) > 4


def test_compiled_graphs_are_told_apart():
    """By the passes, and by what they read besides the graph."""
    ids = [FirstPasses(off).uuid() for off in ((), (gradient_sums.NAME,), (product_layout.NAME,))]
    torch.backends.cuda.matmul.allow_tf32 = False
    ids.append(FirstPasses().uuid())
    assert len(set(ids)) == 4


def test_inductor_calls_it(monkeypatch):
    """In the backward graph, where the turned weight stays turned; of a CPU here, which takes the settings of a GPU."""
    from torch._inductor import ir
    from torch._inductor.compile_fx import compile_fx

    read = []
    extern = ir.ExternKernelOut.__init__

    def noted(self, layout, inputs, *args, **kwargs):
        extern(self, layout, inputs, *args, **kwargs)
        read.extend(tuple(map(int, operand.get_stride())) for operand in inputs[1:2])

    def fits(rows, weight):
        return weight.stride() == (weight.shape[1], 1) and rows.shape[0] == 50

    monkeypatch.setattr(product_layout, "_fits", fits)
    monkeypatch.setattr(FirstPasses, "uuid", lambda self: None)
    monkeypatch.setattr(ir.ExternKernelOut, "__init__", noted)
    x, weight = torch.randn(50, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    gm = make_fx(lambda x, weight: (ATEN.mm(x, weight.t()).tanh(),))(x, weight)
    (y,) = compile_fx(gm, [x, weight], config_patches={"post_grad_custom_pre_pass": FirstPasses()})(x, weight)
    found = torch.autograd.grad(y.square().sum(), (x, weight))
    expected = torch.autograd.grad((x @ weight.t()).tanh().square().sum(), (x, weight))
    assert (1, 40) in read, read
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
