"""The examples of large graphs, on small ones: generated, and converted from files in the published layout."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import joestar
from joestar.data import convert
from joestar.data.generate import Planted, in_memory
from joestar.data.planted import SHAPES
from tests.data.small import write_csv, write_split

pytestmark = pytest.mark.usefixtures("cheapest_captures")

FOLDER = Path(__file__).parents[2] / "examples" / "large"
NAMES = ("ogbn_products", "papers100m", "mag240m")
QUICK = ["--backend", "eager", "--epochs", "2", "--hidden", "16", "--batch-size", "100"]


@pytest.fixture
def example(monkeypatch):
    """Imports an example as Python does when it runs the file."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in (*NAMES, "common"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "more"), [("papers100m", ["--memory", "64MiB"]), ("mag240m", ["--dtype", "fp16"])])
def test_on_a_generated_graph(example, name, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    step = example(name).main([*QUICK, "--generate", "tiny", *more])
    assert step.report().counters.steps >= 10
    assert "planted tiny, ids shuffled: test accuracy" in capsys.readouterr().out
    assert joestar.load(tmp_path / "graphs" / "tiny").ndata["x"].dtype == (
        torch.float16 if "fp16" in more else torch.float32
    )


def test_on_files_in_ogbs_layout(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    graph = in_memory(Planted(SHAPES["tiny"]))
    folder = tmp_path / "ogbn_products"
    src, dst, _ = graph.coo()
    for name, rows in (
        ("edge", torch.stack([src, dst], 1)),
        ("num-node-list", [2000]),
        ("node-label", graph.ndata["y"]),
    ):
        write_csv(folder / "raw" / f"{name}.csv.gz", np.asarray(rows))
    write_csv(folder / "raw" / "node-feat.csv.gz", graph.ndata["x"].numpy().round(3))
    splits = {part: getattr(graph, f"{part}_idx").numpy() for part in ("train", "val", "test")}
    write_split(folder, "sales_ranking", splits)
    example("ogbn_products").main([*QUICK, "--source", str(folder), "--data", "converted"])
    assert "ogbn-products: test accuracy" in capsys.readouterr().out
    assert joestar.load("converted").num_nodes == 2000


@pytest.mark.parametrize("limit", [[], ["--memory", "24GiB"]])
def test_memory_is_handed_on(example, tmp_path, monkeypatch, limit):
    monkeypatch.chdir(tmp_path)
    seen = []

    def compile(*arguments, **options):
        seen.append(options.get("memory"))
        raise SystemExit

    monkeypatch.setattr(joestar, "compile", compile)
    with pytest.raises(SystemExit):
        example("papers100m").main([*QUICK, "--generate", "tiny", *limit])
    assert seen == [limit[1] if limit else None]
    assert convert is joestar.data.convert
