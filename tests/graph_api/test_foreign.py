"""Graphs of PyTorch Geometric and NetworkX in the forms in which people have them."""

import warnings

import networkx as nx
import numpy as np
import pytest
import torch

import joestar
from joestar.errors import DataError, GraphError, JoestarWarning
from joestar.graph_api import Graph

pyg = pytest.importorskip("torch_geometric.data")
EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])


def _data(**extra):
    data = pyg.Data(x=torch.randn(5, 3), edge_index=EDGES, num_nodes=5)
    for name, value in extra.items():
        setattr(data, name, value)
    return data


def test_masks_of_several_splits():
    masks = torch.zeros(5, 3, dtype=torch.bool)
    masks[[0, 2, 4], [0, 1, 1]] = True
    data = _data(train_mask=masks, val_mask=~masks[:, :1], y=torch.tensor([2, 0, 1, -1, 1]))
    with pytest.raises(GraphError, match=r"split must be in 0..0, as data.val_mask is \[5, 1\]; got 1"):
        Graph.from_pyg(data, split=1)
    assert Graph.from_pyg(data, split=0).val_idx.tolist() == [1, 2, 3, 4]
    with pytest.raises(
        GraphError, match=r"train_mask is \[5, 3\]: 3 splits of the nodes. Choose one: .*split=0\), up to 2"
    ):
        Graph.from_pyg(data)
    for wrong in (3, -1, True):
        with pytest.raises(GraphError, match=r"split must be in 0\.\.2"):
            Graph.from_pyg(_data(train_mask=masks), split=wrong)
    one = Graph.from_pyg(_data(val_mask=masks[:, :1]))
    assert one.val_idx.tolist() == [0] and "val_mask" not in one.ndata
    for split in range(3):
        both = _data(train_mask=masks, test_mask=~masks)
        graph = joestar.load(both, split=split)
        assert torch.equal(graph.train_idx, masks[:, split].nonzero().flatten())
        assert torch.equal(graph.test_idx, (~masks[:, split]).nonzero().flatten())


def test_ids_of_splits_and_labels_of_one_column_as_ogb_has_them():
    data = _data(train_idx=torch.tensor([0, 1]), valid_idx=torch.tensor([2]), test_idx=torch.tensor([3]),
                 y=torch.tensor([[2], [0], [1], [0], [1]], dtype=torch.int32))  # fmt: skip
    with pytest.warns(JoestarWarning, match=r"of shape \[5, 1\] holds a class id per node"):
        graph = Graph.from_pyg(data)
    assert [graph.train_idx.tolist(), graph.val_idx.tolist(), graph.test_idx.tolist()] == [[0, 1], [2], [3]]
    assert graph.ndata["y"].tolist() == [2, 0, 1, 0, 1] and graph.ndata["y"].dtype == torch.int64
    assert graph.num_classes == 3 and set(graph.ndata) == {"x", "y"}


class SparseTensor:
    """The part of torch_sparse.SparseTensor that is read."""

    def __init__(self, row, col, value):
        self.parts = row, col, value

    def coo(self):
        return self.parts


@pytest.mark.parametrize("form", ["SparseTensor", "csr", "coo", "plain"])
def test_a_transposed_adjacency_stands_for_edges(form):
    weight = torch.arange(6.0) + 2
    if form == "plain":
        weight = None
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(6) if weight is None else weight, (5, 5))
    adjacency = {"SparseTensor": SparseTensor(EDGES[1], EDGES[0], weight), "csr": matrix.to_sparse_csr()}.get(
        form, matrix
    )
    data = _data(y=torch.arange(5))
    del data.edge_index
    data.adj_t = adjacency
    graph = Graph.from_pyg(data)
    plain = Graph.from_edge_index(EDGES, 5, edata={} if weight is None else {"edge_weight": weight})
    if form == "csr":  # coalesced: 0 -> 1 stands there twice
        plain = Graph.from_edge_index([[2, 0, 2, 3, 1], [2, 1, 0, 1, 3]], 5, edata={"edge_weight": [2.0, 9, 4, 5, 7]})
    key = lambda g: sorted(zip(*(t.tolist() for t in (*g.coo()[:2], *g.edata.values())), strict=True))  # noqa: E731
    assert key(graph) == key(plain)
    assert set(graph.edata) == set(plain.edata) and set(graph.ndata) == {"x", "y"}


