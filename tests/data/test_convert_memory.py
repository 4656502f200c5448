"""A conversion keeps to the memory that it is given, however large the dataset."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import joestar
from joestar.data import external_sort
from joestar.data.convert import convert
from joestar.data.edge_sources import ParquetEdges
from joestar.data.structure import EdgeRules

from .converting import QUIET, assert_structure, small_pieces


def test_memory_stays_under_the_limit(tmp_path, monkeypatch):
    random = np.random.default_rng(6)
    nodes, count = 150_000, 400_000
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "edges.npy", random.integers(0, nodes, (2, count)))
    np.save(source / "features.npy", np.ones((nodes, 16), np.float32))
    np.save(source / "labels.npy", np.ones(nodes))
    np.save(source / "train_idx.npy", np.arange(0, nodes, 100))
    limit = 2 << 20
    tracemalloc.start()
    try:
        convert(source, tmp_path / "graph", undirected=True, dtype="bf16", verbose=False, memory=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    assert peak < 0.25 * (2 * 2 * count * 8), "a quarter of the edges' keys"


def test_memory_of_the_process_stays_near_the_limit_however_many_nodes(tmp_path):
    """What tracemalloc does not see: maps of files, which grow with the graph."""
    np.save(tmp_path / "edges.npy", np.arange(2000).reshape(2, -1))
    resident = [0]

    def note(phase, done, total):
        resident[0] = resident[0] or grown("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def grown(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    nodes = 6_000_000  # 48 MB of offsets
    convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=nodes, progress=note, **QUIET)
    assert grown("VmHWM") - resident[0] < 24 << 20
    assert json.loads((tmp_path / "graph" / "meta.json").read_text())["in_degree"]["isolated"] == nodes - 1000


@pytest.mark.parametrize("row_group", [50_000, 1_000_000])
def test_parquet_is_held_in_pieces(tmp_path, row_group):
    """pyarrow kept all that it had read, or the whole of a row group."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    count, step = 1_000_000, 20_000
    sides = np.random.default_rng(2).integers(0, count, (2, count))
    file = tmp_path / "edges.parquet"
    table = pyarrow.table({"source": sides[0], "target": sides[1]})
    parquet.write_table(table, file, row_group_size=row_group, use_dictionary=False)
    before, most = pyarrow.total_allocated_bytes(), 0
    edges = ParquetEdges(file, lambda names: names)
    for first in range(0, count, step):
        found = edges.read(first, step)
        most = max(most, pyarrow.total_allocated_bytes() - before)
        assert np.array_equal(np.stack(found), sides[:, first : first + step])
    assert file.stat().st_size > 8 << 20 and most < 2 << 20


def test_files_that_do_not_fit_become_no_more_than_needed(tmp_path, monkeypatch):
    """Their names are noted after every file: thousands of them took ten times as long as the sorting."""
    small_pieces(monkeypatch, 1000, 100)
    names = []
    opened = external_sort.open_to_append
    monkeypatch.setattr(
        external_sort, "open_to_append", lambda path, size: names.append(path.name) or opened(path, size)
    )
    edges = np.random.default_rng(3).integers(0, 30, (2, 9000))  # all in the first of the files
    np.save(tmp_path / "edges.npy", edges)
    made = convert(tmp_path / "edges.npy", tmp_path / "graph", num_nodes=1 << 16, **QUIET)
    assert 9000 / 100 < len(names) < 4 * 9000 / 100
    assert_structure(joestar.load(made), edges, 1 << 16, EdgeRules(False, False, False))
