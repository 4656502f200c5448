"""What the fuzzer compares with can tell right from wrong, and its quick traces are captures."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowering.harness import Outcome
from torch import nn

from joestar.profile.sizes import measure, step_key

from . import __main__ as command_line
from . import execute, plain, settings, steps, tracing, workers
from .execute import Report, batch_of, check
from .generate import PER_PACK, PER_SHARD, write
from .runs import Runs, differences
from .subjects import Split, build, forget
from .test_fuzz import QUICK

PACK = 32
"""Its programs have dropout, and labels that steps can be trained with."""
KEY = step_key(0, 0, 0, "cpu")


@pytest.fixture(scope="module")
def pack():
    """(programs as objects, a batch, captures)."""
    programs = [write(PACK * PER_PACK + position) for position in range(PER_PACK)]
    subjects = build(programs)
    seeds = batch_of(subjects, PACK)
    _, labels = measure(subjects[0].sampler, subjects[0].graph, seeds, KEY)
    yield subjects, seeds, tracing.captured(subjects, seeds, labels, quick=True)
    forget(programs)


def test_masks_of_other_sites_differ(pack, monkeypatch):
    subjects, seeds, _ = pack
    drops = [subject for subject in subjects if "ropout(" in subject.written.body]
    assert drops
    started, sites = plain.Masks.__enter__, 0

    def later(masks):
        masks.site += sites
        return started(masks)

    same = {subject.written.number: (subject, Runs(subject, seeds).plain()) for subject in drops}
    monkeypatch.setattr(plain.Masks, "__enter__", later)
    for sites in range(1, 6):  # noqa: B007 (a mask of few entries may be another's by chance)
        same = {n: (subject, y) for n, (subject, y) in same.items() if not differences(Runs(subject, seeds).plain(), y)}
    assert not same


def test_what_is_not_finite_is_so_in_both():
    """A standard deviation of one row is NaN in plain PyTorch; NaN for infinity, or elsewhere, is a difference."""

    def outcome(*numbers):
        return Outcome(torch.tensor(1.0), {"weight": torch.tensor(numbers)}, {})

    expected = outcome(torch.nan, torch.inf, 1.0)
    assert not differences(outcome(torch.nan, torch.inf, 1.0), expected)
    for wrong in (torch.nan, torch.inf, 2.0), (torch.nan, -torch.inf, 1.0), (torch.inf, torch.inf, 1.0), (0.0,):
        assert differences(outcome(*wrong), expected)
    assert differences(outcome(torch.nan, torch.inf, torch.nan), expected)
    assert differences(outcome(1.0, 2.0, 1.0), expected)


def test_a_weight_whose_product_moved_may_lose_the_nan_of_rows_without_edges():
    """Program 2220: a variance of the only row of a batch, which has no edges, is NaN, and so is the loss."""
    report = Report(thorough=True)
    execute.run_pack(2220 // PER_PACK, report, only=2220)
    assert report.compared > 2 and report.chosen and not report.wrong


def test_what_moved_is_compared_where_the_loss_is_nan_as_well():
    def outcome(loss: float, *numbers):
        return Outcome(torch.tensor(loss), {"weight": torch.tensor(numbers), "other": torch.tensor(1.0)}, {})

    lost, expected, moved = outcome(torch.nan, 0.0, 1.0), outcome(torch.nan, torch.nan, 1.0), {"weight"}
    assert not differences(lost, expected, exchanged=moved) and not differences(expected, lost, exchanged=moved)
    assert differences(lost, expected) and differences(lost, expected, exchanged={"other"})
    assert differences(outcome(0.0, 0.0, 1.0), expected, exchanged=moved)
    assert differences(outcome(0.0, 0.0, 1.0), outcome(0.0, torch.nan, 1.0), exchanged=moved)
    assert differences(outcome(torch.nan, 0.0, 2.0), expected, exchanged=moved)


def test_sets_of_one_size_are_told_apart_or_refused(pack):
    subjects, seeds, _ = pack
    blocks = subjects[0].sampler.sample(subjects[0].graph.keyed(), seeds)
    x = torch.ones(len(seeds), 40)
    assert plain.Masks(KEY, blocks, seeds).dropout(x).unique().tolist() == [0, 2]
    masks = plain.Masks(KEY, blocks, seeds, [len(seeds)])  # as many rows that are 0, 1, 2 ...
    assert not masks.clear
    with pytest.raises(plain.AmbiguousError):
        masks.dropout(x)


def test_a_step_that_goes_wrong_is_found(pack, monkeypatch):
    subjects, _, captures = pack
    able = [(s, made) for s, made in zip(subjects, captures, strict=True) if s.written.target == "y"][:2]

    def trained() -> list[list[str]]:
        pair = [steps.Training(subject, made, Split) for subject, made in able]
        return list(steps.run_together(pair, Report()).values())

    found = trained()
    assert found and not any(found)
    right = steps.Training.optimizer

    def hasty(training, fused=None):
        optimizer = right(training, fused)
        optimizer.param_groups[0]["lr"] *= 1 if fused is False else 1.001
        return optimizer

    monkeypatch.setattr(steps.Training, "optimizer", hasty)
    assert all(trained())


def test_a_step_that_raises_is_told_of_its_program(pack, monkeypatch):
    subjects, _, captures = pack
    able = [subject for subject in subjects if subject.written.target == "y" and not subject.written.autocast]
    right, report, (_, second) = steps.Training.compiled, Report(), able[:2]

    def compiled(training, nodes, batch):
        def raising():
            yield from ()
            raise ValueError("no step")

        return raising() if training.subject is second else right(training, nodes, batch)

    monkeypatch.setattr(steps.Training, "compiled", compiled)
    execute._train(subjects, captures, report)
    assert report.failed == [second.written.number] and "ValueError" in report.wrong[0] and "no step" in report.wrong[0]


def test_a_wrong_execution_is_reported(pack, monkeypatch):
    subjects, seeds, captures = pack
    right, report, written = Runs.padded, Report(), subjects[1].written

    def padded(runs, *options):
        outcome = right(runs, *options)
        outcome.grads = {name: value * 1.0001 for name, value in outcome.grads.items()}
        return outcome

    monkeypatch.setattr(Runs, "padded", padded)
    found = check(subjects[1], captures[1], seeds, report, "eager")
    assert found and all(words.startswith("padded") and "gradient of" in words for words in found)
    report.fail(written, found)
    assert report.failed == [written.number]
    assert f"python -m fuzz {written.number}" in report.wrong[0] and "class Model" in report.wrong[0]


def test_programs_run_under_settings_of_the_process(monkeypatch):
    """Each of them among those of ``make test``, and put back afterwards."""
    packs = range(QUICK * PER_SHARD // PER_PACK)
    assert {settings.setting_of(pack) for pack in packs} == settings.SETTINGS.keys()
    seen = []
    monkeypatch.setattr(execute, "_run", lambda *given: seen.append(torch.get_default_dtype()))
    pack = next(pack for pack in packs if settings.setting_of(pack) == "default dtype bfloat16")
    execute.run_pack(pack, Report())
    assert seen == [torch.bfloat16] and torch.get_default_dtype() == torch.float32
    assert "(default dtype bfloat16); repeat with" in execute.described(write(pack * PER_PACK))


@pytest.mark.fuzz
def test_quick_traces_are_captures(pack):
    subjects, seeds, quick = pack
    real = tracing.captured(subjects, seeds, list(quick[0].labels), quick=False)
    for one, other in zip(quick, real, strict=True):
        ops = [
            sorted(str(node.target) for node in made.gm.graph.nodes if node.op == "call_function")
            for made in (one, other)
        ]
        assert ops[0] == ops[1]
        assert {role.held or role.kind for role in one.roles} >= {role.held or role.kind for role in other.roles}


def test_a_size_in_python_is_no_quick_trace(pack):
    subjects, seeds, quick = pack

    class Fixed(nn.Module):
        def forward(self, blocks, x):
            return x[: int(blocks[-1].num_dst)][:, :1]

    subject = replace(subjects[0], model=Fixed())
    with pytest.raises(Exception, match=r"holds only for some sizes|one row per"):
        tracing.captured([subject], seeds, list(quick[0].labels), quick=True)


def test_the_command_line(monkeypatch, capsys):
    def run_pack(pack, report):
        report.programs += PER_PACK
        report.fail(write(pack * PER_PACK + 1), ["padded: loss: off"] if pack == 8 else [])

    monkeypatch.setattr(workers, "run_pack", run_pack)
    assert command_line.main(["--range", "30", "40"]) == 0
    assert "'programs': 10" in (out := capsys.readouterr().out) and "every execution of every program agrees" in out
    assert command_line.main(["--range", "30", "50"]) == 1
    assert "failed: [41]" in (out := capsys.readouterr().out) and "padded: loss: off" in out
    with pytest.raises(SystemExit):
        command_line.main([])


@pytest.mark.fuzz
def test_several_processes():
    """What they run has to be found by processes whose ``__main__`` is another."""
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "fuzz", "--range", "30", "40", "--workers", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "'programs': 10" in done.stdout, done.stderr[-2000:]
