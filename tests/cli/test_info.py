import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.cli import info
from joestar.cli.main import app
from joestar.data.load import BUNDLED


def test_kept_facts_are_those_of_the_bundled_graphs():
    kept = json.loads(info.KEPT.read_text())
    assert set(kept) == set(BUNDLED)
    for name, facts in kept.items():
        for split in ("auto", "official"):
            assert json.loads(json.dumps(info.describe(joestar.load(name, split=split)))) == facts


def test_another_split_or_place_is_looked_at(tmp_path):
    joestar.data.save(joestar.load("cora", split="random"), tmp_path / "cora")
    for flags in (["--split", "random"], ["--root", str(tmp_path)]):
        shown = CliRunner().invoke(app, ["info", "cora", "--json", *flags])
        assert json.loads(shown.stdout)["splits"] == {"train": 1624, "val": 542, "test": 542}


NAN = float("nan")


@pytest.mark.parametrize(
    ("y", "multilabel", "facts", "text"),
    [
        ([0, 2, -100, 2], False, (3, 1, 2 / 3), "3, the largest has 66.7% of the labels; 1 nodes unlabelled"),
        ([-100, -100, -100, -100], False, (3, 4, None), "3; 4 nodes unlabelled"),
        ([0.5, NAN, NAN, 1.0], False, (None, 2, None), "targets for regression; 2 nodes unlabelled"),
        ([[NAN, NAN], [1.0, NAN], [0.5, 2.0], [NAN, 1.0]], False, (None, 1, None), "regression; 1 nodes unlabelled"),
        ([[NAN, NAN], [1.0, NAN], [0.0, 1.0], [NAN] * 2], True, (3, 2, None), "several per node; 2 nodes unlabelled"),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "bfloat16"])
def test_unlabelled_are_nodes_without_any_label(y, multilabel, facts, text, dtype):
    y = torch.tensor(y)
    y = y.to(dtype) if dtype and y.is_floating_point() else y
    graph = joestar.Graph.from_edge_index(np.array([[0, 1], [1, 2]]), 4, ndata={"y": y})
    graph.num_classes, graph.multilabel = 3, multilabel
    found = info.describe(graph)["labels"]
    assert (found["classes"], found["unlabelled"], found["largest_share"]) == pytest.approx(facts)
    assert found["multilabel"] == multilabel and text in info._classes_text(found)
