"""Further norms, activations, losses, edge weights and autocast train as plain PyTorch does."""

import itertools

import pytest

from .cells import cover
from .more import MORE, More, check

PAIRS = cover(2, MORE, More)
NAMED = {
    "weighted": More("sage", "silu", "over rows", "binary", True, ""),
    "in 16 bits": More("gat", "gelu", "rms", "smoothed", True, "bfloat16"),
}


def test_the_cells_cover_every_pair():
    for (first, values), (second, others) in itertools.combinations(MORE.items(), 2):
        assert {(getattr(c, first), getattr(c, second)) for c in PAIRS} == set(itertools.product(values, others))


@pytest.mark.parametrize("cell", NAMED.values(), ids=NAMED)
def test_named_cell(cell, quick_captures):
    assert not check(cell)


@pytest.mark.fuzz
@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_cells(cell, quick_captures):
    assert not check(cell)
