"""``benchmarks/planted_labels.py``: what can be learnt on a planted graph, judged on all neighbours or on many."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import planted_labels

from joestar.bench.planted import planted


@pytest.mark.parametrize("exact", [0, 10_000])
def test_tiny_is_in_the_band_however_it_is_judged(exact):
    options = argparse.Namespace(device="cpu", seed=0, batch=1000, steps=120, judged=1000, exact=exact, train=0)
    row = planted_labels.measure("tiny", 1.0, options)
    assert planted_labels.fits(row), row
    assert row["judged on"] == ("all neighbours" if exact else "50, 50") and row["train"] == 500
    assert "outside" not in planted_labels.line(row) and "| 5 of 5 |" in planted_labels.line(row)
    assert "outside" in planted_labels.line(row | {"mlp": 0.5}) and "outside" in planted_labels.line(
        row | {"sage": 0.7}
    )


def test_more_training_nodes_are_in_no_other_split():
    graph = planted("tiny")
    train = planted_labels.enough(graph, 490)
    assert train is graph.train_idx
    one = planted("mini")
    more = planted_labels.enough(one, 12_000)
    assert more.numel() == more.unique().numel() == 12_000 and torch.equal(more[:10_000], one.train_idx)
    assert not torch.isin(more, torch.cat([one.val_idx, one.test_idx])).any()
