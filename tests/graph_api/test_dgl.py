"""Graphs from DGL and back, by duck typing: DGL itself is not installed, a stand-in has the methods that are used."""

import sys
import types

import pytest
import torch

from joestar.errors import GraphError, JoestarWarning
from joestar.graph_api import Graph


class StandIn:
    """What ``dgl.DGLGraph`` offers of a homogeneous graph."""

    is_homogeneous = True

    def __init__(self, ends, num_nodes: int):
        self.ends, self.number = ends, num_nodes
        self.ndata, self.edata = {}, {}

    def num_nodes(self) -> int:
        return self.number

    def edges(self, form: str = "uv", order: str = "eid"):
        assert (form, order) == ("uv", "eid")
        return self.ends


def _dgl_graph() -> StandIn:
    graph = StandIn((torch.tensor([2, 0, 2, 0]), torch.tensor([2, 1, 0, 1])), 4)
    graph.ndata = {"feat": torch.eye(4), "label": torch.arange(4), "h": torch.ones(4, 2)}
    graph.ndata["train_mask"] = torch.tensor([True, False, True, False])
    graph.ndata["test_mask"] = torch.tensor([False, False, False, True])
    graph.edata = {"w": torch.arange(4.0)}
    return graph


@pytest.fixture
def dgl(monkeypatch):
    """A module ``dgl`` that can make graphs."""
    module = types.ModuleType("dgl")
    module.graph = lambda ends, num_nodes: StandIn(ends, num_nodes)
    monkeypatch.setitem(sys.modules, "dgl", module)


def test_from_dgl():
    graph = Graph.from_dgl(_dgl_graph())
    assert graph.num_nodes == 4
    assert graph.indptr.tolist() == [0, 1, 3, 4, 4] and graph.indices.tolist() == [2, 0, 0, 2]
    assert graph.edata["w"].tolist() == [2, 1, 3, 0]  # in CSC order
    assert set(graph.ndata) == {"x", "y", "h"}
    assert graph.train_idx.tolist() == [0, 2] and graph.test_idx.tolist() == [3] and graph.val_idx is None
    assert set(Graph.from_dgl(_dgl_graph(), names={}).ndata) == {"feat", "label", "h"}


def test_there_and_back(dgl):
    graph = Graph.from_dgl(_dgl_graph(), names={})
    made = graph.to_dgl()
    assert torch.equal(made.ndata["train_mask"], _dgl_graph().ndata["train_mask"])
    again = Graph.from_dgl(made, names={})
    assert torch.equal(again.indptr, graph.indptr) and torch.equal(again.indices, graph.indices)
    for one, other in ((again.ndata, graph.ndata), (again.edata, graph.edata)):
        assert {name: value.tolist() for name, value in one.items()} == {k: v.tolist() for k, v in other.items()}
    assert torch.equal(again.train_idx, graph.train_idx) and again.val_idx is None


def test_graphs_of_several_types_are_refused():
    several = _dgl_graph()
    several.is_homogeneous = False
    with pytest.raises(GraphError, match=r"from_dgl needs a homogeneous graph.*dgl\.to_homogeneous"):
        Graph.from_dgl(several)


def test_without_dgl(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(GraphError, match="to_dgl needs DGL"):
        Graph.from_dgl(_dgl_graph()).to_dgl()


def test_labels_are_told_as_those_of_pyg():
    graph = _dgl_graph()
    graph.ndata["label"] = torch.tensor([[2], [0], [-1], [1]], dtype=torch.int32)
    graph.ndata["train_mask"] = torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    with pytest.warns(JoestarWarning, match="holds a class id per node"):
        made = Graph.from_dgl(graph)
    assert made.ndata["y"].tolist() == [2, 0, -1, 1] and made.ndata["y"].dtype == torch.int64
    assert made.num_classes == 3 and made.train_idx.tolist() == [0, 2]
    graph.ndata["label"] = torch.eye(4).long()
    made = Graph.from_dgl(graph)
    assert made.multilabel and made.num_classes == 4 and made.ndata["y"].dtype == torch.float32
    graph.ndata["train_mask"] = torch.tensor([0.5, 0, 1, 0])
    with pytest.raises(GraphError, match="must be a mask"):
        Graph.from_dgl(graph)


def test_a_mask_that_says_something_else_than_the_split_is_not_overwritten(dgl):
    graph = Graph.from_dgl(_dgl_graph())
    graph.ndata["train_mask"] = torch.tensor([1, 0, 1, 0])
    assert graph.to_dgl().ndata["train_mask"].tolist() == [1, 0, 1, 0]
    graph.ndata["train_mask"] = torch.tensor([1, 1, 0, 0])
    with pytest.raises(GraphError, match="to_dgl: ndata and a split both have 'train_mask', and they differ: rename"):
        graph.to_dgl()
