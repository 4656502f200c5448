"""Numbers that move into weights: what stays the same, and why they stay where they are in float16."""

import functools

import pytest
import torch
from lowering.harness import SEEDS, WIDTH, same, small_graph
from torch import nn

import joestar

from .graphs import Model, mean, only, reasons
from .together import captured_together

PATTERN = "number-factors"
ON = only("extract-select", PATTERN)


def model(f):
    return Model(f, WIDTH, mix=nn.Linear(6, WIDTH), back=nn.Linear(WIDTH, WIDTH)).double()


def before(m, blocks, x):
    return mean(blocks[1], m.mix(mean(blocks[0], x * 0.01)).relu())


def behind(m, blocks, x):
    return mean(blocks[1], m.mix(mean(blocks[0], x) / -3).relu())


def both(m, blocks, x):
    return m.back(mean(blocks[1], m.mix(mean(blocks[0], x * 0.01)).relu() * 0.01))


def in_one_weight(m, blocks, x):
    return mean(blocks[1], nn.functional.linear(mean(blocks[0], x * 0.005), m.mix.weight * 0.005))


FORMS = {"before": (before, 2), "behind": (behind, 1), "both": (both, 4), "in one weight": (in_one_weight, 1)}


@functools.cache
def cases():
    torch.manual_seed(0)
    return captured_together({name: model(f) for name, (f, _) in FORMS.items()}, disable=ON)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on = cases()[name]
    assert sum(place.fired for place in on.program.places if place.pattern == PATTERN) == FORMS[name][1]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = on.eager(on.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_numbers_of_one_weight_are_bounded_together():
    (reason,) = reasons(cases()["in one weight"], PATTERN)
    assert reason.startswith("2.5e-05 is so large or small")


class Small(nn.Module):
    """Features of 1e5 times a number: in float16 they fit once they are scaled."""

    def __init__(self, behind: bool, number: float):
        super().__init__()
        self.mix, self.head, self.behind, self.number = nn.Linear(6, 8), nn.Linear(8, 4), behind, number

    def forward(self, blocks, x):
        x = x if self.behind else x * self.number
        y = mean(blocks[0], x)
        return self.head(self.mix(y * self.number if self.behind else y).relu())


def logits(behind, number, autocast, disable=(), dtype=torch.float32, large=1e5):
    """(logits of a compiled model, its places of the pattern)."""
    graph = small_graph()
    graph.ndata["x"] = (graph.ndata["x"] * large).to(dtype)
    torch.manual_seed(0)
    net = Small(behind, number).to(dtype)
    sampler = joestar.NeighborSampler(graph, [3], seed=1)
    step = joestar.compile(net, sampler, backend="eager", autocast=autocast, disable_passes=disable)
    found = step(torch.tensor(SEEDS)).detach()
    return found, [place for place in step._executor("logits").program.places if place.pattern == PATTERN]


@pytest.mark.parametrize("behind", [False, True])
def test_rows_that_fit_float16_only_when_scaled_stay_finite(behind):
    found, places = logits(behind, 1e-3, torch.float16)
    expected, _ = logits(behind, 1e-3, torch.float16, (PATTERN,))
    assert found.isfinite().all()
    assert torch.equal(found, expected)
    assert not any(place.fired for place in places)


@pytest.mark.parametrize(
    ("number", "autocast", "dtype", "fires"),
    [(0.5, None, torch.float16, False), (-1.0, torch.float16, torch.float32, True),
     (0.5, torch.bfloat16, torch.float32, True)],
)  # fmt: skip
def test_which_dtypes(number, autocast, dtype, fires):
    found, places = logits(False, number, autocast, (), dtype, large=1)
    expected, _ = logits(False, number, autocast, (PATTERN,), dtype, large=1)
    assert any(place.fired for place in places) is fires
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
