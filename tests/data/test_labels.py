"""Labels: classes, targets, several of them, and what decides."""

import numpy as np
import pytest
import torch

import joestar
from joestar.data import from_tables
from joestar.errors import DataError


def labels(values, **options):
    columns = values if isinstance(values, dict) else {"y": values}
    nodes = {"id": range(3 if not columns else len(next(iter(columns.values()))))} | columns
    return from_tables({"u": [0], "v": [1]}, nodes, verbose=False, **options)


@pytest.mark.parametrize(
    ("values", "options", "expected", "classes", "names"),
    [
        (["b", "a", "b"], {}, [1, 0, 1], 2, ["a", "b"]),
        (["b", "", "b"], {}, [0, -100, 0], 1, ["b"]),
        ([2, 0, 1], {}, [2, 0, 1], 3, None),
        (["2", "0", "1"], {}, [2, 0, 1], 3, None),
        ([10, 30, 10], {}, [0, 1, 0], 2, ["10", "30"]),
        ([-1, 1, 1], {}, [0, 1, 1], 2, ["-1", "1"]),
        ([True, False, True], {}, [1, 0, 1], 2, None),
        ([0.0, np.nan, 1.0], {}, [0, -100, 1], 2, None),
        ([0.5, 2.0, 1.0], {}, [0.5, 2.0, 1.0], None, None),
        (["1.0", "2.0", "3.0"], {}, [1, 2, 3], None, None),
        ([3, 1, 2], {"task": "regression"}, [3, 1, 2], None, None),
        (["1.0", "2.0", "3.0"], {"task": "classes"}, [0, 1, 2], 3, ["1", "2", "3"]),
        (["1_0", "10", "1_0"], {}, [1, 0, 1], 2, ["10", "1_0"]),  # Python takes both for ten
        (["\u0663", "3", "3"], {}, [1, 0, 0], 2, ["3", "\u0663"]),
        ([2**53 + 1, 2**53, 5], {}, [2, 1, 0], 3, ["5", str(2**53), str(2**53 + 1)]),
        ([str(2**63 - 1), " 5", str(2**63 - 2)], {}, [2, 0, 1], 3, ["5", str(2**63 - 2), str(2**63 - 1)]),
    ],
)
def test_the_values_decide(values, options, expected, classes, names):
    graph = labels(values, **options)
    y = graph.ndata["y"]
    assert y.tolist() == expected
    assert y.dtype == (torch.int64 if classes else torch.float32)
    assert (graph.num_classes, graph.class_names, graph.multilabel) == (classes, names, False)
    drawn = torch.cat([graph.train_idx, graph.val_idx, graph.test_idx]).tolist()
    assert sorted(drawn) == [i for i, value in enumerate(expected) if value != -100]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0.5, np.inf, 1.5], {}, "row 1 has inf"),
        ([1.0, 2.0, -np.inf], {}, "row 2 has -inf"),
        ([1.0, np.inf, np.nan], {"task": "classes"}, "row 1 has inf"),
        (["0.5", "inf", "1.5"], {}, "row 1 has 'inf'"),
        (["1", "1e400", "-Infinity"], {}, "row 1 has '1e400'"),
        ([np.inf, "dog", "cat"], {}, "row 0 has inf"),
        ([0.5, 1e39, 1.5], {}, r"targets must be numbers of float32; row 1 has 1e\+39"),
        ([1, 10**400, 3], {"task": "regression"}, "targets must be numbers of float32; row 1 has 1000"),
        (
            {"a": [1, 0, 1], "b": [0.5, np.inf, 2]},
            {"label": ["a", "b"]},
            "column 'b': labels must be finite; row 1 has",
        ),
    ],
)
def test_infinite_labels_are_named(values, options, message):
    """One infinite number made every number of its column the name of a class."""
    with pytest.raises(DataError, match=message):
        labels(values, **options)


def test_lines_of_infinite_labels_and_their_name_among_words(tmp_path):
    (tmp_path / "nodes.csv").write_text("id,y\n0,1.5\n1,inf\n2,0.5\n")
    with pytest.raises(DataError, match=r"nodes.csv, column 'y': labels must be finite; line 3 has 'inf'"):
        from_tables({"u": [0], "v": [1]}, tmp_path / "nodes.csv", verbose=False)
    assert labels(["inf", "dog", "1"]).class_names == ["1", "dog", "inf"]
    assert labels(["-nan", "dog", "1"]).class_names == ["-nan", "1", "dog"]


