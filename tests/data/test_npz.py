import numpy as np
import pytest
import torch

import joestar.data
from joestar.errors import DataError, GraphError

from .small import EDGES, NUM_NODES, SPLITS, SYMMETRIC_EDGES, both_ways, edge_set


@pytest.fixture
def arrays(features, labels):
    splits = {f"{part}_idx": np.array(ids, dtype=np.int32) for part, ids in SPLITS.items()}
    return {
        "edge_index": EDGES.astype(np.int32),
        "symmetric": np.uint8(0),
        "y": labels.astype(np.int16),
        "x": features,
        **splits,
    }


@pytest.fixture
def write(tmp_path):
    def save(arrays, name="small"):
        np.savez_compressed(tmp_path / f"{name}.npz", **arrays)
        return tmp_path / f"{name}.npz"

    return save


def test_dense_graph_is_symmetrised_standardised_and_split(write, arrays, features):
    graph = joestar.data.load(write(arrays))
    assert graph.name == "small"
    assert graph.num_nodes == NUM_NODES
    assert graph.num_classes == 3
    assert edge_set(graph) == both_ways(SYMMETRIC_EDGES)
    assert graph.indices.dtype == torch.int32
    assert graph.indptr.dtype == torch.int64
    expected = (features - features.mean(0)) / features.std(0)
    torch.testing.assert_close(graph.ndata["x"], torch.from_numpy(expected))
    assert graph.ndata["y"].dtype == torch.int64
    assert not graph.multilabel
    assert graph.train_idx.tolist() == SPLITS["train"]
    assert graph.train_idx.dtype == torch.int64
    assert graph.val_idx.tolist() == SPLITS["val"]
    assert graph.test_idx.tolist() == SPLITS["test"]


def test_symmetric_graph_gains_no_edges(write, arrays):
    arrays |= {"symmetric": np.uint8(1), "edge_index": np.array([[0, 1, 5], [1, 0, 5]], dtype=np.int32)}
    assert edge_set(joestar.data.load(write(arrays))) == {(0, 1), (1, 0)}


def test_constant_column_does_not_become_nan(write, arrays):
    arrays["x"] = np.ones((NUM_NODES, 2), dtype=np.float32)
    assert torch.equal(joestar.data.load(write(arrays)).ndata["x"], torch.zeros(NUM_NODES, 2))


def test_sparse_rows_are_divided_by_the_root_of_their_sum(write, arrays):
    del arrays["x"]
    arrays |= {
        "x_indptr": np.array([0, 2, 2, 3, 3, 3, 3, 3], dtype=np.int32),
        "x_indices": np.array([0, 2, 1], dtype=np.int32),
        "x_data": np.array([1, 3, 9], dtype=np.uint8),
        "x_shape": np.array([NUM_NODES, 3]),
    }
    expected = torch.zeros(NUM_NODES, 3)
    expected[0, 0], expected[0, 2], expected[2, 1] = 0.5, 1.5, 3.0
    torch.testing.assert_close(joestar.data.load(write(arrays)).ndata["x"], expected)


def test_without_official_split_a_random_one_is_drawn(write, arrays):
    for part in SPLITS:
        del arrays[f"{part}_idx"]
    path = write(arrays)
    graph = joestar.data.load(path)
    order = np.random.RandomState(0).permutation(NUM_NODES)
    assert graph.train_idx.tolist() == order[:4].tolist()
    assert graph.val_idx.tolist() == order[4:5].tolist()
    assert graph.test_idx.tolist() == order[5:].tolist()
    assert joestar.data.load(path, seed=1).train_idx.tolist() != order[:4].tolist()
    with pytest.raises(DataError, match=r"no official split. Use split='random'"):
        joestar.data.load(path, split="official")


