"""The tutorial: from two CSV files to a model that is saved, loaded in another program, and right about most nodes."""

import ast
import csv
import re

import pytest
import torch

from tests.docs.pages import DOCS, blocks, run_page


@pytest.mark.usefixtures("cheapest_captures")
def test_from_tables_to_predictions(tmp_path):
    page = DOCS / "tutorial.md"
    printed = "\n".join(run_page(page, tmp_path))
    assert float(re.search(r"'accuracy': ([\d.]+)", printed)[1]) > 0.85
    with open(tmp_path / "forum" / "nodes.csv") as file:
        rows = list(csv.DictReader(file))
    unknown = [row["id"] for row in rows if not row["class"]]
    guesses = ast.literal_eval(re.findall(r"^\[\(.*\)\]$", printed, re.MULTILINE)[-1])
    assert [member for member, _ in guesses] == unknown[:3]
    assert {guess for _, guess in guesses} <= {"art", "music", "sport"}
    assert torch.load(tmp_path / "topics.pt")["classes"] == ["art", "music", "sport"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    with open(tmp_path / "topics.csv") as file:
        predicted = list(csv.DictReader(file))  # by the commands at the end
    assert [row["node"] for row in predicted] == [row["id"] for row in rows]
    assert {row["prediction"] for row in predicted} <= {"art", "music", "sport"}
    shown = next(block.code for block in blocks(page) if block.code.startswith("id,"))
    assert (tmp_path / "forum" / "nodes.csv").read_text().replace("\r", "").startswith(shown)
