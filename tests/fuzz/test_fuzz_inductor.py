"""Random programs through Inductor, padded: the same results as exact eager execution without passes."""

import pytest

from .execute import Report, run_pack
from .generate import PER_PACK

PACKS = range(0, 200, 20)
"""Of every shard the first, whose programs are steered to passes."""


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS)
def test_compiled_programs_agree(pack):
    report = Report()
    run_pack(pack, report, backend="inductor")
    assert report.programs == PER_PACK
    assert not report.wrong, "\n\n".join(report.wrong)
    assert len(report.refused) <= 1, "\n".join(report.refused.values())


def test_fifty_programs():
    assert len(PACKS) * PER_PACK == 50
