"""Layers as people write them: results and gradients are PyTorch's, exactly and padded, under every choice."""

import functools

import pytest
import torch
from captures import passes_for
from lowering.harness import NUM_CLASSES, NUM_FEATURES, small_graph

from joestar import NeighborSampler

from .layer_forms import FORMS, Net
from .layer_table import NAMES, row, written
from .together import cases_together, check_each

BATCHES = ((9, 3, 22, 1, 40, 2, 17), (5, 5, 47))


@pytest.fixture
def gpu_choices(monkeypatch):
    """Programs are rewritten as for a GPU, and run on the CPU."""
    passes_for(monkeypatch, "cuda")


ALONE = [name for name, (_, options) in FORMS.items() if options.get("norm") == "batch"]
"""Programs that are captured together would write each other's statistics."""
TOGETHER = [name for name in FORMS if name not in ALONE]


def models(dropout: bool, names: list[str]) -> dict:
    """A small net of every form; without dropout what PyTorch computes is known."""
    made = {}
    for name in names:
        form, options = FORMS[name]
        torch.manual_seed(len(made))
        rate = {"dropout": options.get("dropout", 0.3) if dropout else 0.0}
        made[name] = Net(form, NUM_FEATURES, 8, NUM_CLASSES, **{**options, **rate}).double()
    return made


@functools.cache
def weighted_graph():
    graph = small_graph()
    graph.edata["w"] = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(3)) + 0.1
    return graph


def check(dropout: bool, sampler=None, fanouts=(3, 2), names=TOGETHER, batches=BATCHES):
    graph = weighted_graph()
    sampler = sampler or NeighborSampler(graph, list(fanouts))
    cases = cases_together(models(dropout, names), graph=graph, sampler=sampler, fanouts=fanouts, tight=True)
    assert not (found := check_each(cases, batches, plain=not dropout)), "\n".join(found)


@pytest.mark.parametrize(
    ("names", "batches"),
    [
        pytest.param(TOGETHER, BATCHES[:1], id="together", marks=pytest.mark.fuzz),
        pytest.param(TOGETHER, BATCHES[1:], id="together, a node twice", marks=pytest.mark.fuzz),
        pytest.param(ALONE, BATCHES, id="batch norm"),
    ],
)
def test_agrees_with_pytorch(names, batches):
    check(dropout=False, names=names, batches=batches)


@pytest.mark.fuzz
@pytest.mark.usefixtures("gpu_choices")
@pytest.mark.parametrize("dropout", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_agrees_under_the_choices_of_a_gpu(dropout):
    check(dropout)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_choices")
def test_agrees_with_weighted_picks():
    check(dropout=False, sampler=NeighborSampler(weighted_graph(), [3, 2], probs="w"))


SOME = ("SAGE, ReLU", "cat-SAGE, `lin(cat([x, agg]))`", "mean with self-loops")


def test_the_page_has_every_form():
    assert [line.split(" | ")[0].removeprefix("| ") for line in written()] == list(NAMES)


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.fuzz) for n in NAMES])
def test_a_form_is_taken_as_the_page_says(name):
    assert row(name) in written()
