"""What the fuzzer compares of trainings under autocast: states that are wrong are told from rounded ones."""

import pytest
import torch

from . import steps
from .execute import Report, run_pack
from .generate import PER_PACK, write

ADAM = 138
"""A program under autocast that is trained with AdamW."""


def trained(monkeypatch, factors: dict[str, float]) -> Report:
    """A report of the program, whose trained state is multiplied by these factors, by the first words of names."""
    state = steps.Training.state

    def wrong(training):
        found = state(training)
        return {name: value * factors.get(name.partition(" of ")[0], 1.0) for name, value in found.items()}

    monkeypatch.setattr(steps.Training, "state", wrong)
    report = Report(thorough=True)
    run_pack(ADAM // PER_PACK, report, only=ADAM)
    assert report.narrow == 1
    return report


@pytest.mark.fuzz
def test_rounding_is_none(monkeypatch):
    assert not trained(monkeypatch, {}).wrong


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "factor"),
    [("step", 0.7), ("exp_avg_sq", torch.nan),
     *(pytest.param(*case, marks=pytest.mark.fuzz) for case in (("exp_avg", 1.5), ("exp_avg_sq", 0.0)))],
)  # fmt: skip
def test_wrong_state_is_found(monkeypatch, name, factor):
    (wrong,) = trained(monkeypatch, {name: factor}).wrong
    assert f"{name} of " in wrong and "loss of step" not in wrong


def test_the_program():
    """If its text changes, take another one that is trained with moments."""
    assert write(ADAM).autocast
