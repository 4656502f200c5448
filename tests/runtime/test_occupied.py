"""One process at a time writes to a folder of checkpoints: two runs removed each other's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ConfigError
from joestar.runtime import checkpoint
from joestar.runtime import occupied as occupied_module
from joestar.runtime.occupied import NAME, occupied
from tests.runtime.common import CLASSES, FEATURES, planted_graph

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.usefixtures("cheapest_captures")
IDX = torch.arange(40)
WAITING = """
import sys
from joestar.runtime.occupied import occupied
with occupied(sys.argv[1], 0.0):
    print("in", flush=True)
    sys.stdin.read()
"""


def made():
    torch.manual_seed(0)
    model = joestar.nn.GraphSAGE(FEATURES, 4, 1, CLASSES)
    return joestar.compile(
        model, joestar.NeighborSampler(planted_graph(), [2], seed=1), F.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.1), backend="eager",
    )  # fmt: skip


@pytest.fixture
def another(tmp_path, monkeypatch):
    """A file that somebody else has locked: locks of one process through two files keep each other out, too."""
    monkeypatch.setattr(checkpoint, "TRAINING", 0.0)
    monkeypatch.setattr(checkpoint, "WRITING", 0.0)
    file = os.open(tmp_path / NAME, os.O_RDWR | os.O_CREAT)
    os.write(file, b"4321")
    fcntl.flock(file, fcntl.LOCK_EX)
    yield file
    os.close(file)


def test_a_run_beside_another_is_refused_before_it_begins(tmp_path, another):
    step, kept = made(), joestar.Checkpoints(tmp_path)
    weights = {name: value.clone() for name, value in step.model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"process 4321 writes checkpoints in .*two runs.*folder of its own"):
        step.fit(IDX, epochs=1, batch_size=20, checkpoints=kept)
    with pytest.raises(ConfigError, match="process 4321"):
        kept.save(step)
    assert not kept.paths() and kept.latest() is None
    assert all(torch.equal(value, weights[name]) for name, value in step.model.state_dict().items())
    fcntl.flock(another, fcntl.LOCK_UN)  # it has ended, and its file is still there
    step.fit(IDX, epochs=1, batch_size=20, checkpoints=kept)
    assert len(kept.paths()) == 1 and sorted(os.listdir(tmp_path)) == [kept.paths()[0].name]


def test_a_run_keeps_others_out_until_it_ends(tmp_path):
    """Its own process may write meanwhile, as in a callback."""
    step, kept, seen = made(), joestar.Checkpoints(tmp_path, keep=9), []

    def on_epoch(record):
        file = os.open(tmp_path / NAME, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen.append(int(Path(tmp_path / NAME).read_text()))
        os.close(file)
        joestar.Checkpoints(tmp_path, keep=9).save(step)

    step.fit(IDX, epochs=2, batch_size=20, checkpoints=kept, on_epoch=on_epoch)
    assert seen == [os.getpid()] * 2 and len(kept.paths()) == 4
    with pytest.raises(RuntimeError, match="of the callback"):
        step.fit(IDX, epochs=4, batch_size=20, checkpoints=kept, on_epoch=_failing)
    assert not (tmp_path / NAME).exists()


def _failing(record):
    raise RuntimeError("of the callback")


def test_a_process_that_is_killed_lets_others_in(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"in\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} writes"), occupied(tmp_path, 0.0):
            pass
        process.kill()
        process.wait()
    with occupied(tmp_path, 0.0), occupied(tmp_path, 0.0):
        assert (tmp_path / NAME).read_text() == str(os.getpid())


def test_where_files_cannot_be_locked_nobody_is_kept_out(tmp_path, monkeypatch):
    def unsupported(*given):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with occupied(tmp_path, 0.0):
        pass


def test_ctrl_c_at_any_line_lets_this_process_in_again(tmp_path):
    """It kept itself out from then on."""
    lines, interrupted, stop = [0], 0, [0]

    def traced(frame, event, arg):
        if frame.f_code.co_filename != occupied_module.__file__:
            return None
        lines[0] += event == "line"
        if event == "line" and lines[0] == stop[0]:
            signal.raise_signal(signal.SIGINT)
        return traced

    before = sys.gettrace()
    for stop[0] in range(1, 90):
        lines[0] = 0
        sys.settrace(traced)
        try:
            with occupied(tmp_path, 0.0):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        assert os.listdir(tmp_path) == [] and not occupied_module._HELD
        with occupied(tmp_path, 0.0):
            assert os.listdir(tmp_path) == [NAME]
    assert interrupted > 20 and lines[0] < 89
