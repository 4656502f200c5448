"""Where threads of several ranks wait for one another while hidden rows are loaded."""

from types import SimpleNamespace

import pytest

from joestar.errors import DistributedError, StageError
from joestar.staged import history_ranks
from joestar.staged.history_ranks import HistoryRanks


class Store(dict):
    """Counters, as a store of ``torch.distributed`` has them."""

    def clone(self):
        """The same."""
        return self

    def add(self, key, number):
        """The sum so far."""
        self[key] = self.get(key, 0) + number
        return self[key]


def ranks_of(timeout=0.0):
    """Rank 0 of three, of which the others do not come."""
    board = SimpleNamespace(store=Store(), look=lambda _: None, places=lambda: "rank 1 in step.predict; rank 2 in x")
    return HistoryRanks(SimpleNamespace(board=board, rank=0, world=3, timeout=timeout, check=lambda: None))


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(history_ranks, "START_SECONDS", 0.01)
    with pytest.raises(DistributedError) as raised:
        ranks_of().meet("1/7/read", iter([False] * 1000 + [True]).__next__)
    said = str(raised.value)
    for words in ("1 of 3 ranks came", "1/7/read", "rank 0 waits", "rank 1 in step.predict", "the same calls"):
        assert words in said


def test_who_need_not_wait_any_more_does_not():
    with pytest.raises(StageError, match="not waited for"):
        ranks_of(timeout=60.0).meet("1/7/read", iter([False, True]).__next__)
