"""``benchmarks/on_gpu.py``: stages end, fail and run out of time alone, and failing tests are named."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import typer

from joestar.cli import bench_commands

_SPEC = importlib.util.spec_from_file_location("on_gpu", Path(__file__).parents[2] / "benchmarks" / "on_gpu.py")
on_gpu = sys.modules["on_gpu"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(on_gpu)

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="0" tests="3">
<testcase classname="tests.gpu.test_a" name="test_x[float16]"><failure message="error 0.3&#10;more">text</failure>
</testcase><testcase classname="tests.gpu.test_a" name="test_y" />
<testcase classname="tests.gpu.test_b" name="test_z"><error message="setup">text</error></testcase>
</testsuite></testsuites>"""


def python(name: str, code: str, seconds: int = 60, **options):
    return on_gpu.Stage(name, seconds, [sys.executable, "-c", code], **options)


def test_outcomes(tmp_path):
    fine = on_gpu.run(python("fine", "print('a'); print('b')", summary=on_gpu.last_lines(1)), tmp_path)
    assert (fine.status, fine.lines) == ("ok", ["b"])
    broken = on_gpu.run(python("broken", "print('so far'); raise SystemExit(3)"), tmp_path)
    assert (broken.status, broken.lines) == ("failed", ["so far"])
    late = on_gpu.run(python("late", "import os, signal; os.fork(); signal.pause()", seconds=1), tmp_path)
    assert late.status == "timed out" and late.seconds < 30
    silent = on_gpu.run(python("silent", "", summary=lambda log: json.loads("")), tmp_path)
    assert silent.status == "failed" and "JSONDecodeError" in silent.lines[0]


def test_failing_tests_are_named(tmp_path):
    results = tmp_path / "tests.xml"
    results.write_text(JUNIT)
    outcome = on_gpu.run(python("tests", "raise SystemExit(1)", summary=on_gpu.read_tests(results)), tmp_path)
    assert outcome.status == "failed" and outcome.lines == [
        "FAILED tests/gpu/test_a.py::test_x[float16]: error 0.3", "FAILED tests/gpu/test_b.py::test_z: setup",
        "3 tests, 1 failures, 1 errors, 0 skipped",
    ]  # fmt: skip


@pytest.mark.parametrize("must_run", [False, True])
def test_skipped_tests_are_no_success_on_a_gpu(tmp_path, must_run):
    results = tmp_path / "tests.xml"
    results.write_text('<testsuites><testsuite errors="0" failures="0" skipped="2" tests="2" /></testsuites>')
    outcome = on_gpu.run(python("tests", "", summary=on_gpu.read_tests(results, must_run)), tmp_path)
    assert outcome.status == ("failed" if must_run else "ok") and "2 skipped" in outcome.lines[-1]


def test_failures_of_a_run_that_did_not_end(tmp_path):
    printed = "[gw0] [ 5%] FAILED tests/gpu/test_a.py::test_x[adamw, amsgrad] \n[gw1] [ 6%] PASSED tests/b.py::y"
    stage = python("tests", f"print({printed!r})", summary=on_gpu.read_tests(tmp_path / "none.xml"))
    outcome = on_gpu.run(stage, tmp_path)
    assert outcome.lines == [
        "FAILED tests/gpu/test_a.py::test_x[adamw, amsgrad]", "the run did not end; 1 failures until then"
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "good"), [(14_900, True), (15_100, False)])
def test_counts_per_hop(tmp_path, count, good):
    row = {"model": "sage", "how": "joestar", "step": {"median": 0.5}, "memory": 2**30, "first_step_seconds": 9.0,
           "launches": {"launches": 1.0}, "ids": "shuffled", "epochs": None,
           "counts": [1000, count, 120_000, 400_000]}  # fmt: skip
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"rows": [row], "absent": {"loader": "no row for the loader"}}))
    read = on_gpu.step_summary(file, on_gpu.COUNTS["products"])
    if good:
        assert read(file)[1:] == ["no row for the loader", f"nodes per hop 1,000 / {count:,} / 120,000"]
    else:
        with pytest.raises(on_gpu.CheckError, match="more than 2 %"):
            read(file)


def test_whole_epochs_have_a_line_of_their_own(tmp_path):
    epochs = {"ms_per_step": 0.6, "seconds": 0.12, "set_up_ms": 0.9, "one_step_ms": 1.5}
    row = {"model": "sage", "how": "eager", "ids": "planted", "step": {"median": 0.5}, "memory": 2**30,
           "first_step_seconds": 9.0, "launches": {}, "epochs": epochs}  # fmt: skip
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"rows": [row], "absent": {}}))
    first, second = on_gpu.step_summary(file, None)(file)
    assert "planted" in first and "1.00 x" in first
    assert "0.600 ms/step" in second and "set-up 0.900 ms" in second


def test_losses_must_agree(tmp_path):
    file = tmp_path / "losses.json"
    for value, status in ((1e-5, "ok"), (2e-3, "failed"), (float("nan"), "failed")):
        file.write_text(json.dumps({"largest_relative_difference": {"padded / cpu": value}}))
        assert on_gpu.run(python("losses", "", summary=on_gpu.losses_summary(file)), tmp_path).status == status


def test_without_a_gpu_nothing_is_started(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(on_gpu, "has_gpu", lambda: False)
    monkeypatch.setattr(on_gpu, "run_all", lambda *given: pytest.fail("it was"))
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "no GPU here" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_every_stage_has_a_name_of_its_own_and_runs_a_file_that_exists(tmp_path):
    options = on_gpu.argparse.Namespace(device="cuda", shape=None, batch_size=1000, steps=200, workers=6, loader=True,
                                        pytest_options="--rootdir {root}")  # fmt: skip
    stages, bench = on_gpu.stages(options, tmp_path, tmp_path / "copy"), typer.main.get_command(bench_commands.app)
    assert len({stage.name for stage in stages}) == len(stages) == 19
    for stage in stages:
        scripts = [word for word in stage.command if word.startswith("benchmarks/")]
        assert all((on_gpu.ROOT / script).exists() for script in scripts)
        if "bench" in stage.command:
            name, *flags = stage.command[stage.command.index("bench") + 1 :]
            bench.commands[name].make_context(name, flags)  # a flag that there is not would be an error
    (tests,) = [stage for stage in stages if stage.name == "tests"]
    assert f"{tmp_path / 'copy'}" in tests.command and tests.folder == tmp_path / "copy"
