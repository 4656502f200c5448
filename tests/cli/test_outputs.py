"""What a command writes is none of the files that it reads."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli.files import check_outputs, place_of
from joestar.cli.main import app
from joestar.errors import ConfigError
from joestar.graph_api import NodeMapping

READ = "this is what the dataset names already, or part of it"


@pytest.fixture
def root(tmp_path):
    """Datasets of several formats, as names lead to them; and a folder of tables beside."""
    root = tmp_path / "root"
    graph = joestar.Graph.from_edge_index(
        [[0, 1], [1, 2]], 3, ndata={"x": torch.ones(3, 2), "y": torch.tensor([0, 1, 0])}
    )
    graph.mapping = NodeMapping(np.array([10, 20, 30]))
    joestar.data.save(graph, root / "tiny")
    np.savez(root / "packed.npz", edge_index=[[0, 1], [1, 2]], y=[0, 1, 0])
    for name in ("ogbn_arxiv/raw/edge.csv.gz", "ogbn_arxiv/split/time/train.csv.gz", "pyg/Planetoid/raw/x"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "edges.csv").write_text("source,target\n0,1\n")
    return root


def refused(*command):
    """What a command that must not begin says, in one line."""
    failed = CliRunner().invoke(app, [str(part) for part in command])
    assert failed.exit_code == 2, failed.output
    return " ".join(failed.stderr.split())


@pytest.mark.parametrize("by", ["root", "environment"])
@pytest.mark.parametrize(
    ("dataset", "output"),
    [
        ("tiny", "tiny/mapping.npy"),
        ("tiny", "tiny/indptr.npy"),
        ("tiny", "tiny/new.json"),
        ("packed", "packed.npz"),
        ("ogbn-arxiv", "ogbn_arxiv/raw/edge.csv.gz"),
        ("ogbn-arxiv", "ogbn_arxiv/split/time/train.csv.gz"),
        ("ogb:ogbn-arxiv", "ogbn_arxiv/raw/edge.csv.gz"),
        ("pyg:Planetoid/Cora", "pyg/Planetoid/raw/x"),
    ],
)
def test_no_output_is_a_file_of_a_dataset(root, tmp_path, monkeypatch, by, dataset, output):
    """Names under a root, and files that a list of those of a dataset had forgotten, were written over."""
    given = None if by == "environment" else str(root)
    if by == "environment":
        monkeypatch.setenv("JOESTAR_DATA", str(root))
    (tmp_path / "link").symlink_to(root)
    for folder in ("root", "link"):
        with pytest.raises(ConfigError, match=f"--report .*: {READ}"):
            check_outputs({"--report": str(tmp_path / folder / output)}, {"the dataset": place_of(dataset, given)})
    check_outputs({"--report": str(root / "new.json")}, {"the dataset": place_of(dataset, given)})


def test_commands_look_under_their_root(root):
    there, name = ("tiny", "--root", root), root / "tiny" / "mapping.npy"
    assert f"--report {name}: {READ}" in refused("train", *there, "--report", name)
    assert READ in refused("plan", *there, "--json", name)
    assert READ in refused("partition", *there, "--out", name)
    assert READ in refused("profile", *there, "--json", root / "tiny" / "meta.json")
    assert READ in refused("train", root / "tiny", "--save", name)
    for bench in ("step", "inference"):
        assert READ in refused("bench", bench, "--dataset", root / "tiny", "--json", name)


def test_no_output_is_the_file_of_settings(tmp_path):
    (tmp_path / "run.json").write_text("epochs = 1\n")
    for command, flag in (("train", "--report"), ("train", "--save"), ("plan", "--json"), ("profile", "--json")):
        said = refused(command, "--config", tmp_path / "run.json", flag, tmp_path / "run.json")
        assert "this is what --config names already" in said
    (tmp_path / "run.json").write_text(f"report = {json.dumps(str(tmp_path / 'run.json'))}\n")
    assert "this is what --config names already" in refused("train", "--config", tmp_path / "run.json")


def test_other_files_may_lie_beside_tables(root, tmp_path):
    place = place_of(str(tmp_path / "tables"), None)
    for name in ("best.pt", "predictions.csv", "run.json"):
        check_outputs({"--out": str(tmp_path / "tables" / name)}, {"the dataset": place})
    for name in ("edges.csv", "edges.parquet", "nodes.tsv", "features.npy", "train_idx.npy"):
        with pytest.raises(ConfigError, match=READ):
            check_outputs({"--out": str(tmp_path / "tables" / name)}, {"the dataset": place})


def test_what_is_nowhere_is_no_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cora").mkdir()
    for name in ("none", "ogb:ogbn-arxiv", "ogb:", "pyg:", "pyg:Planetoid/Cora"):
        assert place_of(name, str(tmp_path)) is None
    assert place_of("cora", None).name == "cora.npz"
