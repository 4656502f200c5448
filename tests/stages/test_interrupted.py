"""Ctrl-C in the instant in which a lock is taken or given back: no thread waits for it for ever."""

import threading

import pytest

from joestar.stages import Pipeline
from joestar.stages.gate import Gate
from joestar.stages.pipeline import _State
from stages.pressed import pressed

PATIENCE = 5.0
"""Seconds until a lock counts as lost."""


@pytest.fixture(autouse=True)
def nobody_waits_for_ever(monkeypatch):
    join = _State.join
    monkeypatch.setattr(_State, "join", lambda self, seconds=PATIENCE: join(self, seconds))


def is_free(condition: threading.Condition) -> bool:
    """Whether another thread gets it."""
    got = []

    def take():
        if condition.acquire(timeout=PATIENCE):
            got.append(True)
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(got)


@pytest.mark.parametrize("at", ["enter", "leave"])
@pytest.mark.parametrize("what", ["leave", "close"])
def test_a_gate_is_not_left_locked(what, at):
    gate = Gate()
    with pytest.raises(KeyboardInterrupt), pressed(what, at):
        getattr(gate, what)()
    assert is_free(gate._changed)
    assert gate._free == 2 if what == "leave" else gate.is_closed(), "it happened, as a whole"


@pytest.mark.parametrize("at", ["enter", "leave"])
@pytest.mark.parametrize("function", ["_found", "end"])
def test_a_pipeline_is_not_left_locked(function, at):
    """It ends, and so do its threads."""
    pipeline = Pipeline(str, 10**9, str)
    state = pipeline._state
    with pytest.raises(KeyboardInterrupt), pressed(function, at):
        list(pipeline) if function == "_found" else pipeline.close()
    assert is_free(state.changed) and state.ended
    state.join(PATIENCE)
    assert not any(thread.is_alive() for thread in state.threads)


@pytest.mark.parametrize("at", ["enter", "leave"])
def test_a_pipeline_that_is_being_made_leaves_no_thread(at):
    """Ctrl-C while it waits for one to have started: that one's lock was lost, and others were waited for."""
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), pressed("wait", at):
        Pipeline(str, 10**9, str)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
    assert set(threading.enumerate()) <= before


def test_threads_that_never_started_are_not_waited_for(monkeypatch):
    start, started = threading.Thread.start, []

    def one_only(self):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", one_only)
    with pytest.raises(RuntimeError, match="new thread"):
        Pipeline(str, 10**9, str, str)
    started[0].join(PATIENCE)
    assert not started[0].is_alive()
