"""Ctrl-C while modules are imported: they are imported to their end first, then it acts."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from joestar.runtime.interrupts import WholeImports

PATIENCE = 20
INTERRUPTS = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(1000): pass\n"
MODULES = {
    "imports_first_part": "VALUE = 1\n",
    "imports_whole": f"{INTERRUPTS}import imports_first_part\n{INTERRUPTS}VALUE = imports_first_part.VALUE + 1\n",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that are interrupted while they are imported."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def wait() -> None:
    """For an interrupt; an error if none comes."""
    threading.Event().wait(PATIENCE)


def test_a_module_is_imported_to_its_end(modules):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with WholeImports():
            import imports_whole

            found = imports_whole.VALUE
        wait()
    assert found == 2 and signal.getsignal(signal.SIGINT) is handler


def test_without_it_the_import_is_broken_off(modules):
    """What the test above tests."""
    with pytest.raises(KeyboardInterrupt):
        import imports_whole  # noqa: F401
    assert "imports_whole" not in sys.modules


@WholeImports()
def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    wait()


def test_elsewhere_it_acts_at_once(tmp_path, monkeypatch):
    """Also where the whole program is a module that is being imported."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(signal.SIGINT) is handler
    (tmp_path / "imports_program.py").write_text(f"import {__name__} as here\nhere.interrupted()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        __import__("imports_program")
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_of_the_programs_own_is_called(modules):
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        with WholeImports(), WholeImports():
            import imports_whole

            os.kill(os.getpid(), signal.SIGINT)
        assert imports_whole.VALUE == 2 and called == [signal.SIGINT]
        for _ in range(PATIENCE * 20):
            if len(called) > 1:
                break
            threading.Event().wait(0.05)
        assert len(called) == 2, "those that came while it was imported are one"
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_and_ignored_signals_are_left_alone():
    def enter() -> None:
        with WholeImports():
            found.append(signal.getsignal(signal.SIGINT))

    found, before = [], signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        enter()
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert found == [before, signal.SIG_IGN]


def test_one_that_was_left_behind_is_healed():
    """By Ctrl-C between the handler's change and the end of entering."""
    handler = signal.getsignal(signal.SIGINT)

    def enter() -> None:
        WholeImports().__enter__()

    enter()
    assert signal.getsignal(signal.SIGINT) is not handler
    with WholeImports():
        assert signal.getsignal(signal.SIGINT).before is handler
    assert signal.getsignal(signal.SIGINT) is handler


SCRIPT = """
import os, signal, sys
import torch, torch.nn.functional as F
import joestar
target = sys.argv[1]
class Finder:
    done = False
    def find_spec(self, name, path=None, found=None):
        if name == target and not Finder.done:
            Finder.done = True
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000): pass
graph = joestar.load("cora")
net = joestar.nn.GraphSAGE(1433, 8, 2, 7)
adam = torch.optim.Adam(net.parameters(), 1e-2)
step = joestar.compile(net, joestar.NeighborSampler(graph, [3, 3]), F.cross_entropy, adam)
sys.meta_path.insert(0, Finder())
try:
    list(step.epoch(graph.train_idx, 70))
except KeyboardInterrupt:
    print("interrupted")
print(Finder.done, len(list(step.epoch(graph.train_idx, 70))))
"""


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "module", ["networkx.algorithms.wiener", "torch._inductor.quantized_lowerings", "torch._inductor.jagged_lowerings"]
)
def test_a_first_step_that_was_interrupted_works_when_it_is_made_again(module, tmp_path):
    """These modules, half imported, made every later use fail; caches are empty."""
    environment = {**os.environ, "JOESTAR_CACHE": str(tmp_path / "a"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "b")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module], env=environment, capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2], timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["interrupted", "True", "2"], done.stdout + done.stderr[-2000:]