def test_random_split_leaves_out_unlabelled_nodes(write, arrays):
    arrays["y"] = np.array([0, 1, np.nan, 0, 1, np.nan, 1], dtype=np.float32)
    graph = joestar.data.load(write(arrays), split="random")
    assert graph.ndata["y"].tolist() == [0, 1, -100, 0, 1, -100, 1]
    drawn = torch.cat([graph.train_idx, graph.val_idx, graph.test_idx])
    assert sorted(drawn.tolist()) == [0, 1, 3, 4, 6]


def test_two_label_columns_are_a_multilabel_task(write, arrays):
    arrays["y"] = np.eye(NUM_NODES, 4)
    arrays["y"][6] = np.nan
    graph = joestar.data.load(write(arrays), split="random")
    drawn = torch.cat([graph.train_idx, graph.val_idx, graph.test_idx])
    assert sorted(drawn.tolist()) == [0, 1, 2, 3, 4, 5]
    assert graph.multilabel
    assert graph.num_classes == 4
    assert graph.ndata["y"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None, "x": None}, "neither 'x' nor 'y' is there, which say how many nodes there are; the file has"),
        ({"edge_index": None}, "the key 'edge_index' is missing; the file has"),
        ({"x": None, "x_data": np.ones(3)}, "the key 'x_indptr' is missing"),
        ({"val_idx": None}, "the key 'val_idx' is missing"),
        ({"edge_index": EDGES.astype(np.float32)}, r"edge_index must be integers \[2, E\]; got float32"),
        ({"edge_index": EDGES.T.astype(np.int32)}, r"must be integers \[2, E\]; got int32 \[8, 2\]"),
        ({"edge_index": EDGES + 2}, r"destination ids must lie in 0..6 \(7 nodes\), but range from 2 to 7"),
        ({"edge_index": EDGES - 1}, "source ids must lie in 0..6 .* range from -1 to"),
        ({"symmetric": np.uint8(2)}, "symmetric must be 0 or 1; got 2"),
        ({"y": np.int16(3)}, "y must have one row per node; got a single value"),
        ({"y": np.array([0, 1, 2, -3, 0, 0, 0])}, "class ids must be 0..C-1, .* got -3"),
        ({"y": np.array([np.inf] * NUM_NODES)}, "labels must be finite; node 0 has an infinite one"),
        (
            {"edge_attr": np.ones((7, 2))},
            r"edge_attr must be numbers \[E\] or \[E, D\] with E = 8, .* float64 \[7, 2\]",
        ),
        ({"edge_weight": np.ones((8, 2))}, r"edge_weight must be numbers \[E\] with E = 8"),
        ({"edge_attr": np.array([1] * 7 + [np.nan])}, "edge_attr must be finite, but row 7 is not"),
        ({"y": np.array(["a"] * NUM_NODES)}, "labels must be numbers; got dtype <U1. Map class names"),
        ({"y": np.full(NUM_NODES, -100)}, "not one of the 7 nodes has a label"),
        ({"y": np.full((NUM_NODES, 2), np.inf)}, "targets must be finite; node 0, task 0 is inf"),
        ({"y": np.full((NUM_NODES, 2), np.nan)}, "not one of the 7 nodes has a label"),
        ({"x": np.ones((3, 3), dtype=np.float32)}, r"features must be \[7, F\] with F > 0; got shape \[3, 3\]"),
        ({"x": np.full((NUM_NODES, 3), np.inf)}, "features must be finite"),
        ({"train_idx": np.array([0, 9])}, r"the train split names node 9, but nodes are 0..6 \(1 ids"),
        ({"train_idx": np.array([0, 1])}, "the splits train and val overlap in 1 nodes, for example node 1"),
        ({"train_idx": np.array([0, 0])}, "the train split names 1 nodes more than once"),
        ({"train_idx": np.array([], dtype=np.int32)}, "the train split is empty"),
        ({"train_idx": np.array([0.0])}, "the train split must be a list of integer node ids; got float64"),
        ({"y": np.array([0, np.nan, 1, 0, 0, 0, 1])}, "the val split holds 1 nodes without a label, .* node 1"),
    ],
)
def test_malformed_archive_is_refused_with_a_sentence(write, arrays, change, message):
    arrays |= change
    path = write({key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(DataError, match=message) as caught:
        joestar.data.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_indices": np.array([0, 5, 1])}, r"x_indices must lie in 0..2; got 0..5"),
        ({"x_indptr": np.array([0, 2, 4])}, "do not form a CSR matrix .* x_indptr has 3 entries and ends at 4"),
        ({"x_shape": np.array([7])}, "x_shape must hold two numbers"),
    ],
)
def test_malformed_sparse_features_are_refused(write, arrays, change, message):
    del arrays["x"]
    arrays |= {
        "x_indptr": np.array([0, 2, 2, 3, 3, 3, 3, 3]),
        "x_indices": np.array([0, 2, 1]),
        "x_data": np.ones(3, dtype=np.uint8),
        "x_shape": np.array([NUM_NODES, 3]),
    }
    with pytest.raises(DataError, match=message):
        joestar.data.load(write(arrays | change))


