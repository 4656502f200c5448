"""Random splits: how many nodes are where, of which nodes, and by which seeds."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import joestar
from joestar.data import from_tables, save
from joestar.data.splits import USUAL, ends_of, random_split
from joestar.errors import DataError

EDGES = np.array([[0, 1, 2], [1, 2, 0]])
PARTS = ("train", "val", "test")


def sizes(nodes, *shares):
    return [len(ids) for ids in random_split(np.arange(nodes), 0, *shares).values()]


def test_the_usual_split_is_what_it_was():
    """Graphs that people have trained on keep their sets, whatever their size."""
    random = np.random.default_rng(0)
    for nodes in itertools.chain(range(100_000), random.integers(100_000, 2**31, 50_000).tolist()):
        assert ends_of(USUAL, nodes) == (int(0.6 * nodes), int((0.6 + 0.2) * nodes), nodes)
    for nodes in (0, 1, 7, 2708, 12_345):
        found = random_split(np.arange(nodes), 5)
        parts = np.split(np.random.RandomState(5).permutation(nodes), [int(0.6 * nodes), int(0.8 * nodes)])
        assert all(np.array_equal(found[part], ids) for part, ids in zip(PARTS, parts, strict=True))


@pytest.mark.parametrize(
    ("nodes", "shares", "expected"),
    [
        (10, (0.7, 0.1, 0.2), [7, 1, 2]),
        (1000, (0.7, 0.1, 0.2), [700, 100, 200]),
        (10, (0.1, 0.2, 0.3), [1, 2, 3]),
        (100, (0.29, 0.28, 0.4), [29, 28, 40]),
        (9, (1 / 3, 1 / 3, 1 / 3), [3, 3, 3]),
        (10, (0.7, 0.1), [7, 1, 2]),
        (7, (0.5, 0.25, 0.25), [3, 2, 2]),
        (1, (0.6, 0.4), [0, 1, 0]),
    ],
)
def test_shares_are_whole_where_they_are_written_so(nodes, shares, expected):
    assert sizes(nodes, shares) == expected


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from([10, 100, 1000]), st.data())
def test_any_decimal_shares(base, data):
    first = data.draw(st.integers(1, base))
    second = data.draw(st.integers(0, base - first))
    third = data.draw(st.integers(0, base - first - second))
    nodes = data.draw(st.integers(0, 5000))
    ends = [count * nodes // base for count in (first, first + second, first + second + third)]
    assert sizes(nodes, (first / base, second / base, third / base)) == np.diff([0, *ends]).tolist()


def without_labels(form, tmp_path):
    """(what to load, options) of a graph of 40 nodes without labels."""
    x = np.eye(40, dtype=np.float32)
    graph = joestar.Graph.from_edge_index(EDGES, 40, ndata={"x": x})
    if form == "folder":
        return save(graph, tmp_path / "g"), {}
    if form == "folder with a split":
        graph.train_idx, graph.val_idx, graph.test_idx = range(3), range(3, 5), range(5, 6)
        return save(graph, tmp_path / "g"), {}
    if form == "archive":
        np.savez(tmp_path / "g.npz", edge_index=EDGES, x=x)
        return tmp_path / "g.npz", {}
    if form == "tables":
        return {"source": EDGES[0], "target": EDGES[1]}, {"features": x}
    graph.train_idx = range(3) if form == "graph with a split" else None
    return graph, {}


FORMS = ["folder", "folder with a split", "archive", "tables", "graph", "graph with a split"]


@pytest.mark.parametrize("form", FORMS)
def test_graphs_without_labels_are_split_if_asked(tmp_path, form):
    source, options = without_labels(form, tmp_path)
    order = np.random.RandomState(3).permutation(40)
    for split, ends in (("random", [24, 32]), ((0.5, 0.25, 0.25), [20, 30]), ([0.5, 0.25], [20, 30])):
        graph = joestar.load(source, split=split, seed=3, verbose=False, **options)
        for part, ids in zip(PARTS, np.split(order, ends), strict=True):
            assert getattr(graph, f"{part}_idx").tolist() == ids.tolist(), (split, part)
    kept = joestar.load(source, verbose=False, **options).train_idx
    assert (None if kept is None else kept.tolist()) == ([0, 1, 2] if "split" in form else None)


def test_sets_of_a_graph_are_not_made_up_beside_one():
    graph = joestar.Graph.from_edge_index(EDGES, 3, ndata={"y": torch.tensor([0, 1, 0])})
    graph.test_idx = [2]
    found = joestar.load(graph)
    assert found.test_idx.tolist() == [2] and found.train_idx is None
    assert len(joestar.load(graph, split="random").train_idx) == 1


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None, "0"])
def test_seeds_that_no_split_is_drawn_by_are_refused_before_anything_is_read(tmp_path, seed):
    for read in (lambda: joestar.load(tmp_path / "none", seed=seed), lambda: from_tables("none.csv", seed=seed)):
        with pytest.raises(DataError, match=r"seed must be a whole number from 0 to 4,294,967,295; got"):
            read()


@pytest.mark.parametrize("seed", [2**32 - 1, np.int64(7), np.uint32(7)])
def test_seeds_of_all_kinds(seed):
    graph = joestar.Graph.from_edge_index(EDGES, 3)
    order = np.random.RandomState(int(seed)).permutation(3)
    assert joestar.load(graph, split="random", seed=seed).train_idx.tolist() == order[:1].tolist()
