"""Edges in every form that ``convert`` reads, and what must come of them, by sets and sorting."""

import os
import resource
import signal
import sys

import numpy as np
import torch

from joestar.data import external_sort
from joestar.data.structure import EdgeRules

QUIET = {"verbose": False, "memory": "1MiB"}


def expected_csc(edges, num_nodes, rules):
    """(indptr, indices) of ``edges`` [2, E] under rules, each row ascending: one edge at a time."""
    pairs = [(int(d), int(s)) for s, d in edges.T]
    if rules.drop_self_loops:
        pairs = [(d, s) for d, s in pairs if d != s]
    if rules.undirected:
        pairs += [(s, d) for d, s in pairs if d != s]
    pairs = sorted(set(pairs) if rules.drop_duplicates else pairs)
    degrees = np.bincount([d for d, _ in pairs], minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(degrees)]), np.array([s for _, s in pairs], dtype=np.int32)


def assert_structure(graph, edges, nodes, rules):
    """Asserts that a converted graph is that of its edges."""
    indptr, indices = expected_csc(edges, nodes, rules)
    assert graph.indptr.tolist() == indptr.tolist()
    assert graph.indices.tolist() == indices.tolist() and graph.indices.dtype == torch.int32


def write_edges(path, form, edges, header=True):
    """A file of the edges; its path."""
    file = path / f"edges.{form.partition(' ')[0]}"
    if form == "npy":
        np.save(file, edges)
    elif form == "npy pairs":
        np.save(file, np.ascontiguousarray(edges.T))
    elif form == "npy fortran":
        np.save(file, np.asfortranarray(edges))
    elif form == "npy int32":
        np.save(file, edges.astype(np.int32))
    elif form == "npz":
        np.savez(file, edge_index=edges)
    elif form == "npz packed":
        np.savez_compressed(file, edge_index=edges)
    elif form == "parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"weight": np.ones(edges.shape[1]), "source": edges[0], "target": edges[1]})
        parquet.write_table(table, file, row_group_size=37)
    else:
        import gzip

        mark = "\t" if "tsv" in form else ","
        lines = [f"source{mark}target"] * header + [f"{s}{mark}{d}" for s, d in edges.T]
        with gzip.open(file, "wt") if form.endswith("gz") else open(file, "w") as out:
            out.write("\n".join(lines) + "\n")
    return file


def whole_folder(path, nodes=90, edges=700):
    """A folder of edges, features, labels, some of them missing, and splits of the labelled nodes."""
    path.mkdir(exist_ok=True)
    random = np.random.default_rng(3)
    write_edges(path, "npy", random.integers(0, nodes, (2, edges)))
    np.save(path / "features.npy", random.standard_normal((nodes, 5)))
    labels = np.where(random.random(nodes) < 0.2, np.nan, random.integers(0, 4, nodes))
    np.save(path / "labels.npy", labels)
    order = random.permutation(np.flatnonzero(~np.isnan(labels)))
    for part, ids in zip(("train", "val", "test"), np.split(order, [nodes // 2, nodes * 2 // 3]), strict=True):
        np.save(path / f"{part}_idx.npy", ids)
    return path


FORMS = ("npy", "npy pairs", "npy fortran", "npy int32", "npz", "npz packed", "parquet", "csv", "tsv", "csv.gz")
RULES = [EdgeRules(*(bool(code & bit) for bit in (1, 2, 4))) for code in range(8)]


def small_pieces(monkeypatch, step, capacity, nodes=7):
    """Work in pieces so small that every phase has many."""

    class Small(external_sort.Sorter):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.step, self.capacity, self.nodes, self.threads = step, capacity, nodes, 2

    monkeypatch.setattr(sys.modules["joestar.data.convert"], "Sorter", Small)  # not the function of that name


class full_after:  # noqa: N801 - reads as a statement
    """Files larger than ``size`` cannot be written: what a full disk looks like to a program."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.limits[1]))

    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.signal)


def run_and_kill(work, after):
    """Runs ``work`` in a process of its own that is killed at its ``after``-th write; whether it came to its end."""
    child = os.fork()
    if child == 0:
        _kill_at(after)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _kill_at(after):
    """From the ``after``-th write on, half of which is still written, the process is gone."""
    from joestar.data import edge_sources, external_sort, folder_writer, journal

    left, write, note = [after], folder_writer.write_all, folder_writer.write_json

    def write_all(file, values):
        left[0] -= 1
        if left[0] <= 0:
            content = bytes(memoryview(values).cast("B")) if values.size else b""
            file.write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, values)

    def write_json(path, content, **how):
        left[0] -= 1
        if left[0] <= 0:
            path.with_suffix(".new").write_text("{")
            os.kill(os.getpid(), signal.SIGKILL)
        note(path, content, **how)

    for module in (edge_sources, external_sort, folder_writer):
        module.write_all = write_all
    for module in (journal, folder_writer):
        module.write_json = write_json
