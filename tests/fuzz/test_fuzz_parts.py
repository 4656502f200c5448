"""Random training over partitions on several ranks is that of plain PyTorch; ``test_partitioned_ranks.py`` has what
``make test`` runs."""

import pytest

from tests.distributed.ranks import run

from . import part_ranks

PER_LAUNCH = 8


@pytest.mark.fuzz
@pytest.mark.parametrize(("world", "group"), [(2, 0), (2, 1), (3, 2), (4, 3)])
def test_any_training_on_ranks_is_that_of_plain_pytorch(world, group, tmp_path):
    cases = list(range(group * PER_LAUNCH, (group + 1) * PER_LAUNCH))
    outcomes = run(world, part_ranks.checked, cases, folder=tmp_path, seconds=500.0)
    assert all(outcome.code == 0 for outcome in outcomes), "\n".join(outcome.text for outcome in outcomes)
    for outcome in outcomes:
        assert not outcome.result["wrong"], "\n".join(outcome.result["wrong"][:2])
        assert outcome.result["pulled"] > 20, outcome.result  # layers have rows of what steps can read alone
        assert outcome.result["idle"] and outcome.result["single"], outcome.result
