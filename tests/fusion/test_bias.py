"""Biases that no product takes up: on a GPU their gradient adds up stored rows."""

import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

from joestar.fusion import run_passes

from .graphs import JOESTAR, Model, captured, count, mean, only

ON, OFF = only("extract-select", "bias"), only("extract-select")


def aggregated(m, blocks, x):
    return mean(blocks[1], (mean(blocks[0], x) + m.b).relu())


def model():
    torch.manual_seed(0)
    made = Model(aggregated, NUM_FEATURES)
    made.b = nn.Parameter(torch.randn(NUM_FEATURES))
    return made


def test_on_a_gpu_only():
    case = captured(model(), disable=ON)
    assert count(case.program.captured.gm, JOESTAR.add_bias.default) == 0


def test_before_and_after(monkeypatch):
    import joestar.runtime.program as program

    def on_gpu(*args, **options):
        return run_passes(*args, **{**options, "device": "cuda"})

    off = captured(model(), disable=OFF)
    monkeypatch.setattr(program, "run_passes", on_gpu)
    on = captured(model(), disable=ON)
    assert count(on.program.captured.gm, JOESTAR.add_bias.default) == 1
    expected = off.exact(off.seeds(SEEDS), 0)
    same(on.exact(on.seeds(SEEDS), 0), expected, 1e-12)
    same(on.padded(on.seeds(SEEDS), 0), expected, 1e-12)
