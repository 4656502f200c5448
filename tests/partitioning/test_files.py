"""The file of a partitioning: whole or not there, and never used for another graph."""

import json
import resource

import numpy as np
import pytest
import torch

import joestar
from joestar.errors import DataError
from joestar.graph_api import Graph
from joestar.partitioning import Partitioning
from joestar.partitioning.partitioning import fingerprint_of
from partitioning.planted import planted


@pytest.fixture(scope="module")
def graph():
    return planted(500, 25, 3)


@pytest.fixture(scope="module")
def made(graph):
    return joestar.partition(graph, 10, passes=2, seed=3)


@pytest.fixture
def path(made, tmp_path):
    return made.save(tmp_path / "parts.npz")


def rewritten(path, **changes):
    """The file with other contents in its header."""
    with np.load(path) as file:
        assignment, meta = file["assignment"], json.loads(file["meta"].tobytes())
    meta |= changes
    np.savez(path, assignment=assignment, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8))


def test_comes_back(graph, made, path):
    found = Partitioning.load(path, graph)
    assert torch.equal(found.assignment, made.assignment)
    assert (found.parts, found.seed, found.fingerprint) == (10, 3, made.fingerprint)
    assert found.settings == {"method": "gap", "seed": 3, "passes": 2, "cap": 1.5, "balance": 1.0}
    assert [entry.name for entry in path.parent.iterdir()] == ["parts.npz"]


def test_of_another_graph(graph, made, path):
    with pytest.raises(DataError, match=r"made for another graph: 500 nodes .* this one has 400 nodes"):
        Partitioning.load(path, planted(400, 20))
    indices = graph.indices.clone()
    indices[[0, -1]] = indices[[-1, 0]]
    assert not torch.equal(indices, graph.indices)
    with pytest.raises(DataError, match="but other edges, or the same in another order"):
        Partitioning.load(path, Graph.from_csc(graph.indptr, indices))
    with pytest.raises(DataError, match=r"joestar\.partition"):
        made.facts(planted(400, 20))


def test_the_fingerprint_sees_structure_only(graph, monkeypatch):
    same = Graph.from_csc(graph.indptr, graph.indices.long())
    assert fingerprint_of(same) == fingerprint_of(graph)
    monkeypatch.setattr("joestar.partitioning.partitioning.HASHED", 64)
    assert fingerprint_of(same) == fingerprint_of(graph) != {}


def test_of_another_version_or_kind(path):
    rewritten(path, version=99)
    with pytest.raises(DataError, match="expected a partitioning of version 1, got 99"):
        Partitioning.load(path)
    rewritten(path, format="something")
    with pytest.raises(DataError, match="another kind of file"):
        Partitioning.load(path)
    np.savez(path, x=np.zeros(3))
    with pytest.raises(DataError, match="cannot be read"):
        Partitioning.load(path)
    path.write_text("parts")
    with pytest.raises(DataError, match=r"it is no \.npz file\)\. Make it again with `joestar partition`"):
        Partitioning.load(path)
    with pytest.raises(DataError, match="no such file"):
        Partitioning.load(path.with_name("none.npz"))


def test_pickles_are_not_read(path):
    np.savez(path, assignment=np.array([{}], dtype=object), meta=np.zeros(2, np.uint8))
    with pytest.raises(DataError, match="cannot be read"):
        Partitioning.load(path)


@pytest.mark.parametrize("change", [{"parts": 11}, {"seed": 4}, {"settings": {}}])
def test_a_changed_header_is_noticed(path, change):
    rewritten(path, **change)
    with pytest.raises(DataError, match="damaged"):
        Partitioning.load(path)


def test_no_damaged_file_is_taken(graph, made, path):
    """One byte changed, anywhere: an error, or what was written (some bytes of a zip file mean nothing)."""
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            found = Partitioning.load(path, graph)
            assert torch.equal(found.assignment, made.assignment) and found.settings == made.settings
        except DataError:
            refused += 1
    assert refused > 30
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            Partitioning.load(path)


def test_a_full_disk_leaves_what_was_there(graph, made, path):
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(DataError, match="cannot be written"):
            made.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["parts.npz"]


def test_a_folder_that_is_not_there(made, tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        made.save(tmp_path / "nowhere" / "parts.npz")
