"""``benchmarks/partition_scale.py``: whole from the graph to the facts, at a scale of no size."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import partition_scale


def test_reports_time_memory_and_what_the_parts_are_worth():
    gap, chance = partition_scale.main(["--shape", "tiny", "--parts", "8", "--passes", "2"])
    assert (gap["method"], gap["passes"], chance["method"]) == ("gap", 2, "random")
    assert gap["cut"] < chance["cut"] and gap["balance"] <= 1.5
    assert gap["least_skew"] <= gap["skew"] and gap["edges"] == chance["edges"]
    for found in (gap, chance):
        assert found["facts"]["s"] >= 0 and 0 <= found["beside_gb"] <= found["peak_gb"] < 64
