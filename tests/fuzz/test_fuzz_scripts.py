"""Random scripts around a step, beside plain PyTorch: whatever a loop does, in any order, is what it would do there."""

import pytest
from captures import cheaper, real

from .fits import Fit
from .own_loops import Loop
from .script_worlds import OverMacroBatches
from .scripts import Script

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SCRIPTS, LOOPS, QUICK = 120, 120, 3


def numbers(count: int) -> list:
    """The first ones in ``make test``, the others in ``make fuzz``."""
    return [*range(QUICK), *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(QUICK, count))]


@pytest.mark.parametrize("number", numbers(SCRIPTS))
def test_scripts_as_in_plain_pytorch(number):
    Script(number).run()


@pytest.mark.parametrize("number", numbers(LOOPS))
def test_own_loops_as_in_plain_pytorch(number):
    Loop(number).run()


@pytest.mark.parametrize("number", numbers(60))
def test_scripts_over_macro_batches_as_in_plain_pytorch(number):
    Script(number, side=OverMacroBatches).run()


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(1, 40))])
def test_fits_as_loops_by_hand_wherever_they_were_broken_off(number):
    Fit(number).run()


@pytest.mark.parametrize("number", [15, *(pytest.param(n, marks=pytest.mark.fuzz) for n in (8, 10, 11, 12, 13, 14))])
def test_what_traces_are_told_is_watched(number):
    """Cached numbers and missing settings that change: only captures in the real way know of them."""
    with cheaper(real):
        Script(number).run()


@pytest.mark.fuzz
@pytest.mark.parametrize(("kind", "number"), [(Script, 3), (Script, 9), (Loop, 4), (Loop, 10)])
def test_so_they_are_through_inductor(kind, number):
    kind(number, "inductor").run()
