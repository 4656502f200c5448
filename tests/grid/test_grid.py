"""Every configuration trains as plain PyTorch does: losses, parameters, buffers and the optimizer's state."""

import itertools
import random

import pytest

from .cells import DIMENSIONS, Cell, cover
from .macro import check_macro
from .train import check, make_graph

TWO_LAYERS = {
    **DIMENSIONS, "fanouts": ((-1, -1), (4, 3), (-1, 3), (3, -1)), "act": ("relu", "elu", "prelu", "none"),
}  # fmt: skip
PAIRS = cover(2, TWO_LAYERS)
NAMED = {
    f"plain {model}, {hidden} hidden, {fanouts}": Cell(
        hidden, fanouts, model, "relu", "none", 0.5, "none", "none", "adam", 0
    )
    for model, fanouts, hidden in itertools.product(DIMENSIONS["model"], ((-1, -1), (4, 3)), (16, 64))
    if fanouts == (-1, -1) or hidden == 16
} | {
    "three layers": Cell(8, (2, -1, 3), "sage", "relu", "batch", 0.5, "cat", "own", "adamw", 0),
    "three layers of attention": Cell(16, (2, -1, 3), "gat", "elu", "none", 0.5, "none", "linear", "sgd", 1),
}
MACRO = {name: cell for name, cell in NAMED.items() if cell.fanouts == (4, 3) and cell.model != "gin"}
MACRO["three layers"] = NAMED["three layers"]


@pytest.fixture(scope="module")
def graph():
    return make_graph()


@pytest.mark.parametrize(("strength", "at_most"), [(2, 30), (3, 212)])
def test_the_cells_cover_every_pair_and_triple(strength, at_most):
    cells, dimensions = (PAIRS, TWO_LAYERS) if strength == 2 else (TRIPLES, DIMENSIONS)
    for names in itertools.combinations(dimensions, strength):
        found = {tuple(getattr(cell, name) for name in names) for cell in cells}
        assert found == set(itertools.product(*map(dimensions.get, names))), names
    assert len(cells) <= at_most, "docs/reliability.md says how many"
    assert cover(strength, dimensions) == cells, "the same cells every time"


def named(name: str, cell: Cell):
    """A cell as a parameter: those 64 wide are for ``make fuzz``, and plain ones that ``make test`` trains over
    macro-batches; all plain ones are captured in the real way there."""
    plain = name.startswith("plain")
    later = cell.hidden == 64 or (plain and name in MACRO)
    return pytest.param(cell, id=name, marks=[*[pytest.mark.quick] * plain, *[pytest.mark.fuzz] * later])


@pytest.mark.every(4)
@pytest.mark.parametrize("cell", [named(name, cell) for name, cell in NAMED.items()])
def test_named_cell(cell, graph, request):
    if request.node.get_closest_marker("quick"):
        request.getfixturevalue("quick_captures")
    assert not check(cell, graph)


EVERY = 5
"""One of so many cells is trained over macro-batches, too."""


@pytest.mark.parametrize("cell", MACRO.values(), ids=MACRO)
def test_macro_batches(cell, graph, quick_captures):
    assert not check_macro(cell, graph)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(10))
def test_macro_batches_of_cells(part, graph, quick_captures):
    cells = random.Random("macro").sample(TRIPLES, len(TRIPLES) // EVERY)
    wrong = [f"{cell}: {what}" for cell in cells[part::10] for what in check_macro(cell, graph)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.every(4)
@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_cell(cell, graph, quick_captures):
    """Captured in the real way, with every triple, in ``make fuzz``."""
    assert not check(cell, graph)


@pytest.mark.fuzz
@pytest.mark.parametrize("cell", PAIRS, ids=str)
def test_cell_through_the_backend(cell, graph, quick_captures):
    """Inductor's loops on a CPU, as a user's run has them."""
    assert not check(cell, graph, backend="inductor", executions=("padded",))


TRIPLES = cover(3)
PARTS = 40


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_every_triple(part, graph):
    wrong = [f"{cell}: {what}" for cell in TRIPLES[part::PARTS] for what in check(cell, graph)]
    assert not wrong, "\n".join(wrong)
