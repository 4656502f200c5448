"""``overwrite`` replaces a converted graph, and nothing that is more than one."""

import json

import numpy as np
import pytest

import joestar
from joestar.data import convert, generate, save
from joestar.errors import DataError

from .converting import QUIET


def archive(path):
    np.savez(path, edge_index=np.array([[0, 1, 2], [1, 2, 0]]), x=np.eye(3), y=np.array([0, 1, 0]))
    return path


def by_convert(folder, source):
    convert(source, folder, overwrite=True, **QUIET)


def by_save(folder, source):
    save(joestar.load(source, verbose=False), folder, overwrite=True)


def by_generate(folder, source):
    generate("tiny", folder, scale=0.1, memory="64MiB", overwrite=True)


WRITERS = pytest.mark.parametrize("write", [by_convert, by_save, by_generate])


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def foreign_meta(folder):
    (folder / "meta.json").write_text(json.dumps({"format": "another program", "arrays": {}}))


def no_meta(folder):
    (folder / "meta.json").write_text("no JSON")


def model_beside(folder):
    (folder / "model.pt").write_text("hours of training")


def folder_beside(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "a.txt").write_text("precious")


@WRITERS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (foreign_meta, "it is no converted graph, so it is left alone"),
        (no_meta, "it is no converted graph, so it is left alone"),
        (model_beside, "it holds model.pt beside a converted graph, so it is left alone"),
        (folder_beside, "it holds runs beside a converted graph, so it is left alone"),
    ],
)
def test_what_is_more_than_a_graph_is_left_alone(tmp_path, write, change, message):
    source, folder = archive(tmp_path / "source.npz"), tmp_path / "graph"
    convert(source, folder, **QUIET)
    change(folder)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=message):
        write(folder, source)
    assert contents(tmp_path) == before


def test_what_is_read_is_not_replaced(tmp_path):
    source, folder = archive(tmp_path / "source.npz"), tmp_path / "graph"
    convert(source, folder, **QUIET)
    before = contents(folder)
    edges = tmp_path / "edges.npy"
    np.save(edges, np.array([[0, 1], [1, 2]]))
    with pytest.raises(DataError, match=r"graph exists already; it holds .*ndata.x.npy, which is read"):
        convert(edges, folder, features=folder / "ndata.x.npy", overwrite=True, **QUIET)
    archive(folder / "inside.npz")
    with pytest.raises(DataError, match=r"graph exists already; it holds inside.npz"):
        convert(folder / "inside.npz", folder, overwrite=True, **QUIET)
    (folder / "inside.npz").unlink()
    assert contents(folder) == before
    save(joestar.load(folder, verbose=False), folder, overwrite=True)  # its maps outlive the files
    assert joestar.load(folder, verbose=False).ndata["y"].tolist() == [0, 1, 0]


@WRITERS
def test_of_a_link_that_is_replaced_which_it_leads_to(tmp_path, write):
    source, folder, link = archive(tmp_path / "source.npz"), tmp_path / "deep" / "graph", tmp_path / "link"
    convert(source, folder, **QUIET)
    link.symlink_to(folder)
    before = (folder / "meta.json").stat().st_ino
    write(link, source)
    assert link.is_symlink() and (folder / "meta.json").stat().st_ino != before
    assert joestar.load(link, verbose=False).num_nodes in (3, 200)
    assert {path.name for path in tmp_path.iterdir()} == {"source.npz", "deep", "link"}
    assert [path.name for path in folder.parent.iterdir()] == ["graph"]