def test_datasets_and_multi_label_targets():
    class Dataset(list):
        num_classes, num_node_features = 7, 3

        def get(self, index):
            return self[index]

    graph = joestar.load(Dataset([_data(y=torch.tensor([0, 1, 2, 0, 1]))]))
    assert graph.num_classes == 7 and sorted(
        torch.cat([graph.train_idx, graph.val_idx, graph.test_idx]).tolist()
    ) == list(range(5))
    with pytest.raises(GraphError, match=r"this dataset has 2. Give one of them, dataset\[0\]"):
        Graph.from_pyg(Dataset([_data(), _data()]))
    graph = Graph.from_pyg(_data(y=torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 0]])))
    assert graph.multilabel and graph.num_classes == 2 and graph.ndata["y"].dtype == torch.float32
    graph = Graph.from_pyg(_data(y=torch.rand(5, 1)))
    assert not graph.multilabel and graph.num_classes is None and graph.ndata["y"].shape == (5, 1)


def test_load_chooses_by_what_a_thing_has(capsys):
    import scipy.sparse

    graph = Graph.from_edge_index(EDGES, 5)
    assert joestar.load(graph) is graph
    matrix = scipy.sparse.coo_array((np.ones(3, np.float32), ([0, 1, 2], [1, 2, 0])))
    assert joestar.load(matrix).num_edges == 3
    both = joestar.load(matrix, undirected=True)
    assert both.num_edges == 6 and "3 reverses added" in capsys.readouterr().err
    assert joestar.load(nx.path_graph(3)).num_edges == 4
    for wrong, message in (
        (EDGES, r"got Tensor. For edges \[2, E\] call joestar.Graph.from_edge_index"),
        (EDGES.numpy(), "got ndarray. For edges"),
        ([(0, 1)], "got list. .*joestar.data.from_tables"),
        (7, "joestar.load takes a name, a path, PyG's Data, .* got int"),
    ):
        with pytest.raises(DataError, match=message):
            joestar.load(wrong)
    with pytest.raises(GraphError, match="homogeneous Data"):
        joestar.load(pyg.HeteroData())


# --- NetworkX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nx.Graph, nx.DiGraph, nx.MultiGraph, nx.MultiDiGraph])
def test_networkx_keeps_edges_weights_and_names(kind):
    pairs = [("a", "b", 1.0), ("b", "c", 2.0), ("c", "c", 3.0), ("a", (0, 1), 4.0), ("b", "a", 5.0)]
    given = kind()
    given.add_node("alone")
    given.add_weighted_edges_from(pairs)
    graph = Graph.from_networkx(given)
    expected = [(u, v, w["weight"]) for u, v, w in given.edges(data=True)]
    if not given.is_directed():
        expected += [(v, u, w) for u, v, w in expected if u != v]
    src, dst, eid = graph.coo()
    found = zip(
        graph.mapping.to_raw(src), graph.mapping.to_raw(dst), graph.edata["edge_weight"][eid].tolist(), strict=True
    )
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert graph.mapping.to_ids((0, 1)) == list(given.nodes).index((0, 1))
    assert graph.mapping.to_ids(["alone", (0, 1)]).tolist() == [0, graph.mapping.to_ids((0, 1))]


