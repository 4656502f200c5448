"""NumPy arrays, lists and ranges where tensors go: the graph is that of the tensors."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from joestar.errors import GraphError, JoestarWarning, SeedError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import from_array, settle, to_tensor
from joestar.sampling import LayerDependentSampler, NeighborSampler

EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])
FORMS = {
    "array": lambda tensor: tensor.numpy(),
    "int32": lambda tensor: tensor.numpy().astype(np.int32) if not tensor.is_floating_point() else tensor.numpy(),
    "unsigned": lambda tensor: tensor.numpy().astype(np.uint16) if not tensor.is_floating_point() else tensor.numpy(),
    "list": lambda tensor: tensor.tolist(),
    "big-endian": lambda tensor: tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")),
    "backwards": lambda tensor: tensor.numpy()[::-1].copy()[::-1],
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*float64", category=JoestarWarning)
        yield


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_graph_of_arrays_is_that_of_tensors(form):
    x, w = torch.arange(10.0).reshape(5, 2), torch.arange(6.0)
    plain = Graph.from_edge_index(EDGES, 5, {"x": x}, {"w": w})
    graph = Graph.from_edge_index(form(EDGES), 5, {"x": form(x)}, {"w": form(w)})
    assert torch.equal(graph.indptr, plain.indptr) and torch.equal(graph.indices, plain.indices)
    assert torch.equal(graph.ndata["x"], x) and torch.equal(graph.edata["w"], plain.edata["w"])
    again = Graph.from_csc(form(plain.indptr), form(plain.indices))
    assert torch.equal(again.indptr, plain.indptr) and torch.equal(again.indices.long(), plain.indices.long())
    ids = torch.tensor([3, 1, 1])
    assert graph[:, form(ids)].dsts.tolist() == graph[form(ids), form(ids)].dsts.tolist() == [3, 1, 1]
    blocks = [NeighborSampler(plain, [2, 2]).sample(plain, seeds) for seeds in (ids, form(ids))]
    assert [b.srcs.tolist() for b in blocks[0]] == [b.srcs.tolist() for b in blocks[1]]
    for make, probs in ((NeighborSampler, w), (LayerDependentSampler, torch.arange(5.0))):
        name = "probs" if make is NeighborSampler else "node_probs"
        samplers = [make(plain, [2, 2], **{name: p}) for p in (probs, form(probs))]
        pairs = [[b.srcs.tolist() for b in sampler.sample(plain, ids)] for sampler in samplers]
        assert pairs[0] == pairs[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(hnp.arrays(hnp.scalar_dtypes().filter(lambda d: d.kind in "iufb"), hnp.array_shapes(max_dims=2, max_side=4)))
def test_values_survive(array):
    big = array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max
    if big:
        with pytest.raises(GraphError, match="beyond int64"):
            from_array(array, "it")
        return
    made = to_tensor(array, "it").numpy()
    np.testing.assert_array_equal(made, array.astype(made.dtype))
    if array.dtype.itemsize <= 8:
        np.testing.assert_array_equal(made.astype(array.dtype.newbyteorder("=")), array)


def test_float64_arrays_become_float32_and_say_so_tensors_stay():
    graph = Graph.from_edge_index(EDGES, 5)
    values = np.linspace(0, 1, 5)
    with pytest.warns(JoestarWarning, match=r"ndata\['x'\] was float64, NumPy's default, and is kept as float32"):
        graph.ndata["x"] = values[:, None]
    assert graph.ndata["x"].dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph.ndata["x"] = torch.from_numpy(values)[:, None]
        graph.ndata["time"] = values
        graph.ndata["y"] = values.astype(np.float32)
    assert graph.ndata["x"].dtype == graph.ndata["time"].dtype == torch.float64


def test_splits_are_ids_whatever_was_assigned():
    graph = Graph.from_edge_index(EDGES, 5)
    for value in (
        [0, 3],
        np.array([0, 3]),
        range(0, 4, 3),
        torch.tensor([0, 3]),
        np.array([1, 0, 0, 1, 0], dtype=bool),
        [True, False, False, True, False],
        np.array([1, 0, 0, 1, 0], dtype=np.uint8),
        np.array([1, 0, 0, 1, 0], dtype=">i8"),
        torch.tensor([1, 0, 0, 1, 0]),
        torch.tensor([1, 0, 0, 1, 0], dtype=torch.uint8),
        [1, 0, 0, 1, 0],
    ):
        graph.train_idx = value
        assert isinstance(graph.train_idx, torch.Tensor)
        assert graph.train_idx.tolist() == [0, 3]
    assert graph.keyed(1).train_idx is graph.train_idx
    for wrong, message in (
        ([0.5], "must be int64 or int32"),
        (np.ones(4, dtype=bool), "is a mask"),
        (["a"], "numbers"),
        ([[1], [1, 2]], ""),
    ):
        with pytest.raises(SeedError, match=rf"graph.val_idx .*{message}"):
            graph.val_idx = wrong
    assert graph.val_idx is None


@pytest.mark.parametrize(
    ("y", "expected", "said"),
    [
        (torch.tensor([[2], [0], [1]]), [2, 0, 1], r"of shape \[3, 1\] holds a class id per node"),
        (torch.tensor([2, 0, 1], dtype=torch.uint8), [2, 0, 1], "was uint8 and is int64 now"),
        (torch.tensor([[2], [0], [1]], dtype=torch.int32), [2, 0, 1], "was int32 and is int64 now"),
        (torch.tensor([True, False, True]), [1, 0, 1], "was bool and is int64 now"),
        (torch.tensor([0.5, 1.5, -2.0], dtype=torch.float64), [0.5, 1.5, -2.0], "was float64 and is float32 now"),
    ],
)
def test_labels_are_settled_once_and_said(y, expected, said):
    graph = Graph.from_edge_index(np.array([[0, 1], [1, 2]]), 3, {"x": torch.ones(3, 1), "y": y})
    with pytest.warns(JoestarWarning, match=said):
        settle(graph, torch.float32)
    assert graph.ndata["y"].tolist() == expected
    assert graph.ndata["y"].dtype == (torch.float32 if y.dtype.is_floating_point else torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = graph.ndata["y"]
        settle(graph, torch.float32)
    assert graph.ndata["y"] is before


def test_features_follow_the_model_and_targets_keep_their_shape():
    graph = Graph.from_edge_index(np.array([[0, 1], [1, 2]]), 3)
    graph.ndata["x"], graph.ndata["y"] = torch.ones(3, 1).double(), torch.ones(3, 1)
    settle(graph, None)
    assert graph.ndata["x"].dtype == torch.float64
    with pytest.warns(JoestarWarning, match="x'. was float64 and is float32 now"):
        settle(graph, torch.float32)
    assert graph.ndata["x"].dtype == torch.float32 and graph.ndata["y"].shape == (3, 1)


def test_warnings_stand_at_the_users_line():
    graph = Graph.from_edge_index(EDGES, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.ndata["x"] = np.ones((5, 1))
        Graph.from_edge_index(EDGES, 5, {"x": np.ones((5, 1))})
    assert [warning.filename for warning in caught] == [__file__] * 2


class Named(torch.Tensor):
    """A subclass as libraries have them."""


def test_tensors_of_subclasses_are_plain_here_and_parameters_stay():
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    weight = torch.nn.Parameter(torch.rand(3, 2))
    graph = Graph.from_edge_index(edges.as_subclass(Named), 3, {"x": torch.rand(3, 2).as_subclass(Named), "p": weight})
    frozen = torch.nn.Parameter(graph.indices, requires_grad=False)
    graph = Graph.from_csc(
        graph.indptr.as_subclass(Named), frozen, graph.ndata, {"w": torch.rand(3).as_subclass(Named)}
    )
    assert graph.ndata["p"] is weight  # a model that has it trains it
    for tensor in (graph.indptr, graph.indices, graph.ndata["x"], graph.edata["w"]):
        assert type(tensor) is torch.Tensor
    assert graph.indices.data_ptr() == frozen.data_ptr()
