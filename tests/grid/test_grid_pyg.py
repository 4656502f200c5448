"""Models over an ``edge_index`` train as PyG does, cut down to hops and with softmax in one op."""

import itertools

import pytest

from .cells import cover
from .pyg_cells import DIMENSIONS, PyGCell, check
from .train import make_graph

PAIRS = cover(2, DIMENSIONS, PyGCell)
PARTS = 10
NAMED = {
    "attention": PyGCell("gatv2", 2, 3, 8, "relu", "layer", "cat", True, "fused", "adam", "padded"),
    "softmax of features": PyGCell("softmax", 3, 2, 8, "elu", "none", "last", False, "fused", "sgd", "padded"),
    "loops": PyGCell("gcn", 2, 2, 8, "relu", "batch", "last", False, "stored", "adamw", "exact"),
}


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.mark.every(2)
@pytest.mark.parametrize("cell", NAMED.values(), ids=NAMED)
def test_named_cell(cell, graph, quick_captures):
    assert not check(cell, graph)


def test_the_cells_cover_every_pair():
    for (first, values), (second, others) in itertools.combinations(DIMENSIONS.items(), 2):
        assert {(getattr(c, first), getattr(c, second)) for c in PAIRS} == set(itertools.product(values, others))


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_cells(part, graph, quick_captures):
    wrong = [what for cell in PAIRS[part::PARTS] for what in check(cell, graph)]
    assert not wrong, "\n".join(wrong)