def test_networkx_attributes():
    given = nx.Graph([(5, 7), (7, 9)])
    for node, kind in ((5, "cat"), (7, "dog"), (9, "cat")):
        given.nodes[node].update(a=node, v=[1.0, node], kind=kind)
    graph = Graph.from_networkx(given, features=["a", "v"], label="kind")
    assert graph.ndata["x"].tolist() == [[5, 1, 5], [7, 1, 7], [9, 1, 9]]
    assert graph.ndata["y"].tolist() == [0, 1, 0] and graph.class_names == ["cat", "dog"] and graph.num_classes == 2
    assert graph.mapping.is_integer and graph.mapping.to_ids([9, 5]).tolist() == [2, 0]
    karate = Graph.from_networkx(nx.karate_club_graph(), label="club")
    assert karate.num_nodes == 34 and karate.num_edges == 156 and karate.class_names == ["Mr. Hi", "Officer"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nx.set_node_attributes(given, {5: 0.5, 7: 1.5, 9: 2.0}, "y")
        nx.set_node_attributes(given, 1.0, "x")
    graph = joestar.load(given)
    assert graph.ndata["y"].tolist() == [0.5, 1.5, 2.0] and graph.ndata["x"].shape == (3, 1)
    del given.nodes[9]["a"]
    given.nodes[5]["v"] = "tall"
    given.edges[5, 7]["weight"] = 2
    for options, message in (
        ({"features": ["a"]}, "node 9 has no attribute 'a'; the first node has: 'a', 'v', 'kind'"),
        ({"features": ["v"]}, "'v' must be a number, or vectors of one length; got such as 'tall'"),
        ({"label": "none"}, "node 5 has no attribute 'none'"),
        ({}, r"the edge \(7, 9\) has no 'weight', others have; weight=None leaves it out"),
    ):
        with pytest.raises(GraphError, match=message):
            Graph.from_networkx(given, **options, **({} if not options else {"weight": None}))


@pytest.mark.parametrize(
    "weight",
    ["a", "nan", None, [1, 2], float("nan"), float("inf"), np.ones(2), torch.ones(2), 1j, 10**400, -1e300],
    ids=lambda weight: repr(weight)[:20],
)
def test_networkx_weights_are_finite_numbers(weight):
    given = nx.Graph()
    given.add_edge("a", "b", weight=2)
    given.add_edge("b", "c", weight=weight)
    with pytest.raises(GraphError, match=r"'weight' of the edge \('b', 'c'\) must be a finite number; got"):
        Graph.from_networkx(given)
    assert not Graph.from_networkx(given, weight=None).edata
    for value in (True, np.float32(1), torch.tensor(1), np.array(1), "1", torch.tensor([1.0]), np.ones((1, 1))):
        given.edges["b", "c"]["weight"] = value
        assert sorted(Graph.from_networkx(given).edata["edge_weight"].tolist()) == [1, 1, 2, 2]


def test_networkx_labels_are_told_as_those_of_pyg():
    def of(*values, **options):
        given = nx.path_graph(len(values))
        nx.set_node_attributes(given, dict(enumerate(values)), "y")
        return Graph.from_networkx(given, **options)

    assert of(-1, -1, -1).num_classes is None and of(-1, 4, 0).num_classes == 5
    several = of([0, 1], [1, 1], [0, 0])
    assert several.multilabel and several.num_classes == 2 and several.ndata["y"].dtype == torch.float32
    with pytest.raises(GraphError, match=r"node attribute 'y' must be .* each row as long as the others"):
        of([0, 1], [1], [0, 0])
    with pytest.warns(JoestarWarning, match=r"of shape \[3, 1\] holds a class id per node"):
        assert of([2], [0], [1]).num_classes == 3
    assert of(1.0, 2.0, 4.5).num_classes is None


def test_one_feature_of_networkx_is_given_by_its_name():
    given = nx.path_graph(2)
    for node in given:
        given.nodes[node].update(ab=node, a=5, b=6)
    assert Graph.from_networkx(given, features="ab").ndata["x"].tolist() == [[0], [1]]


def test_what_is_no_sparse_matrix_is_told():
    import scipy.sparse

    for wrong, name in ((np.eye(4), "ndarray"), (torch.eye(4), "Tensor"), ([[1]], "list")):
        with pytest.raises(GraphError, match=f"needs a sparse matrix of SciPy; got {name}"):
            Graph.from_scipy(wrong)
    if hasattr(scipy.sparse, "coo_array"):
        try:
            line = scipy.sparse.coo_array(np.array([1, 0, 2]))
        except ValueError:  # SciPy 1.12 has no arrays of one dimension
            return
        if len(line.shape) == 1:
            with pytest.raises(GraphError, match=r"needs a square matrix .*; got \(3,\)"):
                Graph.from_scipy(line)
