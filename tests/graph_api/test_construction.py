"""Graphs from other forms and back, and what is refused on the way."""

import numpy as np
import pytest
import scipy.sparse
import torch

from joestar.errors import GraphError, JoestarWarning
from joestar.graph_api import Graph

# Edges in no order, with a loop (2, 2), a duplicate (0, 1) and an isolated node 4.
EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])
INDPTR, INDICES, ORDER = [0, 1, 4, 5, 6, 6], [2, 0, 3, 0, 2, 1], [2, 1, 3, 4, 0, 5]


def _graph(**frames) -> Graph:
    return Graph.from_edge_index(EDGES, 5, **frames)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_from_csc_takes_the_tensors_as_they_are(ids):
    indptr, indices = torch.tensor(INDPTR), torch.tensor(INDICES, dtype=ids)
    x, w = torch.randn(5, 2), torch.arange(6)
    graph = Graph.from_csc(indptr, indices, {"x": x}, {"w": w})
    assert graph.indptr.data_ptr() == indptr.data_ptr()
    assert graph.indices.data_ptr() == indices.data_ptr()
    assert graph.indices.dtype == ids
    assert (graph.num_nodes, graph.num_edges, graph.num_src, graph.num_dst) == (5, 6, 5, 5)
    assert graph.ndata["x"] is x
    assert graph.edata["w"] is w
    assert graph.train_idx is graph.val_idx is graph.test_idx is graph.num_classes is None


def test_from_csc_makes_strided_tensors_contiguous():
    both = torch.stack([torch.tensor(INDPTR), torch.zeros(6, dtype=torch.int64)], 1)
    graph = Graph.from_csc(both[:, 0], torch.tensor([INDICES, INDICES]).t()[:, 0])
    assert graph.indptr.is_contiguous()
    assert graph.indices.is_contiguous()
    assert graph.indptr.tolist() == INDPTR


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_from_edge_index_sorts_by_destination_and_takes_edata_along(ids):
    w = torch.arange(6.0)
    vector = torch.randn(6, 3)
    graph = Graph.from_edge_index(EDGES.to(ids), 5, {"x": torch.eye(5)}, {"w": w, "v": vector})
    assert graph.indptr.tolist() == INDPTR
    assert graph.indices.tolist() == INDICES
    assert graph.indices.dtype == torch.int32
    assert graph.edata["w"].tolist() == ORDER
    assert torch.equal(graph.edata["v"], vector[ORDER])
    assert torch.equal(graph.ndata["x"], torch.eye(5))


def test_from_edge_index_counts_the_nodes():
    assert Graph.from_edge_index(EDGES).num_nodes == 4
    assert Graph.from_edge_index(EDGES, 9).in_degrees().tolist() == [1, 3, 1, 1, 0, 0, 0, 0, 0]
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    assert (empty.num_nodes, empty.num_edges, empty.indptr.tolist()) == (3, 0, [0, 0, 0, 0])


@pytest.mark.parametrize("form", ["csr_array", "csc_array", "coo_array", "csr_matrix"])
def test_from_scipy_and_back(form):
    values = np.array([5.0, -1.0, 2.5, 4.0, 3.0])
    u, v = np.array([2, 0, 2, 3, 1]), np.array([2, 1, 0, 1, 3])
    matrix = getattr(scipy.sparse, form)(scipy.sparse.coo_array((values, (u, v)), shape=(5, 5)))
    with pytest.warns(JoestarWarning, match=r"edata\['w'\] was float64, NumPy's default, and is kept as float32"):
        graph = Graph.from_scipy(matrix, {"x": torch.ones(5, 1)})
    src, dst, _ = graph.coo()
    back = scipy.sparse.coo_array((graph.edata["w"].numpy(), (src.numpy(), dst.numpy())), shape=(5, 5))
    assert graph.edata["w"].dtype == torch.float32
    assert (back != scipy.sparse.coo_array(matrix)).nnz == 0
    assert graph.num_nodes == 5
    assert graph.ndata["x"].shape == (5, 1)


def test_from_scipy_keeps_stored_zeros_and_duplicates():
    matrix = scipy.sparse.coo_array(
        (np.array([0.0, 1.0, 2.0]), (np.array([0, 1, 1]), np.array([1, 0, 0]))), shape=(2, 2)
    )
    graph = Graph.from_scipy(matrix)
    assert graph.indices.tolist() == [1, 1, 0]
    assert graph.edata["w"].tolist() == [1.0, 2.0, 0.0]


