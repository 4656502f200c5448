"""Small products whose rows are no multiple of 16 bytes: which are rewritten, and numbers stay the same."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from joestar.fusion.backend import unaligned_products
from joestar.fusion.backend.first import FirstPasses

pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

pytestmark = pytest.mark.usefixtures("tf32")

ATEN, JOESTAR = torch.ops.aten, torch.ops.joestar
OURS = JOESTAR.mm_unaligned.default


def product(
    rows=1000, inner=256, columns=47, dtype=torch.bfloat16, device="cuda", turned=True, bias=None, lies=None, **kwargs
) -> fx.Graph:
    """``x @ w``, or ``addmm`` with a ``bias`` of these dimensions, of values that only pretend to be there."""
    graph = fx.Graph()
    with FakeTensorMode():
        x, weight = graph.placeholder("x"), graph.placeholder("w")
        x.meta["val"] = torch.empty(rows, inner, dtype=dtype, device=device)
        if lies is not None:
            x.meta["val"] = torch.empty_strided((rows, inner), lies, dtype=dtype, device=device)
        weight.meta["val"] = torch.empty(inner, columns, dtype=dtype, device=device)
        if turned:
            weight.meta["val"] = torch.empty(columns, inner, dtype=dtype, device=device).t()
        args, target = (x, weight), ATEN.mm.default
        if bias is not None:
            added = graph.placeholder("b")
            added.meta["val"] = torch.empty(*bias, dtype=dtype, device=device)
            args, target = (added, x, weight), ATEN.addmm.default
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty(rows, columns, dtype=dtype, device=device)
    graph.output(node)
    return graph


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"bias": (47,)},
        {"inner": 47, "columns": 256, "turned": False},
    ],
    ids=str,
)
def test_before_and_after(settings):
    graph = product(**settings)
    assert unaligned_products.run(graph) == 1
    graph.lint()
    (new,) = graph.find_nodes(op="call_function", target=OURS)
    assert new.meta["val"].shape == (1000, settings.get("columns", 47))
    x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 24), (24, 40), (40,)))
    given = [x, w, b] if "bias" in settings else [x, w]
    found = fx.GraphModule(torch.nn.Module(), graph)(*given)
    assert torch.allclose(found, x @ w + (b if "bias" in settings else 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": 48},
        {"columns": 44, "dtype": torch.float32},
        {"rows": unaligned_products._ROWS + 1},
        {"inner": 520},
        {"columns": 600},
        {"inner": 1},
        {"columns": 1},
        {"rows": 1},
        {"dtype": torch.float64},
        {"device": "cpu"},
        {"lies": (1, 1000)},
        {"bias": (1000, 47)},
        {"bias": (1, 47)},
        {"bias": (47,), "alpha": 2},
    ],
    ids=str,
)
def test_must_not_fire(settings):
    graph = product(**settings)
    before = str(graph)
    assert unaligned_products.run(graph) == 0
    assert str(graph) == before


def test_not_without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    assert unaligned_products.run(product(dtype=torch.float32)) == 0
    assert unaligned_products.run(product()) == 1


def test_switched_off():
    graph = product()
    FirstPasses((unaligned_products.NAME,))(graph)
    assert not graph.find_nodes(op="call_function", target=OURS)
    FirstPasses()(graph)
    assert graph.find_nodes(op="call_function", target=OURS)
