"""``joestar generate``, ``convert`` and ``info`` of what they wrote."""

import json
import sys
import types

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli.info import describe
from joestar.cli.main import app
from tests.data.converting import write_edges
from tests.data.small import write_csv


def run(*arguments, fails=False):
    done = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False, env={"COLUMNS": "400"}
    )
    assert done.exit_code == (2 if fails else 0), done.output
    return done.output


def test_generate_and_info(tmp_path):
    folder = tmp_path / "tiny"
    assert f"written: {folder}" in run("generate", "tiny", folder, "--dtype", "bf16", "--seed", 3, "--memory", "64MiB")
    facts, graph = json.loads(run("info", folder, "--json", "--verify")), joestar.load(folder)
    assert {key: facts[key] for key in describe(graph)} == json.loads(json.dumps(describe(graph)))
    assert facts["folder"] == {
        "written_by": f"joestar {joestar.__version__}", "version": 2, "directed": True, "verified": True,
        "source": {"generated": {"shape": "tiny", "seed": 3, "ids": "shuffled", "dtype": "bf16"}},
    }  # fmt: skip
    assert facts["splits"] == {"train": 500, "val": 500, "test": 1000} and facts["features"]["dtype"] == "bfloat16"
    shown = " ".join(run("info", folder).split())
    assert "generated: shape tiny, seed 3, ids shuffled, dtype bf16; directed" in shown
    assert "exists already" in run("generate", "tiny", folder, fails=True)
    run("generate", "tiny", folder, "--overwrite", "--ids", "planted", "--scale", "0.5")
    assert joestar.load(folder).num_nodes == 1000
    assert "unknown shape 'large'" in run("generate", "large", tmp_path / "x", fails=True)
    assert "--ids must be shuffled or planted" in run("generate", "tiny", tmp_path / "x", "--ids", "sorted", fails=True)


def test_info_reads_no_large_file(tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    run("generate", "tiny", folder)
    monkeypatch.setattr("joestar.data.folder.LOOK_AT", 0)
    monkeypatch.setattr("joestar.cli.info.LOOK_AT", 0)
    for name in ("in_degrees", "coo"):
        monkeypatch.setattr(joestar.Graph, name, None)
    facts = json.loads(run("info", folder, "--json"))
    assert facts["labels"] == {"classes": 5, "multilabel": False, "unlabelled": None, "largest_share": None}
    assert "classes" in run("info", folder)


def test_convert_with_every_flag(tmp_path):
    edges = np.array([[0, 1, 1, 2, 2], [1, 2, 2, 2, 0]])
    file = write_edges(tmp_path, "tsv", edges)
    np.save(tmp_path / "x.npy", np.ones((4, 2)))
    np.save(tmp_path / "y.npy", np.array([0.5, 1, 2, 3]))
    shown = run(
        "convert", file, tmp_path / "graph", "--features", tmp_path / "x.npy", "--labels", tmp_path / "y.npy",
        "--nodes", 4, "--undirected", "--keep-duplicates", "--drop-self-loops", "--dtype", "bf16", "--task",
        "regression", "--check", "--memory", "16MiB", "--header", "--columns", "target,source",
    )  # fmt: skip
    assert "5 edges given; 1 self-loops dropped; reverses added; duplicates kept: 8 edges." in shown
    graph = joestar.load(tmp_path / "graph")
    assert graph.in_degrees().tolist() == [2, 3, 3, 0] and graph.ndata["x"].dtype == torch.bfloat16
    assert graph.ndata["y"].tolist() == [0.5, 1, 2, 3] and graph.num_classes is None
    assert "converted from edges.tsv; every edge both ways" in " ".join(run("info", tmp_path / "graph").split())
    assert "--columns takes two names" in run("convert", file, tmp_path / "other", "--columns", "a", fails=True)
    assert "half-written" in run("info", half_written(tmp_path), fails=True)


def half_written(path):
    folder = path / "graph.partial-0123"
    folder.mkdir()
    (folder / "journal.json").write_text("{}")
    return folder


def test_ogb_is_downloaded_by_its_package(tmp_path, monkeypatch):
    """A stand-in for the package, which has the attributes that its versions have."""

    class NodePropPredDataset:
        def __init__(self, name, root):
            self.name, self.original_root, self.root = name, root, f"{root}/ogbn_arxiv"
            self.download_name, self.meta_info = "arxiv", {"url": "https://somewhere/arxiv.zip"}
            self.pre_process()

    def download_url(url, folder):
        (tmp_path / "arxiv.zip").write_text(url)
        return str(tmp_path / "arxiv.zip")

    def extract_zip(packed, folder):
        raw = tmp_path / "arxiv" / "raw"
        for name, rows in (("edge", [[0, 1], [1, 2]]), ("num-node-list", [3]), ("node-feat", np.eye(3)),
                           ("node-label", [0, 1, 0])):  # fmt: skip
            write_csv(raw / f"{name}.csv.gz", rows)

    for name, content in (
        ("ogb", {}), ("ogb.utils", {}), ("ogb.nodeproppred", {"NodePropPredDataset": NodePropPredDataset}),
        ("ogb.utils.url", {"decide_download": lambda url: agreed, "download_url": download_url,
                           "extract_zip": extract_zip}),
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    agreed = False
    flags = ("--root", tmp_path)
    assert "the download was declined" in run("convert", "ogb:ogbn-arxiv", tmp_path / "graph", *flags, fails=True)
    agreed = True
    run("convert", "ogb:ogbn-arxiv", tmp_path / "graph", *flags)
    assert joestar.load(tmp_path / "graph").in_degrees().tolist() == [1, 2, 1]
    assert not (tmp_path / "arxiv.zip").exists()
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    run("convert", "ogb:ogbn-arxiv", tmp_path / "again", *flags)  # it is there: no package is needed
    shown = run("convert", "ogb:ogbn-products", tmp_path / "other", *flags, fails=True)
    assert "pip install joestar[ogb]" in shown
    assert "expected a dataset for nodes" in run("convert", "ogb:ogbg-molhiv", tmp_path / "other", *flags, fails=True)


@pytest.mark.parametrize("command", [("generate", "tiny"), ("convert", "edges.npy")])
def test_nothing_is_left_of_what_is_refused(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(*command, "out", "--memory", "1B", fails=True)
    assert not list(tmp_path.iterdir())
