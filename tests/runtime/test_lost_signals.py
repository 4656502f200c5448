"""Ctrl-C and SIGTERM of which something on the way makes another error, or nothing: they are raised all the same."""

import contextlib
import gc
import os
import signal
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import CaptureError
from joestar.runtime.interrupts import EXIT, WholeImports, terminable
from joestar.runtime.program import Program
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 400), torch.arange(500, 700)
RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


def press(number: int, becomes: type[Exception] | None = TypeError) -> None:
    """A signal that comes within C++, which makes a ``TypeError`` of it, or passes it over."""
    try:
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
    except BaseException:
        if becomes is not None:
            raise becomes("argument 'size' failed to None") from None


def made():
    torch.manual_seed(0)
    model = joestar.nn.GraphSAGE(FEATURES, 8, 1, CLASSES).double()
    sampler = joestar.NeighborSampler(planted_graph(nodes=800, dtype=torch.float64), [3], seed=1)
    return joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), backend="eager")


@contextlib.contextmanager
def pressed_in_trace(number: int, which: int, becomes):
    """The trace of one program is pressed: the first one's is that of training."""
    left = iter(range(99))

    def pressed(program, *given):
        if next(left) == which:
            press(number, becomes)
        return capture(program, *given)

    capture = Program._capture
    with mock.patch.object(Program, "_capture", pressed):
        yield


@contextlib.contextmanager
def same_handlers():
    before = {number: signal.getsignal(number) for number in RAISED}
    yield
    assert {number: signal.getsignal(number) for number in RAISED} == before


@pytest.mark.parametrize("number", RAISED)
@pytest.mark.parametrize("becomes", [TypeError, None])
def test_what_a_handler_raises_leaves_the_block(number, becomes):
    with same_handlers(), pytest.raises(RAISED[number]) as caught, terminable(), WholeImports(), WholeImports():
        press(number, becomes)
    assert isinstance(caught.value.__cause__, becomes or type(None))


def test_what_a_handler_raised_is_let_go():
    """With the tensors of the frames that it was raised in."""

    def traced() -> None:
        here = torch.zeros(3)
        held.append(weakref.ref(here))
        press(signal.SIGINT)

    held = []
    with contextlib.suppress(KeyboardInterrupt), WholeImports():
        traced()
    gc.collect()
    assert held[0]() is None


def test_other_errors_stay_what_they_are():
    with pytest.raises(TypeError), terminable() as terminated, WholeImports():
        raise TypeError
    assert terminated.came is None


@pytest.mark.parametrize("number", RAISED)
@pytest.mark.parametrize(("which", "becomes"), [(0, CaptureError), (1, CaptureError), (1, TypeError), (1, None)])
def test_fit_saves_and_ends_where_a_signal_comes_within_a_trace(tmp_path, capsys, number, which, becomes):
    saved = joestar.Checkpoints(tmp_path)
    with same_handlers(), pressed_in_trace(number, which, becomes), pytest.raises(RAISED[number]) as caught:
        made().fit(IDX, VAL, 2, 100, checkpoints=saved)
    (note,) = caught.value.__notes__
    assert str(saved.paths()[-1]) in note and f"after {4 * which} steps of epoch 0" in note
    if number == signal.SIGTERM:
        assert caught.value.code == EXIT and note in capsys.readouterr().err
    assert len(made().fit(IDX, VAL, 2, 100, checkpoints=saved, resume=True).records) == 2


@pytest.mark.parametrize("number", RAISED)
def test_loops_of_ones_own_end_as_well(number):
    """Where something handles SIGTERM; the epoch goes on where it was."""
    epoch = made().epoch(IDX, 100)
    with pressed_in_trace(number, 0, CaptureError), pytest.raises(RAISED[number]), terminable():
        next(epoch)
    assert len(list(epoch)) == 4


@pytest.mark.parametrize("number", RAISED)
def test_exact_inference_ends_as_well(number):
    step = made()
    with pressed_in_trace(number, 0, CaptureError), pytest.raises(RAISED[number]), terminable():
        step.predict(IDX, full=True)
    assert step.predict(IDX, full=True).shape == (len(IDX), CLASSES)


@pytest.mark.parametrize("becomes", [RuntimeError, None])
def test_sigterm_of_which_a_callback_makes_something_else(tmp_path, becomes):
    saved = joestar.Checkpoints(tmp_path)

    def on_step(record):
        if record.step == 1:
            press(signal.SIGTERM, becomes)

    with pytest.raises(SystemExit):
        made().fit(IDX, None, 1, 100, checkpoints=saved, on_step=on_step)
    assert len(saved.latest()["fit"]["losses"]) == 2


@pytest.mark.parametrize("where", ["last step", "scores", "on_epoch"])
def test_sigterm_that_is_passed_over_at_the_end(tmp_path, where):
    saved = joestar.Checkpoints(tmp_path)

    def on_step(record):
        if where == "last step" and record.step == record.steps - 1:
            press(signal.SIGTERM, None)

    def mine(out, y):
        if where == "scores":
            press(signal.SIGTERM, None)
        return 0.5

    def on_epoch(record):
        if where == "on_epoch":
            press(signal.SIGTERM, None)

    with pytest.raises(SystemExit):
        made().fit(
            IDX, VAL, 1, 100, checkpoints=saved, on_step=on_step, on_epoch=on_epoch, metric={"mine": mine}, mode="max"
        )
    assert saved.latest() is not None
