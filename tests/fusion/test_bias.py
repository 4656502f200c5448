"""Biases that no product takes up: on a GPU their gradient adds up stored rows."""

import torch
from captures import passes_for
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

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
    off = captured(model(), disable=OFF)
    passes_for(monkeypatch, "cuda")
    on = captured(model(), disable=ON)
    assert count(on.program.captured.gm, JOESTAR.add_bias.default) == 1
    expected = off.exact(off.seeds(SEEDS), 0)
    same(on.exact(on.seeds(SEEDS), 0), expected, 1e-12)
    same(on.padded(on.seeds(SEEDS), 0), expected, 1e-12)
