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


TABLES = {"source": [0, 1], "target": [1, 2]}, {"id": [0, 1, 2], "label": [0, 1, 0]}


def drawn(seed):
    """A split of an object and one of tables."""
    graph = joestar.load(joestar.Graph.from_edge_index(EDGES, 40), split="random", seed=seed)
    edges, nodes = {"source": [0], "target": [1]}, {"id": list(range(40)), "label": [0] * 40}
    return graph.train_idx.tolist(), from_tables(edges, nodes, seed=seed, verbose=False).train_idx.tolist()


@pytest.mark.parametrize("seed", [-1, np.int64(-1), 1.0, True, "0", [1, 2]])
def test_seeds_that_no_split_is_drawn_by(seed):
    graph = joestar.Graph.from_edge_index(EDGES, 3)
    for read in (
        lambda: joestar.load(graph, split="random", seed=seed),
        lambda: joestar.load(TABLES[0], nodes=TABLES[1], seed=seed, verbose=False),
        lambda: from_tables(*TABLES, seed=seed, verbose=False),
    ):
        with pytest.raises(DataError, match=r"seed must be a whole number of at least 0, by which .*; got"):
            read()


@pytest.mark.parametrize("seed", [-1, 2**70, None])
def test_a_seed_by_which_nothing_is_drawn_is_none_to_look_at(seed):
    assert joestar.load("cora", seed=seed).train_idx.tolist() == joestar.load("cora").train_idx.tolist()
    assert from_tables(TABLES[0], seed=seed, verbose=False).train_idx is None


@pytest.mark.parametrize(
    "seed",
    [0, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1, np.int64(7), np.uint64(2**63), torch.tensor(7, dtype=torch.int32)],
)
def test_seeds_of_all_kinds(seed):
    order = np.random.RandomState(int(seed) % 2**32).permutation(40)
    assert drawn(seed) == (order[:24].tolist(), order[:24].tolist())


def test_no_seed_draws_another_split_every_time():
    assert len({str(drawn(None)) for _ in range(3)}) == 3