def test_a_file_that_is_no_archive(tmp_path):
    path = tmp_path / "broken.npz"
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(DataError, match=r"expected a NumPy archive of plain arrays, but it cannot be read"):
        joestar.data.load(path)
    np.savez(path, y=np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"Write it with numpy.savez_compressed"):
        joestar.data.load(path)


def test_numbers_beyond_float32_are_refused(tmp_path):
    """They became infinite, and columns that were standardised behind that NaN."""
    edges, huge = np.array([[0, 1], [1, 2]]), np.array([[1e300], [1.0], [2.0]])
    for given, name in (({"x": huge, "y": np.arange(3)}, "features"), ({"y": huge[:, 0] + 0.5}, "labels")):
        np.savez(tmp_path / "g.npz", edge_index=edges, **given)
        with pytest.raises(DataError, match=rf"{name} holds 1e\+300 at \[0.*\], beyond float32"):
            joestar.load(tmp_path / "g.npz")
    graph = joestar.Graph.from_edge_index(torch.from_numpy(edges), 3)
    with pytest.raises(GraphError, match=r"ndata\['x'\] holds 1e\+300 at \[0, 0\], beyond float32"):
        graph.ndata["x"] = huge
    graph.ndata["x"] = torch.from_numpy(np.where(huge > 9, np.inf, huge))  # infinite before
    assert graph.ndata["x"].isinf().sum() == 1


@pytest.mark.parametrize("dtype", ["u8", "u4", "u2", ">i4", "i8"])
def test_edges_of_any_integers(tmp_path, dtype):
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]], dtype=dtype), y=np.array([0, 1, 0]))
    assert edge_set(joestar.load(tmp_path / "g.npz")) == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_features_of_other_machines(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0], [2.0], [3.0]], dtype=">f4"))
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n1,2\n")
    graph = joestar.load(tmp_path / "e.csv", features=tmp_path / "x.npy")
    assert graph.ndata["x"].flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("sparse", [True, False])
def test_without_labels(write, arrays, capsys, sparse):
    del arrays["y"]
    if sparse:
        del arrays["x"]
        arrays |= {"x_indptr": np.arange(NUM_NODES + 1), "x_indices": np.zeros(NUM_NODES, np.int64)}
        arrays |= {"x_data": np.ones(NUM_NODES), "x_shape": np.array([NUM_NODES, 3])}
    graph = joestar.data.load(write(arrays))
    assert set(graph.ndata) == {"x"} and graph.num_nodes == NUM_NODES and graph.num_classes is None
    assert graph.train_idx.tolist() == SPLITS["train"], "the official split needs none"
    assert "no key 'y': the graph has no labels" in capsys.readouterr().err
    for part in SPLITS:
        del arrays[f"{part}_idx"]
    assert joestar.data.load(write(arrays)).train_idx is None
