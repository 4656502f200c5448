"""A captured step's word is summed over the ranks right behind the sampling. On GPUs: tests/gpu/test_ranks_gpu.py."""

import contextlib

import pytest
import torch

from joestar.distributed.place import early_word
from joestar.errors import ConfigError
from joestar.runtime import verdict
from joestar.runtime.mailbox import Mailbox


class _Stream:
    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def wait_stream(self, other: "_Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize(("own", "others", "happens"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_what_is_asked_told_and_waited_for(monkeypatch, own, others, happens):
    log, posted = [], []
    first, second = _Stream("first", log), _Stream("second", log)
    current = [first]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def add_up(void):
        log.append(f"sum on {current[-1].name}")
        void += others

    def overflow(counts, bounds, flag):
        posted.append(([int(count) for count in counts], bounds, not bool(flag)))

    heard = []
    monkeypatch.setattr(verdict, "_stream", lambda device: second)
    monkeypatch.setattr(verdict, "heard", heard.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.ops.joestar, "overflow", overflow)
    asked = verdict.Verdict(add_up, Mailbox(torch.device("cpu"), 2), [5, 9], early=True)
    asked.asked()
    heard[0](torch.tensor([3, 4]), torch.tensor(own))
    assert posted == [([3, 4], [5, 9], happens)]
    asked.join()
    asked.found(torch.tensor([3, 4]), torch.tensor(True))
    assert len(posted) == 1 and log == ["second waits for first", "sum on second", "first waits for second"]


@pytest.mark.parametrize("happens", [True, False])
def test_the_host_is_told_behind_the_sum_of_the_gradients(monkeypatch, happens):
    posted = []
    monkeypatch.setattr(torch.ops.joestar, "overflow", lambda counts, bounds, flag: posted.append((bounds, bool(flag))))
    late = verdict.Verdict(None, Mailbox(torch.device("cpu"), 2), [5, 9], early=False)
    with late.asked():
        late.join()
    assert posted == []
    late.found(torch.tensor([3, 4]), torch.tensor(happens))
    assert posted == [([5, 9], not happens)]


@pytest.mark.parametrize(("given", "word"), [(None, "1"), ("0", "0"), ("1", "1"), ("", "1"), ("device", "device")])
def test_the_environment_decides(monkeypatch, given, word):
    monkeypatch.delenv("JOESTAR_EARLY_WORD", raising=False)
    if given is not None:
        monkeypatch.setenv("JOESTAR_EARLY_WORD", given)
    assert early_word() == word


@pytest.mark.parametrize("given", ["2", "Device", "true", " 0"])
def test_what_the_environment_may_not_say(monkeypatch, given):
    monkeypatch.setenv("JOESTAR_EARLY_WORD", given)
    with pytest.raises(ConfigError, match=f"JOESTAR_EARLY_WORD in .* must be 0, 1 or device, .*; got '{given}'"):
        early_word()
