"""``benchmarks/plot_scaling.py``: what its curves show, of rows as ``joestar bench epoch --gpus`` writes them."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("plot_scaling", ROOT / "benchmarks" / "plot_scaling.py")
plot_scaling = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plot_scaling)


def row(model: str, world: int, seconds: list[float], share: float = 0.0, note: str = "") -> dict:
    return {"model": model, "world": world, "seconds": seconds, "share": share, "note": note}


def test_speed_ups_are_of_medians_behind_the_first_epoch():
    rows = [
        row("sage", 4, [9.0, 0.3, 0.25, 0.2], 0.03), row("sage", 1, [30.0, 1.0, 1.1, 0.9]),
        row("sage", 2, [], note="rank 1 of 2 ended with code 1"), row("gat", 2, [5.0, 0.5], 0.02),
        row("gat", 4, [0.25], 0.01),
    ]  # fmt: skip
    found = plot_scaling.curves(rows)
    assert found == {"sage": [(1, 1.0, 0.0), (4, 4.0, 0.03)], "gat": [(2, 2.0, 0.02), (4, 4.0, 0.01)]}


def test_what_the_docs_show():
    """The page's table and its figure are of the same rows."""
    found = plot_scaling.curves(json.loads((ROOT / "benchmarks" / "scaling_h200.json").read_text())["rows"])
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for model, points in found.items():
        for world, speed_up, _ in points[1:]:
            start = re.compile(rf"\| {model.upper()}( \(`[0-9a-f]{{7}}`\))? \| {world} \| ")
            lines = [line for line in text.splitlines() if start.match(line)]
            assert any(f"{speed_up:.2f}" in line for line in lines), (model, world, speed_up)


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install joestar[plots]")
    found = plot_scaling.curves([row("sage", 1, [1.0]), row("sage", 2, [0.6], 0.1)])
    out = tmp_path / "scaling.svg"
    plot_scaling.draw(found, out)
    drawn = out.read_bytes()
    plot_scaling.draw(found, out)
    assert b"<svg" in drawn and b"speed-up of an epoch" in drawn and out.read_bytes() == drawn

    def full(*given, **further):
        raise OSError("no space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full)
    with pytest.raises(OSError, match="space"):
        plot_scaling.draw(found, out)
    assert out.read_bytes() == drawn and list(tmp_path.iterdir()) == [out]
