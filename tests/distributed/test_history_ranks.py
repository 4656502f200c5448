"""Where threads of several ranks wait for one another while hidden rows are loaded."""

import threading
from types import SimpleNamespace

import pytest

from joestar.errors import DistributedError, StageError
from joestar.staged import history_ranks
from joestar.staged.history_ranks import HistoryRanks


class Store(dict):
    """Counters and words, as a store of ``torch.distributed`` has them."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def clone(self):
        """The same."""
        return self

    def add(self, key, number):
        """The sum so far."""
        with self.lock:
            self[key] = self.get(key, 0) + number
            return self[key]

    def check(self, keys):
        """Whether something is there."""
        return all(key in self for key in keys)

    def compare_set(self, key, expected, desired):
        """What is there then."""
        with self.lock:
            return self.setdefault(key, desired.encode()) if not expected else self[key]

    def delete_key(self, key):
        """It is gone."""
        del self[key]


def ranks_of(timeout=0.0, store=None, rank=0, world=3):
    """Rank 0 of three, of which the others do not come; or another one."""
    board = SimpleNamespace(
        store=Store() if store is None else store, look=lambda _: None,
        places=lambda: "rank 1 in step.predict; rank 2 in x",
    )  # fmt: skip
    hosts = ["here"] * world
    group = SimpleNamespace(
        board=board, rank=rank, world=world, timeout=timeout, check=lambda: None, hosts=hosts, host="here"
    )
    found = HistoryRanks(group)
    found._name = "history"
    return found


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


def test_all_stop_waiting_or_none_does():
    """Also those who were told to stop when the last one came: the others have gone on."""
    store, ends = Store(), []
    ranks = [ranks_of(60.0, store, rank, 2) for rank in range(2)]

    def stopped_when_all_are_there():
        if not ends:
            ends.append(threading.Thread(target=ranks[1].meet, args=("1/7/read", lambda: False)))
            ends[0].start()
            ends[0].join(20)
        return True

    ranks[0].meet("1/7/read", stopped_when_all_are_there)
    with pytest.raises(StageError, match="not waited for"):
        ranks[0].meet("1/8/read", lambda: True)
    with pytest.raises(StageError, match="not waited for"):
        ranks[1].meet("1/8/read", iter([False, False, True]).__next__)
    assert store == {"history/1/7/read": 2, "history/1/7/read/said": b"all"} | {
        "history/1/8/read": 2, "history/1/8/read/said": b"stopped"
    }  # fmt: skip
