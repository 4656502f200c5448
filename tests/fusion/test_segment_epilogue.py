"""Segment programs with an epilogue: which are rewritten, and that numbers and what others read stay the same."""

import operator

import pytest
import torch
import torch.nn.functional as F
from ops.segments import DOT, FILM, SEVERAL
from torch import fx
from torch._subclasses import FakeTensorMode

from joestar.fusion.backend import segment_epilogue

from .graphs import ATEN, JOESTAR, count
from .test_product_epilogue import begun, rewrites

pytest.importorskip("triton", reason="needs Triton: pip install triton (Linux)")

ROWS, NODES, EDGES = 7, 11, 20
LEAVES = {FILM: ((ROWS, 2), (NODES, 1)), "src -> sum 0": ((NODES, 1),)}


def built(program=FILM, width=40, dtype=torch.float32, device="cuda", other=None, addend="addend", biased=True,
          again=False):  # fmt: skip
    """A layer's graph; ``other``: the dtype of what is added; ``addend``: as which operand of the sum rows come."""
    graph, given, call = begun(dtype, device)
    with FakeTensorMode():
        indptr, indices = given("indptr", ROWS + 1, dtype=torch.int64), given("indices", EDGES, dtype=torch.int32)
        leaves = [given(f"leaf{k}", n, times * width) for k, (n, times) in enumerate(LEAVES[program])]
        bits = given("bits", ROWS, -(-width // 32), dtype=torch.int32)
        bias = given("bias", width) if biased else None
        made = graph.call_function(JOESTAR.segment.default, (indptr, indices, leaves, program, 1))
        made.meta["val"] = JOESTAR.segment.default(*fx.map_arg(made.args, lambda node: node.meta["val"]))
        rows = call(operator.getitem, made, 0)
        beside = given("beside", *rows.meta["val"].shape, dtype=other or dtype)
        terms = {"none": (rows, None), "addend": (rows, beside), "first": (beside, rows), "itself": (rows, rows)}[
            addend
        ]
        both = call(JOESTAR.bias_relu.default, terms[0], bias, bits, 2.0, *([terms[1]] if terms[1] else []))
        results = [call(operator.getitem, both, place) for place in (0, 1)]
        graph.output((*results, *([call(ATEN.neg.default, rows)] if again else [])))
    graph.lint()
    return graph


def given_values(graph):
    random = torch.Generator().manual_seed(0)
    for node in graph.find_nodes(op="placeholder"):
        shape = node.meta["val"].shape
        if node.name == "indptr":
            yield torch.tensor([0, 3, 3, 8, 9, 15, 18, 18])
        elif node.name == "indices":
            yield torch.randint(0, NODES, shape, generator=random, dtype=torch.int32)
        elif node.name == "bits":
            yield torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)
        else:
            yield torch.randn(shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("addend", ["none", "addend", "first"])
@pytest.mark.parametrize("program", [FILM, "src -> sum 0"])
def test_before_and_after(program, addend, biased):
    before, graph = (built(program, addend=addend, biased=biased) for _ in range(2))
    assert segment_epilogue.run(graph) == 1
    graph.lint()
    first, after = (fx.GraphModule(torch.nn.Module(), g) for g in (before, graph))
    assert not count(after, JOESTAR.segment.default) and not count(after, JOESTAR.bias_relu.default)
    assert count(after, JOESTAR.segment_bias_relu.default) == 1
    values = list(given_values(before))
    for ours, theirs in zip(after(*values), first(*values), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert segment_epilogue.run(graph) == 0
    for node in graph.nodes:
        assert node.op == "output" or "val" in node.meta


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu"}, {"width": 257}, {"again": True}, {"other": torch.float64}, {"addend": "itself"},
    ],
    ids=str,
)  # fmt: skip
def test_must_not_fire(settings):
    graph = built(**settings)
    before = str(graph)
    assert segment_epilogue.run(graph) == 0
    assert str(graph) == before


@pytest.mark.parametrize("program", [DOT, SEVERAL])
def test_no_softmax_and_no_heads(program):
    from joestar.kernels.segment_program import SegmentProgram, activates

    assert not activates(SegmentProgram.parse(program), 8)


def test_both_graphs_of_a_layer(monkeypatch):
    """As PyTorch traces them for a GPU, but for the device: loss and gradients are those of plain PyTorch."""
    monkeypatch.setattr(segment_epilogue, "_on_gpu", lambda value: True)
    random = torch.Generator().manual_seed(0)
    indptr, indices = torch.tensor([0, 3, 3, 8, 9, 15, 18, 18]), torch.randint(0, NODES, (18,), generator=random)
    dst = torch.repeat_interleave(torch.arange(ROWS), indptr.diff())
    width, own = 6, torch.randn(NODES, 4, generator=random, dtype=torch.float64)
    shapes = (width, 4), (2 * width, 4), (width, 4), (width,), (width, 3)
    trained = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]

    def layer(indptr, indices, own, lin, film, skip, bias, last):
        (y,) = JOESTAR.segment(indptr, indices, [own[:ROWS] @ film.t(), own @ lin.t()], FILM, 1)
        h, _ = JOESTAR.bias_relu(own[:ROWS] @ skip.t(), bias, None, 1.0, y)
        return (h @ last).square().sum()

    def plain(lin, film, skip, bias, last):
        beta, gamma = (own[:ROWS] @ film.t()).chunk(2, 1)
        messages = torch.relu(gamma[dst] * (own @ lin.t())[indices] + beta[dst])
        y = torch.zeros(ROWS, width, dtype=torch.float64).index_add(0, dst, messages)
        y = y / indptr.diff().clamp(min=1)[:, None]
        return (F.relu(y + own[:ROWS] @ skip.t() + bias) @ last).square().sum()

    given = indptr, indices, own
    assert rewrites(segment_epilogue.run, layer, (*given, *trained), plain(*trained), trained) == [1, 0]