@pytest.mark.parametrize("column", ["id", "u", "f"])
def test_infinite_ids_and_features_are_named(column):
    edges, nodes = {"u": [0.0, 1.0], "v": [1, 2]}, {"id": [0.0, 1.0, 2.0], "f": [1.0, 2.0, 3.0]}
    (edges if column == "u" else nodes)[column][1] = np.inf
    with pytest.raises(DataError, match=rf"column '{column}'.*row 1 has inf"):
        from_tables(edges, nodes, verbose=False)


def test_missing_targets_are_nan_and_in_no_split():
    graph = labels([0.5, None, 1.5, 2.5, 3.5])
    assert torch.isnan(graph.ndata["y"]).tolist() == [False, True, False, False, False]
    drawn = torch.cat([graph.train_idx, graph.val_idx, graph.test_idx]).tolist()
    assert sorted(drawn) == [0, 2, 3, 4]


def test_several_columns():
    graph = labels({"a": [1, 0, 1], "b": [0, 0, None]}, label=["a", "b"])
    assert graph.multilabel and graph.num_classes == 2
    assert graph.ndata["y"][:2].tolist() == [[1, 0], [0, 0]] and "x" not in graph.ndata
    graph = labels({"a": [1, 0, 1], "b": [0.5, 2, 3]}, label=["a", "b"])
    assert not graph.multilabel and graph.num_classes is None and graph.ndata["y"].shape == (3, 2)


def test_no_labels_and_labels_elsewhere():
    graph = labels([1, 2, 3], label=False)
    assert "y" not in graph.ndata and graph.ndata["x"].flatten().tolist() == [1, 2, 3] and graph.train_idx is None
    graph = labels({"kind": ["p", "q", "p"]}, label="kind")
    assert graph.class_names == ["p", "q"] and "x" not in graph.ndata
    graph = labels({}, label=np.array([[2], [0], [1]], dtype=np.uint8), split=(0.34, 0.33))
    assert graph.ndata["y"].tolist() == [2, 0, 1] and len(graph.train_idx) == 1 and len(graph.test_idx) == 1


def test_targets_of_an_archive(tmp_path, capsys):
    edges = np.array([[0, 1, 1], [1, 2, 1]])

    def load(**arrays):
        np.savez(tmp_path / "g.npz", edge_index=edges, **arrays)
        return joestar.load(tmp_path / "g.npz")

    graph = load(y=np.array([-1.72, 0.3, np.nan]), edge_attr=np.arange(3), edge_weight=np.array([1, 2, 3.0]), extra=1)
    assert graph.ndata["y"][:2].tolist() == pytest.approx([-1.72, 0.3]) and graph.num_classes is None
    assert "x" not in graph.ndata
    src, dst, eid = graph.coo()
    found = {
        (u, v): graph.edata["edge_attr"][e].item()
        for u, v, e in zip(*map(torch.Tensor.tolist, (src, dst, eid)), strict=True)
    }
    assert found == {(0, 1): 0, (1, 0): 0, (1, 2): 1, (2, 1): 1}
    assert sorted(graph.edata["edge_weight"].tolist()) == [1, 1, 2, 2]
    said = capsys.readouterr().err
    for text in ("3 edges given; 1 self-loop dropped", "2 reverses added (undirected=False otherwise): 4 edges",
                 "keys that are not read: 'extra'", "no key 'x'", "targets for regression"):  # fmt: skip
        assert text in said
    graph = load(y=np.array([[0.5, 1], [2, 3], [4, 5]]), x=np.ones((3, 1)))
    assert graph.ndata["y"].shape == (3, 2) and not graph.multilabel and graph.num_classes is None
    assert load(y=np.array([2, 0, 1]), x=np.ones((3, 1))).num_classes == 3
    assert load(y=np.array([2, 0, 1])).ndata["y"].dtype == torch.int64


def test_symmetric_is_checked(tmp_path, capsys):
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1, 1, 1], [1, 0, 2, 1]]), y=np.arange(3), symmetric=1)
    graph = joestar.load(tmp_path / "g.npz")
    assert graph.num_edges == 3
    said = capsys.readouterr().err
    assert "symmetric is 1, but 1 edges have no reverse (undirected=True adds them)" in said
    graph = joestar.load(tmp_path / "g.npz", undirected=True, drop_self_loops=False)
    assert graph.num_edges == 5
    assert joestar.load(tmp_path / "g.npz", undirected=False, drop_self_loops=False, verbose=False).num_edges == 4
    assert "1 edges have no" not in capsys.readouterr().err
    with pytest.raises(DataError, match="no official split"):
        joestar.load(tmp_path / "g.npz", split="official")
