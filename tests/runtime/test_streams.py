"""Streams on which CUDA graphs are recorded are not those of PyTorch's pools. See tests/gpu/test_environment_gpu.py."""

import contextlib
import ctypes
from pathlib import Path

import pytest
import torch

import joestar
from joestar import streams
from joestar.streams import between, own_stream

CURRENT = torch.device("cuda", 1)


class _Driver:
    def __init__(self, error: int):
        self.error, self.asked = error, []

    def cuStreamCreateWithPriority(self, handle, flags, priority):  # noqa: N802
        self.asked.append((flags.value, priority.value))
        handle._obj.value = 4096 + len(self.asked)
        return self.error


@pytest.fixture
def driver(monkeypatch):
    def install(error=0):
        found = _Driver(error)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
        return found

    monkeypatch.setattr(streams, "_STREAMS", {})
    current = type("Stream", (), {"query": lambda self: True})()
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    return install


def test_a_stream_of_the_driver_that_does_not_wait_for_the_default_one(driver):
    found = driver()
    device = torch.device("cuda")
    assert [own_stream(name, device, priority) for name, priority in (("a", 0), ("b", -1))] == [
        (4097, CURRENT),
        (4098, CURRENT),
    ]
    assert own_stream("a", device) == own_stream("a", CURRENT) == (4097, CURRENT), "one for every purpose"
    assert found.asked == [(1, 0), (1, -1)]


def test_every_device_has_streams_of_its_own(driver, monkeypatch):
    """Also where one is named by what is the current one."""
    driver()
    first, last = torch.device("cuda", 0), torch.device("cuda", 1)
    assert [own_stream("a", torch.device("cuda")), own_stream("a", first)] == [(4097, last), (4098, first)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert own_stream("a", torch.device("cuda")) == (4098, first)


def test_a_driver_that_refuses(driver):
    driver(error=2)
    with pytest.raises(RuntimeError, match="error 2 of cuStreamCreateWithPriority"):
        own_stream("a", torch.device("cuda"))


def test_without_a_driver_a_stream_of_the_pool(driver, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: ("pool", priority))
    assert own_stream("a", torch.device("cuda"), -1) == ("pool", -1)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_current_stream_waits_for_what_is_done_between_also_after_an_interrupt(monkeypatch, error):
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    one, other = Stream("one"), Stream("other")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: one)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with contextlib.nullcontext() if error is None else pytest.raises(error), between(other, CURRENT):
        log.append("work")
        if error is not None:
            raise error
    assert log == ["other waits for one", "work", "one waits for other"]


def test_what_is_recorded_is_recorded_on_no_stream_of_a_pool():
    package = Path(joestar.__file__).parent
    folders = ("runtime", "ops", "kernels", "distributed")
    files = [path for folder in folders for path in (package / folder).rglob("*.py")]
    assert len(files) > 100
    assert not [path.name for path in files if "cuda.Stream(" in path.read_text()]
