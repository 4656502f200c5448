"""``benchmarks/sweep.py``: the tuner on a space that is swept as well."""

import importlib.util
import json
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("sweep", Path(__file__).parents[2] / "benchmarks" / "sweep.py")
sweep = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sweep)


@pytest.mark.slow
def test_a_sweep_and_the_tuner(tmp_path, capsys):
    out = tmp_path / "sweep.json"
    sweep.main(["--models", "sage", "--shape", "tiny", "--device", "cpu", "--batch", "100", "--out", str(out)])
    (row,) = json.loads(out.read_text())
    assert row["candidates"] > 20 and 1 < row["tried"] <= row["candidates"]
    assert 0 < row["best_ms"] <= row["default_ms"] <= row["worst_ms"] and row["found_over_best"] > 0
    assert f"{row['candidates']} candidates swept" in capsys.readouterr().out


def test_a_candidate_against_itself_is_not_timed():
    one = sweep.Candidate((("a:b", "c"),), 0.01)
    assert sweep.against(None, one, one) == 1.0
