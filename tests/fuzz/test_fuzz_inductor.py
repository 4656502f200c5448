"""Random programs through Inductor, padded: the same results as exact eager execution without passes."""

import pytest

from .additions import EXTENDED
from .execute import ALL, OF_UNIONS, Report, run_pack
from .generate import PER_PACK, write

PACKS = range(0, 200, 21)
"""Of every shard another pack: together they are steered to all passes."""
WITH_ADDITIONS = [EXTENDED // PER_PACK + pack for pack in (0, 11, 12, 22, 33, 173, 236)]
"""Buffers that are written, rows in windows, tokens: packs of programs with more than ops of the graph level. In ``make
fuzz``: Inductor went wrong by itself in programs of five of them (``runtime/test_inductor_results.py``)."""


@pytest.mark.parametrize("pack", [*(pytest.param(pack, marks=pytest.mark.slow) for pack in PACKS), *WITH_ADDITIONS])
@pytest.mark.fuzz
def test_compiled_programs_agree(pack):
    report = Report()
    run_pack(pack, report, backend="inductor")
    assert report.programs == PER_PACK
    assert not report.wrong, "\n\n".join(report.wrong)
    assert len(report.refused) <= 1, "\n".join(report.refused.values())


def test_fifty_programs_steered_to_all_passes():
    numbers = [pack * PER_PACK + position for pack in PACKS for position in range(PER_PACK)]
    assert len(numbers) == 50
    assert {write(number).steered for number in numbers} >= set(ALL) - OF_UNIONS
