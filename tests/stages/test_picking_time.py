"""How long groups of parts take to pick, for a plan: of those that follow others, which are gone, the shortest."""

import types
import weakref

import pytest

from joestar.staged import partition_planning
from joestar.staged.partition_planning import PartitionPlanner


class Batch:
    """Stands for a macro-batch."""


@pytest.mark.parametrize(("took", "expected"), [([9.0, 3.0, 2.0, 4.0], 2.0), ([1.0, 5.0, 5.0, 5.0], 5.0)])
def test_the_first_is_not_timed_and_none_is_kept(monkeypatch, took, expected):
    now, made, left = [0.0], [], iter(took)

    def make():
        assert all(ref() is None for ref in made), "memory is that of others that are gone"
        now[0] += next(left)
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(partition_planning, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    planner = object.__new__(PartitionPlanner)
    planner._makers = lambda most: [make] * most
    assert planner._picking() == pytest.approx(expected) and len(made) == len(took) == 1 + partition_planning.PICKED