def test_from_scipy_needs_a_square_matrix():
    with pytest.raises(GraphError, match=r"square matrix.*got \(2, 3\)"):
        Graph.from_scipy(scipy.sparse.csr_array((2, 3)))


# --- PyG ------------------------------------------------------------------------------------------------------------


def _data():
    data = pytest.importorskip("torch_geometric.data").Data(
        x=torch.randn(5, 3), y=torch.arange(5), edge_index=EDGES, edge_attr=torch.arange(6.0), num_nodes=5
    )
    data.edge_kind = torch.arange(6) + 10
    data.train_mask = torch.tensor([True, False, True, False, False])
    data.val_mask = torch.tensor([False, True, False, False, False])
    data.name = "toy"
    return data


def test_from_pyg_takes_node_and_edge_tensors_and_splits():
    data = _data()
    graph = Graph.from_pyg(data)
    assert graph.indices.tolist() == INDICES
    assert set(graph.ndata) == {"x", "y"}
    assert set(graph.edata) == {"edge_attr", "edge_kind"}
    assert torch.equal(graph.ndata["x"], data.x)
    assert graph.edata["edge_attr"].tolist() == ORDER
    assert graph.train_idx.tolist() == [0, 2]
    assert graph.val_idx.tolist() == [1]
    assert graph.test_idx is None


def test_pyg_round_trip():
    once = Graph.from_pyg(_data())
    data = once.to_pyg()
    assert data.num_nodes == 5
    assert torch.equal(data.train_mask, _data().train_mask)
    twice = Graph.from_pyg(data)
    assert torch.equal(twice.indptr, once.indptr)
    assert torch.equal(twice.indices, once.indices)
    for name in ("ndata", "edata"):
        before, after = getattr(once, name), getattr(twice, name)
        assert set(before) == set(after)
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(twice.train_idx, once.train_idx)
    assert twice.test_idx is None


def test_from_pyg_needs_a_homogeneous_graph():
    pyg = pytest.importorskip("torch_geometric.data")
    for data in (pyg.HeteroData(), pyg.Data(x=torch.ones(3, 1))):
        with pytest.raises(GraphError, match="homogeneous Data object with edge_index or adj_t"):
            Graph.from_pyg(data)


# --- errors ---------------------------------------------------------------------------------------------------------


def _csc(indptr=None, indices=None, dtype=torch.int64):
    return torch.tensor(indptr or INDPTR), torch.tensor(indices or INDICES, dtype=dtype)


BAD_CSC = {
    "start": (_csc([1, 1, 4, 5, 6, 6]), "indptr must start at 0; got 1"),
    "decreases": (_csc([0, 1, 4, 3, 6, 6]), r"must not decrease; indptr\[2\] = 4 and indptr\[3\] = 3"),
    "end, short": (_csc([0, 1, 4, 5, 5, 5]), "end at the number of edges, 6; got 5"),
    "end, long": (_csc([0, 1, 4, 5, 6, 7]), "end at the number of edges, 6; got 7"),
    "id too large": (_csc(None, [2, 0, 5, 0, 2, 1]), r"indices\[2\] = 5 is not a node: ids must be in \[0, 5\)"),
    "id negative": (_csc(None, [2, 0, 3, -1, 2, 1]), r"indices\[3\] = -1 is not a node"),
    "indices float": (_csc(dtype=torch.float32), "indices must be int32 or int64; got torch.float32"),
    "indices int16": (_csc(dtype=torch.int16), "indices must be int32 or int64; got torch.int16"),
    "indptr int32": (
        (torch.tensor(INDPTR).int(), torch.tensor(INDICES)),
        r"indptr must be int64; got torch.int32.*\.to",
    ),
    "indptr 2-d": (
        (torch.zeros(2, 2).long(), torch.tensor(INDICES)),
        r"indptr must be a one-dimensional tensor; got \[2, 2\]",
    ),
    "indices text": ((torch.tensor(INDPTR), ["a"] * 6), "indices must hold numbers; got list of dtype <U1"),
    "no nodes": ((torch.tensor([0]), torch.tensor([], dtype=torch.int64)), "the graph is empty"),
    "no offsets": ((torch.tensor([], dtype=torch.int64),) * 2, "the graph is empty"),
    "two devices": (
        (torch.tensor(INDPTR), torch.tensor(INDICES, device="meta")),
        "on cpu and indices on meta; move both",
    ),
}


