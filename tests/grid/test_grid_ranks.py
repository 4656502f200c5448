"""On several ranks, wherever features are, a cell trains as one process does in plain PyTorch."""

import random

import pytest

from tests.distributed.ranks import run

from . import ranks
from .test_grid import NAMED, TRIPLES

EVERY, PER_LAUNCH = 12, 10
"""One of so many cells; cells of a launch."""
PICKED = random.Random("ranks").sample([cell for cell in TRIPLES if ranks.suits(cell)], len(TRIPLES) // EVERY)
LAUNCHES = -(-len(PICKED) // PER_LAUNCH)
FEW = [
    (NAMED["three layers"], "memory"),
    (NAMED["three layers"], "ids"),
    (NAMED["three layers of attention"], "hot"),
]
"""In ``make test``: batch norms of all ranks, a norm behind macro-batches, hot rows that differ among ranks."""


def wrong(world, work, *args, folder):
    """What differs on any rank."""
    outcomes = run(world, work, *args, folder=folder, seconds=500.0)
    assert all(outcome.code == 0 for outcome in outcomes), "\n".join(outcome.text for outcome in outcomes)
    return "\n".join(line for outcome in outcomes for line in outcome.result)


@pytest.mark.fuzz
def test_named_cells(tmp_path):
    assert not wrong(2, ranks.checked, FEW, folder=tmp_path)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(LAUNCHES))
def test_cells(part, tmp_path):
    cells = [(cell, ranks.place_of(cell)) for cell in PICKED[part::LAUNCHES]]
    assert not wrong(2 if part % 3 else 4, ranks.checked, cells, folder=tmp_path)


@pytest.mark.fuzz
@pytest.mark.parametrize("world", [2, 3])
def test_shards_have_the_rows_of_the_table(world, tmp_path):
    assert not wrong(world, ranks.rows_of_shards, list(range(100 * world, 100 * world + 40)), folder=tmp_path)
