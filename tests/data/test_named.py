"""Public datasets by name, through stand-ins for the packages that download them, in those packages' forms."""

import sys
import types

import numpy as np
import pytest
import torch

import joestar
from joestar.errors import DataError

EDGES = np.array([[0, 1, 2, 3, 3, 0], [1, 2, 0, 3, 4, 1]])


class NodePropPredDataset:
    """What ``ogb.nodeproppred`` offers: one (graph, labels) pair of NumPy arrays."""

    num_classes = 4
    content: dict = {}  # noqa: RUF012
    labels = np.array([[0], [2], [1], [0], [2]])

    def __init__(self, name, root):
        if name != "ogbn-arxiv":
            raise ValueError(f"Invalid dataset name {name}, should be one of ogbn-arxiv")
        self.root = root

    def __getitem__(self, index):
        assert index == 0
        graph = {"edge_index": EDGES, "edge_feat": None, "node_feat": np.ones((5, 2), np.float32), "num_nodes": 5}
        return graph | self.content, self.labels

    def __len__(self):
        return 1

    def get_idx_split(self):
        return {"train": np.array([0, 1]), "valid": np.array([2]), "test": np.array([3, 4])}


@pytest.fixture
def ogb(monkeypatch):
    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = type("NodePropPredDataset", (NodePropPredDataset,), {})
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    return module.NodePropPredDataset


def test_ogb_by_name(ogb, tmp_path, capsys):
    graph = joestar.load("ogb:ogbn-arxiv", root=tmp_path)
    assert graph.name == "ogbn-arxiv" and graph.num_classes == 4 and not graph.multilabel
    assert graph.num_edges == 8 and graph.ndata["y"].tolist() == [0, 2, 1, 0, 2] and graph.ndata["x"].shape == (5, 2)
    assert [graph.train_idx.tolist(), graph.val_idx.tolist(), graph.test_idx.tolist()] == [[0, 1], [2], [3, 4]]
    said = capsys.readouterr().err
    assert "1 self-loop dropped" in said and "1 duplicate dropped" in said and "4 reverses added" in said
    as_given = joestar.load(
        "ogb:ogbn-arxiv", root=tmp_path, undirected=False, drop_duplicates=False, drop_self_loops=False
    )
    assert as_given.num_edges == 6
    assert "directed: 5 have no reverse" in capsys.readouterr().err
    assert len(joestar.load("ogb:ogbn-arxiv", root=tmp_path, split="random").train_idx) == 3


def test_ogb_with_edge_features_and_tasks(ogb, tmp_path):
    ogb.content = {"edge_feat": np.arange(12.0).reshape(6, 2), "node_feat": None}
    ogb.labels, ogb.num_classes = np.eye(5, 3), 2
    graph = joestar.load("ogb:ogbn-arxiv", root=tmp_path, verbose=False)
    assert graph.multilabel and graph.num_classes == 3 and "x" not in graph.ndata
    src, dst, eid = graph.coo()
    found = {
        (u, v): graph.edata["edge_attr"][e].tolist() for u, v, e in zip(src.tolist(), dst.tolist(), eid, strict=True)
    }
    assert found[0, 1] == found[1, 0] == [0, 1] and found[3, 4] == found[4, 3] == [8, 9]


def test_what_may_go_wrong_with_ogb(ogb, tmp_path, monkeypatch):
    with pytest.raises(
        DataError, match=r"ogb:ogbn-arxiw: it could not be downloaded .*ValueError: Invalid dataset name"
    ):
        joestar.load("ogb:ogbn-arxiw", root=tmp_path)
    with pytest.raises(DataError, match="expected a dataset for nodes, such as ogb:ogbn-arxiv"):
        joestar.load("ogb:ogbl-ppa", root=tmp_path)
    ogb.content = {"edge_index_dict": {}}
    with pytest.raises(DataError, match="several types of nodes"):
        joestar.load("ogb:ogbn-arxiv", root=tmp_path)
    ogb.__init__ = lambda self, name, root: sys.exit(-1)  # as it does where the download is declined
    with pytest.raises(DataError, match="SystemExit"):
        joestar.load("ogb:ogbn-arxiv", root=tmp_path)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DataError, match="come from ogb, which is not installed: pip install ogb"):
        joestar.load("ogb:ogbn-arxiv", root=tmp_path)


@pytest.fixture
def datasets(monkeypatch):
    """``torch_geometric.datasets`` with data sets that need no download."""
    data = pytest.importorskip("torch_geometric.data")
    datasets = pytest.importorskip("torch_geometric.datasets")

    class Planetoid(data.InMemoryDataset):
        """As ``torch_geometric.datasets.Planetoid``: a graph in memory, masks of the splits."""

        graphs = 1

        def __init__(self, root, name):
            if name not in ("Cora", "PubMed"):
                raise ConnectionError("<urlopen error [Errno -2] Name or service not known>")
            super().__init__(None)
            mask = torch.tensor([True, False, True, False, False])
            one = data.Data(
                x=torch.ones(5, 2), y=torch.tensor([3, 1, 0, 2, 3]), edge_index=torch.from_numpy(EDGES),
                train_mask=mask, val_mask=torch.tensor([False, True, False, False, False]), test_mask=mask.flip(0),
            )  # fmt: skip
            self.where = root
            self.data, self.slices = self.collate([one] * self.graphs)
            Planetoid.last = self

    monkeypatch.setattr(datasets, "Planetoid", Planetoid)
    return datasets


def test_pyg_by_name(datasets, tmp_path, capsys):
    graph = joestar.load("pyg:Planetoid/Cora", root=tmp_path)
    assert graph.name == "Planetoid/Cora" and graph.num_classes == 4 and graph.num_edges == 6
    assert graph.train_idx.tolist() == [0, 2] and graph.val_idx.tolist() == [1] and graph.test_idx.tolist() == [2, 4]
    assert datasets.Planetoid.last.where == str(tmp_path / "pyg" / "Planetoid")
    both = joestar.load("pyg:Planetoid/Cora", root=tmp_path, undirected=True, split="random", seed=1)
    assert both.num_edges == 9 and len(both.train_idx) == 3  # the loop stays: nobody asked to drop it
    assert "reverses added" in capsys.readouterr().err


def test_what_may_go_wrong_with_pyg(datasets, tmp_path, monkeypatch):
    for name, message in (
        ("pyg:Planetoid/Core", r"could not be downloaded to, or read from, .*Planetoid \(ConnectionError: <urlopen"),
        ("pyg:Planetoid", r"could not be downloaded .*\(TypeError: "),
        ("pyg:Planetoids/Cora", "has no 'Planetoids'. Did you mean 'pyg:Planetoid'"),
        ("pyg:", "has no ''.* such as pyg:Planetoid/Cora"),
    ):
        with pytest.raises(DataError, match=message):
            joestar.load(name, root=tmp_path)
    datasets.Planetoid.graphs = 2
    with pytest.raises(DataError, match="it has 2 graphs, and Joestar trains on one"):
        joestar.load("pyg:Planetoid/Cora", root=tmp_path)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(
        DataError, match="come from torch_geometric, which is not installed: pip install torch-geometric"
    ):
        joestar.load("pyg:Planetoid/Cora", root=tmp_path)
