"""The identity of a graph: every byte of edges, columns and splits counts, up to a bound."""

import numpy as np
import pytest
import torch

from joestar import Graph
from joestar.data import identity
from joestar.data.identity import differences, identity_of


def graph():
    rng = np.random.default_rng(0)
    edges = torch.from_numpy(rng.integers(0, 30, (2, 200)))
    made = Graph.from_edge_index(edges, 30)
    made.ndata["x"] = torch.from_numpy(rng.standard_normal((30, 4)).astype(np.float32))
    made.ndata["y"] = torch.arange(30) % 3
    made.edata["w"] = torch.rand(made.num_edges, generator=torch.Generator().manual_seed(0))
    made.train_idx, made.val_idx = torch.arange(10), torch.arange(10, 20)
    return made


def test_the_same_data_has_the_same_identity():
    once, twice = identity_of(graph()), identity_of(graph())
    assert once == twice and differences(once, twice) == ([], [])


def scaled(made):
    made.ndata["x"] = made.ndata["x"].clone()
    made.ndata["x"][7, 2] += 1e-6


def labelled(made):
    made.ndata["y"] = made.ndata["y"].roll(1)


def weighted(made):
    made.edata["w"] = made.edata["w"].flip(0)


def split(made):
    made.train_idx = torch.arange(11)


def without(made):
    made.val_idx = None


def narrower(made):
    made.ndata["x"] = made.ndata["x"].half()


def more(made):
    made.ndata["age"] = torch.zeros(30)


def sliced(made):
    made.train_idx = torch.arange(5)[::5]


def known(made):
    made.ids = torch.arange(30, dtype=made.indices.dtype) + 5


def called(made):
    made.class_names = ["a", "b", "c"]


@pytest.mark.parametrize(("change", "exact", "floating"), [
    (scaled, [], ["features"]), (labelled, ["labels"], []), (weighted, [], ["'edata w'"]),
    (split, ["training nodes"], []), (without, ["validation nodes"], []), (narrower, [], ["features"]),
    (more, ["'ndata age'"], []), (sliced, ["training nodes"], []), (known, ["'ids'"], []),
    (called, ["names of classes or features"], []),
])  # fmt: skip
def test_what_changed_is_named(change, exact, floating):
    other = graph()
    change(other)
    assert differences(identity_of(graph()), identity_of(other)) == (exact, floating)


def test_edges():
    made = graph()
    other = Graph.from_csc(made.indptr, made.indices.flip(0), validate=False)
    assert "edges" in differences(identity_of(made), identity_of(other))[0]


def test_what_another_reader_made_is_not_compared(monkeypatch):
    before = identity_of(graph())
    monkeypatch.setattr(identity, "READER", 2)
    assert differences(before, identity_of(graph())) is None and differences({}, before) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int16])
def test_columns_of_any_dtype(dtype):
    one, other = graph(), graph()
    for made in (one, other):
        made.ndata["z"] = (torch.arange(30) % 2).to(dtype)
    other.ndata["z"] = 1 - other.ndata["z"] if dtype != torch.bool else ~other.ndata["z"]
    assert sum(map(len, differences(identity_of(one), identity_of(other)))) == 1


def test_shapes_and_no_rows_count():
    empty, flat = graph(), graph()
    empty.test_idx = torch.empty(0, dtype=torch.int64)
    assert differences(identity_of(graph()), identity_of(empty)) == (["test nodes"], [])
    flat.ndata["x"] = flat.ndata["x"].reshape(30, 2, 2)
    assert differences(identity_of(graph()), identity_of(flat)) == ([], ["features"])


def test_of_long_columns_pieces_are_read_with_the_first_and_the_last(monkeypatch):
    monkeypatch.setattr(identity, "PIECE", 16)
    monkeypatch.setattr(identity, "MOST", 4)
    seen = []
    digest = identity._digest
    monkeypatch.setattr(identity, "_digest", lambda piece: seen.append(len(piece)) or digest(piece))
    before = identity_of(graph())
    assert seen.count(16) >= 4 and len(seen) <= 4 * 9
    for row in (0, 29):
        other = graph()
        other.ndata["x"][row] += 1
        assert differences(before, identity_of(other)) == ([], ["features"])
