import json

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
