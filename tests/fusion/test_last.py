"""What is done with Inductor's graphs at the end, on a GPU: kernels of our ops begin to be compiled."""

import operator

import pytest
import torch
from torch import fx

from joestar.fusion.backend import last
from joestar.fusion.backend.last import LastPasses, calls
from joestar.ops import registry

ops, aten = torch.ops.joestar, torch.ops.aten


def graph_of(*made):
    """Placeholders of these shapes and dtypes: (graph, nodes)."""
    graph, nodes = fx.Graph(), []
    for i, (shape, dtype) in enumerate(made):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        nodes.append(node)
    return graph, nodes


def call(graph, target, args, shape):
    node = graph.call_function(target, args)
    node.meta["val"] = torch.empty(shape, device="meta")
    return node


@pytest.fixture
def kernels(monkeypatch):
    """In place of kernels: (op, arguments) of every call."""
    found = []
    for name in ("gather_linear", "gather_linears"):
        monkeypatch.setitem(registry._ON_GPU, name, lambda *args, name=name, **more: found.append((name, args, more)))
    return found


def test_ops_are_called_with_what_has_shapes_and_no_memory(kernels):
    """Strides and lists, too; the same call once, of ops of ours only, and not before somebody asks."""
    graph, (table, ids, weight, bias) = graph_of(
        ((50, 8), torch.float32), ((20,), torch.int32), ((4, 8), torch.float32), ((4,), torch.float32)
    )
    first = call(graph, ops.gather_linear.default, (table, ids, weight, bias), (20, 4))
    again = call(graph, ops.gather_linear.default, (table, ids, weight, bias), (20, 4))
    turned = call(graph, aten.t.default, (first,), (4, 20))
    turned.meta["val"] = first.meta["val"].t()
    several = graph.call_function(ops.gather_linears.default, (table, ids, [weight, turned], []))
    several.meta["val"] = [torch.empty(20, 4, device="meta")] * 2
    graph.output((again, call(graph, operator.getitem, (several, 0), (20, 4))))
    found = calls(graph)
    assert kernels == []
    for each in found:
        each()
    (name, args, more), (other, lists, _) = kernels
    assert (name, other, more) == ("gather_linear", "gather_linears", {})
    assert [(tuple(a.shape), a.dtype, a.device.type) for a in args[:2]] == [
        ((50, 8), torch.float32, "meta"), ((20,), torch.int32, "meta"),
    ]  # fmt: skip
    assert lists[2][1].shape == (4, 20) and lists[2][1].stride() == (1, 4) and lists[3] == []


def test_sizes_that_are_not_known_are_left_to_the_launch(kernels):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph, (table, ids, weight, bias) = graph_of(
        ((50, 8), torch.float32), ((20,), torch.int32), ((4, 8), torch.float32), ((4,), torch.float32)
    )
    size = ShapeEnv().create_unbacked_symint()
    ids.meta["val"] = torch.empty_strided((size,), (1,), dtype=torch.int32, device="meta")
    graph.output(call(graph, ops.gather_linear.default, (table, ids, weight, bias), (20, 4)))
    assert calls(graph) == []


def test_compiling_begins_once_a_graph_of_a_gpu_is_there(monkeypatch):
    """And ``overlap`` runs behind it, unless it is off; on a CPU nothing begins."""
    begun, rewritten = [], []
    monkeypatch.setattr(last, "compile_soon", lambda graph: begun.append(len(rewritten)))
    monkeypatch.setattr(last.Overlap, "__call__", lambda self, graph: rewritten.append(graph))
    graph, nodes = graph_of(((3,), torch.float32))
    graph.output(nodes[0])
    LastPasses()(graph)
    LastPasses(overlap=False)(graph)
    assert begun == [0, 1] and rewritten == [graph]
    assert LastPasses().uuid() == LastPasses().uuid() != LastPasses(overlap=False).uuid()
    assert LastPasses(overlap=False).uuid()  # without one, Inductor keeps nothing
    monkeypatch.undo()
    last.compile_soon(graph)
    from joestar.kernels import compile_ahead

    assert compile_ahead._begun == []
