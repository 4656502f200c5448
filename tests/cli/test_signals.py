"""Ctrl-C and SIGTERM: a word, the exit code of shells, no traceback, and no work lost."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import joestar
from joestar.cli import train
from joestar.cli.main import app
from joestar.runtime.fit import Fit, Settings
from joestar.runtime.fit_records import History

CODES = {signal.SIGINT: (130, "Interrupted."), signal.SIGTERM: (143, "Terminated.")}
KILL = "import os, signal; os.kill(os.getpid(), signal.{})\n"


def run(code, *arguments, path=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("library", ["typer", "torch"])
def test_while_modules_are_imported(tmp_path, library, number):
    package = tmp_path / library
    package.mkdir()
    (package / "__init__.py").write_text(KILL.format(number.name) + "while True: pass")
    done = run("from joestar.cli.entry import main; main()", "doctor", path=str(tmp_path))
    assert (done.returncode, done.stderr.strip()) == CODES[number]


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_what_was_cut_off_does_not_complain_at_the_end(number):
    """Inductor's generators and hooks raise when the interpreter clears up behind an interrupt."""
    code = (
        "import atexit, sys, types; atexit.register(lambda: 1 / 0)\n"
        "from joestar.cli import main\n"
        "def run(*_):\n"
        "    print('compiling')\n"
        f"    {KILL.format(number.name)}"
        "    while True: pass\n"
        "sys.modules['joestar.cli.train'] = types.SimpleNamespace(run=run)\n"
        "from joestar.cli.entry import main; main()"
    )
    done = run(code, "train")
    assert (done.returncode, done.stderr.strip()) == CODES[number]
    assert done.stdout == "compiling\n", "what was printed before is not lost"


@pytest.mark.parametrize(
    ("of_all", "written", "said"),
    [
        (False, True, "The last state is in {}: the same command with --resume goes on from it."),
        (True, True, "The newest whole state, checkpoint-000000001.pt, is in {}: the same command with --resume goes"),
        (False, False, "There is no checkpoint in {} yet."),
        (True, False, "There is no checkpoint in {} yet."),
    ],
)
def test_what_there_is_to_go_on_from_is_said_as_it_is(tmp_path, of_all, written, said):
    """Ranks over partitions write none when they are stopped, and there may be none at all."""
    kept = joestar.Checkpoints(tmp_path)
    if written:
        (tmp_path / "checkpoint-000000001.pt").touch()
    assert train._kept(SimpleNamespace(state_of_all=of_all), kept, "here").startswith(said.format("here"))
    fit = SimpleNamespace(
        step=SimpleNamespace(state_of_all=of_all), settings=Settings(checkpoints=kept), losses=[], history=History()
    )
    words = Fit.told(fit, None)
    assert ("no checkpoint has been written yet" in words) == (of_all and not written)
    assert ("the newest whole checkpoint is " + str(tmp_path / "checkpoint-000000001.pt") in words) == (
        of_all and written
    )


@pytest.mark.fuzz
def test_training_keeps_its_best_and_its_last(tmp_path):
    best, report, kept = (str(tmp_path / name) for name in ("best.pt", "r.json", "kept"))
    flags = ["--epochs", "100000", "--fanouts", "5", "--hidden", "8", "--backend", "eager", "--execution", "exact"]
    flags += ["--device", "cpu", "--save", best, "--report", report, "--checkpoints", kept]
    code = "from joestar.cli.entry import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "train", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        shown = next(line for line in process.stdout if line.startswith("epoch 1/"))
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors.strip()) == CODES[signal.SIGTERM], errors
    assert "loss" in shown
    for said in (
        "Stopped after ",
        " of 100000 epochs",
        "Best so far: epoch ",
        f"Wrote {best}",
        f"Wrote {report}",
        kept,
    ):
        assert said in rest
    assert f"The last state is in {kept}: the same command with --resume goes on from it." in rest
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["results"]["interrupted"] and written["epochs"][0]["epoch"] == 1
    assert written["results"]["validation"] == max(record["validation"] for record in written["epochs"])
    facts = CliRunner().invoke(app, ["evaluate", best, "--nodes", "val", "--json", "--device", "cpu"]).stdout
    assert json.loads(facts)["scores"]["accuracy"] == pytest.approx(written["results"]["validation"], abs=0.01)
    assert list((tmp_path / "kept").glob("checkpoint-*.pt"))
