"""Attributes of PyG's ``Data`` in every form: nothing that a model or a loss reads is left out without a word."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.errors import GraphError, JoestarWarning, SeedError
from joestar.graph_api import Graph

pyg = pytest.importorskip("torch_geometric.data")
geometric = pytest.importorskip("torch_geometric")
EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])


def _data(**extra):
    data = pyg.Data(x=torch.randn(5, 3), edge_index=EDGES, num_nodes=5)
    for name, value in extra.items():
        data[name] = value
    return data


FORMS = {
    "bool": lambda mask: mask,
    "uint8": lambda mask: mask.to(torch.uint8),
    "int64": lambda mask: mask.long(),
    "float": lambda mask: mask.float(),
    "array": lambda mask: mask.numpy(),
    "list": lambda mask: mask.tolist(),
    "parameter": lambda mask: torch.nn.Parameter(mask, requires_grad=False),
}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(3, 12), st.sampled_from(list(FORMS)), st.booleans(), st.integers(0, 2))
def test_masks_and_ids_are_told_apart(data, nodes, form, as_ids, column):
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes)))
    ids = mask.nonzero().flatten()
    made = pyg.Data(x=torch.zeros(nodes, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    if as_ids:
        value = ids[torch.tensor(data.draw(st.permutations(range(len(ids)))), dtype=torch.int64)]
        made.train_mask = value.numpy() if form == "array" else value
        assert Graph.from_pyg(made).train_idx.tolist() == value.tolist()
        return
    made.train_mask = FORMS[form](mask)
    assert Graph.from_pyg(made).train_idx.tolist() == ids.tolist()
    several = torch.zeros(nodes, 3, dtype=torch.bool)
    several[:, column] = mask
    made.train_mask = FORMS[form](several)
    assert Graph.from_pyg(made, split=column).train_idx.tolist() == ids.tolist()


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3, dtype=torch.bool), r"bool \[3\]: for 5 nodes it must be a mask"),
        (torch.ones(7, dtype=torch.bool), r"bool \[7\]"),
        (torch.ones(2, 5, dtype=torch.bool), r"bool \[2, 5\]"),
        (torch.ones(5, 2) / 2, r"float32 \[5, 2\]"),
        (torch.ones(5, 0, dtype=torch.bool), r"is \[5, 0\]: no split of the nodes"),
        (torch.tensor([1.0, NAN, 1, 0, 0]), r"float32 \[5\]"),
        (torch.tensor([0.5, 1, 1, 0, 0]), r"float32 \[5\]"),
        (torch.tensor([0, 3, 9]), r"train_mask\[2\] = 9 is not a node"),
        (torch.tensor([0, -1]), r"train_mask\[1\] = -1 is not a node"),
        (torch.tensor([0, 1, 2, 0, 1]), "as ids names node 0 more than once"),
        ([True, False], r"bool \[2\]"),
        ("train", "must be a tensor, NumPy array or list"),
    ],
    ids=repr,
)
def test_what_is_neither_mask_nor_ids_is_refused(value, words):
    with pytest.raises(GraphError, match=f"data.train_mask.*{words}|{words}"):
        Graph.from_pyg(_data(train_mask=value), split=0)


def test_ids_and_masks_under_other_names():
    everything = torch.ones(5, dtype=torch.bool)
    assert Graph.from_pyg(_data(valid_mask=everything)).val_idx.tolist() == [0, 1, 2, 3, 4]
    assert Graph.from_pyg(_data(train_idx=[0, 1])).train_idx.tolist() == [0, 1]
    with pytest.raises(GraphError, match=r"data.train_idx\[1\] = 5 is not a node"):
        Graph.from_pyg(_data(train_idx=torch.tensor([0, 5])))
    with pytest.raises(SeedError, match="is a mask"):
        Graph.from_pyg(_data(train_idx=everything[:3]))


@pytest.mark.parametrize("form", [np.asarray, lambda value: np.asarray(value).tolist()], ids=["array", "list"])
def test_arrays_and_lists_are_taken_as_tensors_are(form):
    x, y = np.arange(15, dtype=np.float32).reshape(5, 3), np.array([0, 1, 2, 0, 1])
    weight, attributes = np.arange(6, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(6, 2)
    values = {"x": x, "y": y, "edge_weight": weight, "edge_attr": attributes}
    wanted = Graph.from_pyg(_data(**{name: torch.from_numpy(value) for name, value in values.items()}))
    if form is np.asarray:
        graph = Graph.from_pyg(_data(**values, pe=x, edge_time=weight))
        assert torch.equal(graph.ndata.pop("pe"), wanted.ndata["x"])
        assert torch.equal(graph.edata.pop("edge_time"), wanted.edata["edge_weight"])
    else:
        with pytest.warns(JoestarWarning, match="was float64"):
            graph = Graph.from_pyg(_data(**{name: form(value) for name, value in values.items()}))
    for frame, other in ((graph.ndata, wanted.ndata), (graph.edata, wanted.edata)):
        assert set(frame) == set(other)
        assert all(torch.equal(frame[name], other[name]) and frame[name].dtype == other[name].dtype for name in frame)
    assert graph.num_classes == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x", torch.zeros(3, 2), r"data.x of shape \[3, 2\] needs one row for each of the graph's 5 nodes"),
        ("x", np.zeros((7, 2), np.float32), r"data.x of shape \[7, 2\]"),
        ("x", torch.eye(5).to_sparse(), "data.x is a sparse tensor .*to_dense"),
        ("x", torch.eye(5).to_sparse_csr(), "data.x is a sparse tensor .*to_dense"),
        ("x", torch.tensor(1.0), r"data.x of shape \[\]"),
        ("x", ["a"] * 5, "data.x must hold numbers"),
        ("y", ["a", "b", "a", "b", "a"], "data.y must hold numbers"),
        ("edge_weight", torch.ones(4), r"data.edge_weight of shape \[4\] .* 6 edges; transforms that change edges"),
        ("edge_weight", [1.0, 2.0], r"data.edge_weight of shape \[2\]"),
        ("edge_attr", np.zeros((5, 2), np.float32), r"data.edge_attr of shape \[5, 2\]"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::joestar.errors.JoestarWarning")
def test_what_has_not_a_row_for_each_is_refused(name, value, words):
    with pytest.raises(GraphError, match=words):
        Graph.from_pyg(_data(**{name: value}))


def test_labels_of_whole_graphs_and_of_edges_are_no_labels_of_nodes():
    for label in (torch.tensor(1), torch.tensor([1]), [1], 1, 0.5, None):
        assert "y" not in Graph.from_pyg(_data(y=label)).ndata
    batch = pyg.Batch.from_data_list([_data(y=torch.tensor([0])), _data(y=torch.tensor([1]))])
    assert set(Graph.from_pyg(batch).ndata) == {"x", "batch"}
    assert "y" in Graph.from_pyg(_data(y=torch.arange(6))).edata
    assert not Graph.from_pyg(_data(x=None)).ndata
    for label in ("text", {"a": 1}, torch.randn(1, 19)):
        assert "y" not in Graph.from_pyg(_data(y=label)).ndata


@pytest.mark.parametrize(
    "form", [lambda y: y, torch.Tensor.numpy, torch.Tensor.tolist], ids=["tensor", "array", "list"]
)
@pytest.mark.parametrize("shape", [(19,), (7,), (3, 2), (0,)], ids=str)
def test_labels_that_have_no_row_for_each_node_are_left_out_with_a_word(shape, form):
    y = form(torch.ones(shape))
    with pytest.warns(JoestarWarning, match=rf"data.y of shape \[{shape[0]}.* 5 nodes .*no labels.*set data.num_nodes"):
        graph = Graph.from_pyg(_data(y=y))
    assert set(graph.ndata) == {"x"} and not graph.edata and graph.num_classes is None


def test_several_labels_of_each_graph_of_a_batch_are_left_out_with_a_word():
    batch = pyg.Batch.from_data_list([_data(y=torch.randn(3)), _data(y=torch.randn(3))])
    with pytest.warns(JoestarWarning, match=r"data.y of shape \[6\] has not one row for each of the graph's 10 nodes"):
        assert set(Graph.from_pyg(batch).ndata) == {"x", "batch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "form", [lambda y: y, torch.Tensor.numpy, torch.Tensor.tolist], ids=["tensor", "array", "list"]
)
def test_an_empty_split_names_no_node(form, dtype):
    graph = Graph.from_pyg(_data(train_mask=form(torch.empty(0, dtype=dtype)), test_mask=torch.ones(5)))
    assert graph.train_idx.tolist() == [] and graph.train_idx.dtype == torch.int64
    assert graph.val_idx is None and graph.test_idx.tolist() == [0, 1, 2, 3, 4]


def test_edge_indices_and_indices_of_pyg_are_plain_tensors_here():
    if not hasattr(geometric, "EdgeIndex"):
        pytest.skip("before PyG 2.6")
    edges = geometric.EdgeIndex(EDGES.clone(), sparse_size=(9, 9))
    plain = Graph.from_edge_index(EDGES, 9)
    for graph in (Graph.from_edge_index(edges), Graph.from_pyg(pyg.Data(edge_index=edges))):
        assert graph.num_nodes == 9 and torch.equal(graph.indices, plain.indices)
        assert type(graph.indices) is type(graph.indptr) is torch.Tensor
    assert Graph.from_edge_index(geometric.EdgeIndex(EDGES.clone())).num_nodes == 4
    ids = geometric.Index(torch.tensor([0, 2]), dim_size=9)
    graph.train_idx, graph.ndata["n"] = ids, geometric.Index(torch.arange(9))
    held = Graph.from_csc(plain.indptr, geometric.Index(plain.indices.clone()), edata={"n": geometric.Index(EDGES[0])})
    for tensor in (graph.train_idx, graph.ndata["n"], held.indices, held.edata["n"], graph[:, ids].dsts):
        assert type(tensor) is torch.Tensor
        tensor.untyped_storage().data_ptr()


def test_one_name_of_nodes_and_edges_is_refused():
    graph = Graph.from_edge_index(EDGES, 5, {"w": torch.arange(5.0)}, {"w": torch.arange(6.0)})
    with pytest.raises(GraphError, match=r"ndata and edata both have 'w'.*rename it, graph.edata"):
        graph.to_pyg()
    graph.edata["edge_w"] = graph.edata.pop("w")
    again = Graph.from_pyg(graph.to_pyg())
    assert torch.equal(again.ndata["w"], graph.ndata["w"]) and torch.equal(again.edata["edge_w"], graph.edata["edge_w"])
    for name in ("edge_index", "num_nodes", "train_mask"):
        other = Graph.from_edge_index(EDGES, 5, {name: torch.arange(5.0)})
        other.train_idx = [0]
        with pytest.raises(GraphError, match=f"both have '{name}'.*graph.ndata.pop"):
            other.to_pyg()


@pytest.mark.parametrize("held", [torch.tensor([True, False, True, False, False]), torch.tensor([1, 0, 1, 0, 0])])
def test_a_mask_that_says_what_the_split_says_is_no_second_name(held):
    graph = Graph.from_edge_index(EDGES, 5, {"train_mask": held})
    graph.train_idx, graph.val_idx = [2, 0], [1]
    made = graph.to_pyg()
    assert torch.equal(made.train_mask, held) and made.val_mask.tolist() == [False, True, False, False, False]
    assert Graph.from_pyg(made).train_idx.tolist() == [0, 2]
    for other in (~held.bool(), held.float() / 2, held[:, None], 2 * held):
        graph.ndata["train_mask"] = other
        with pytest.raises(GraphError, match=r"to_pyg: ndata and a split both have 'train_mask', and they differ"):
            graph.to_pyg()