@pytest.mark.parametrize(("csc", "message"), BAD_CSC.values(), ids=BAD_CSC.keys())
def test_malformed_csc(csc, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_csc(*csc)


def test_contents_are_not_read_without_validation():
    graph = Graph.from_csc(torch.tensor([0, 1]), torch.tensor([7]), validate=False)
    assert graph.num_edges == 1
    with pytest.raises(GraphError, match="one-dimensional"):
        Graph.from_csc(torch.tensor(0), torch.tensor([7]), validate=False)


BAD_EDGE_INDEX = {
    "id too large": ((EDGES, 3), r"edge_index\[0, 3\] = 3 is not a node: ids must be in \[0, 3\)"),
    "id negative": ((EDGES - 1, None), r"edge_index\[0, 1\] = -1 is not a node"),
    "transposed": ((EDGES.t(), 5), r"tensor \[2, E\].*got \[6, 2\]"),
    "one row": ((EDGES[0], 5), r"tensor \[2, E\].*got \[6\]"),
    "list": (([0, 1], 5), r"tensor \[2, E\].*got \[2\]"),
    "text": (([["a"], ["b"]], 5), r"must hold numbers.*joestar.data.from_tables"),
    "ragged": (([[0, 1], [1]], 5), "each row as long as the others"),
    "pairs": (([[0, 1], [1, 2], [2, 3]], 5), r"got \[3, 2\]. Turn it with edge_index.T"),
    "huge": ((EDGES + 10**10, None), "would have 10,000,000,004 nodes. joestar.data.from_tables.* relabels"),
    "beyond int64": ((np.array([[1], [2**64 - 1]], dtype=np.uint64), None), "beyond int64. Relabel"),
    "too large for num_nodes": ((EDGES, 3), "relabels ids of any kind, or give a num_nodes above 3"),
    "float": ((EDGES.float(), 5), "int32 or int64; got torch.float32"),
    "no nodes": ((EDGES[:, :0], None), "at least one node; give num_nodes"),
    "a fraction of nodes": ((EDGES, 5.0), "num_nodes must be a positive whole number; got 5.0"),
    "text for num_nodes": ((EDGES, "5"), "num_nodes must be a positive whole number; got '5'"),
    "True for num_nodes": ((EDGES, True), "num_nodes must be a positive whole number; got True"),
    "zero nodes": ((EDGES[:, :0], 0), "at least one node"),
}


@pytest.mark.parametrize(("args", "message"), BAD_EDGE_INDEX.values(), ids=BAD_EDGE_INDEX.keys())
def test_malformed_edge_index(args, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_edge_index(*args)


def test_rows_of_node_and_edge_tensors():
    with pytest.raises(GraphError, match=r"ndata\['x'\] needs one row .* 5 nodes; got shape \[4, 2\]"):
        _graph(ndata={"x": torch.ones(4, 2)})
    with pytest.raises(GraphError, match=r"edata\['w'\] needs one row .* 6 edges; got shape \[5\]"):
        _graph(edata={"w": torch.ones(5)})
    with pytest.raises(GraphError, match=r"ndata\['x'\] is a sparse tensor \(torch.sparse_coo\).*value.to_dense\(\)"):
        Graph.from_edge_index(EDGES, 5, {"x": torch.eye(5).to_sparse()})
    with pytest.raises(GraphError, match=r"ndata\['x'\] is a sparse matrix \(csr_matrix\).*value.toarray\(\)"):
        Graph.from_edge_index(EDGES, 5, {"x": scipy.sparse.csr_matrix(torch.eye(5).numpy())})
    with pytest.raises(GraphError, match=r"ndata\['x'\] must be a tensor, NumPy array or list of numbers; got str"):
        _graph(ndata={"x": "abcde"})


def test_rows_are_checked_on_every_way_in():
    graph = _graph()
    wrong, right = torch.ones(4), torch.ones(5)

    def merge(value):
        graph.ndata |= {"x": value}

    for assign in (
        lambda value: graph.ndata.__setitem__("x", value),
        lambda value: graph.ndata.update({"x": value}),
        lambda value: graph.ndata.update(x=value),
        lambda value: graph.ndata.setdefault("x", value),
        merge,
    ):
        for value in (wrong, torch.tensor(1.0), None):
            with pytest.raises(GraphError, match=r"ndata\['x'\]"):
                assign(value)
            assert "x" not in graph.ndata
        assign(right)
        assert graph.ndata.pop("x") is right
    graph.edata["w"] = torch.ones(6, 2)
    with pytest.raises(GraphError, match="6 edges"):
        graph.edata["w"] = torch.ones(5, 2)
    assert graph.edata["w"].shape == (6, 2)
    assert graph.edata.setdefault("w", wrong).shape == (6, 2)
