"""Runs random programs in every way and compares: a pack is captured at once, then every program goes on alone.

The reference is a plain PyTorch loop (``plain.py``), or, where a mask is not known, exact execution without passes.
"""

import os
import random
import traceback
from dataclasses import dataclass, field, replace

import autocast_dtypes
from lowering.harness import Outcome
from torch import Tensor
from where import DEVICE, here

from joestar.errors import CaptureError, ConfigError, PaddingError
from joestar.fusion import PASSES
from joestar.lowering.capture import Captured
from joestar.profile.sizes import measure, step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from . import plain, steps, tracing
from .generate import PER_PACK, Written, seeds_of, write
from .runs import Runs, Tolerance, autocast_of, differences, exchanged, of_sixths, usual
from .settings import SETTINGS, setting_of
from .strangers import Strangers
from .subjects import Split, Subject, build, forget

ALL = tuple(spec.name for spec in PASSES)
OF_UNIONS = {"trim"}
"""Passes over unions of hops, which programs over blocks have not: random ones are in ``pyg/test_trim.py``."""
ONE_ROW = ("more than 1 value per channel", "more than 1 spatial element")
"""What PyTorch's batch and instance norms say of one row, which Joestar normalises by its own mean."""


@dataclass
class Report:
    """What became of some programs.

    Attributes:
        thorough: whether every execution is compared, else those that find most.
        programs: how many there were; rewrites: of every pass, in all of them; compared: executions compared with the
            reference; chosen: programs that ran under other choices as well; moving: programs with gradients.
        plain: programs whose reference is a plain PyTorch loop; impossible: programs that plain Python
            cannot run on this batch; autocast: programs under autocast; trained: programs
            that went through some steps of ``joestar.compile``; narrow: those of them under autocast; overflows:
            batches of theirs that did not fit; strange: programs whose data outside of the batch were NaN.
        refused: title -> message; wrong: programs that differ, with their source; failed: their numbers.
    """

    thorough: bool = False
    programs: int = 0
    rewrites: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALL, 0))
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    chosen: int = 0
    compared: int = 0
    moving: int = 0
    plain: int = 0
    autocast: int = 0
    impossible: int = 0
    trained: int = 0
    narrow: int = 0
    overflows: int = 0
    strange: int = 0

    def count(self, program: Program) -> None:
        """Adds the rewrites of a program."""
        for record in program.passes:
            self.rewrites[record.name] += record.rewrites

    def fail(self, written: Written, found: list[str]) -> None:
        """Notes a program that differs, if it does."""
        if found:
            self.failed.append(written.number)
            self.wrong.append("\n".join([described(written), *found]))


def run_pack(pack: int, report: Report, backend: str = "eager", only: int | None = None, quick: bool = True) -> None:
    """Generates, captures, runs and compares the programs of a pack (or the one numbered ``only``).

    Args:
        quick: capture by ``tracing.traced``; what is refused or differs is captured once more in the real way.
    """
    programs = [write(pack * PER_PACK + position) for position in range(PER_PACK)]
    programs = [written for written in programs if only in (None, written.number)]
    with here(), SETTINGS[setting_of(pack)]():
        _run(programs, pack, report, backend, quick)
    forget(programs)


def _run(programs: list[Written], pack: int, report: Report, backend: str, quick: bool) -> None:
    subjects = build(programs)
    seeds = batch_of(subjects, pack)
    captures = _captures(subjects, seeds, quick)
    for subject, made in zip(subjects, captures, strict=True):
        _judge(subject, made, seeds, report, backend, quick)
    if backend == "eager" and DEVICE.type == "cpu":
        _train(subjects, captures, report)


def _judge(subject: Subject, made: Captured | None, seeds: Tensor, report: Report, backend: str, quick: bool) -> None:
    report.programs += 1
    try:
        found = _checked(subject, made, seeds, report, backend, quick)
    except (CaptureError, PaddingError) as error:
        report.refused[subject.written.title] = str(error)
        named = f"{subject.written.file}:" in str(error) or "joestar/nn/" in str(error)
        found = [] if named else [f"refused without its line: {error}"]
    except Exception as error:
        found = [_raised(error)]
    report.fail(subject.written, found)


def _train(subjects: list[Subject], captures: list[Captured | None], report: Report) -> None:
    """Some programs of a pack through whole training steps, two at a time: those that take the labels of the graph."""
    labelled = [
        (subject, made)
        for subject, made in zip(subjects, captures, strict=True)
        if made is not None and subject.written.target == "y"
        and subject.written.title not in report.refused and subject.written.number not in report.failed
    ]  # fmt: skip
    trainings = [steps.Training(subject, made, Split) for subject, made in labelled]
    for pair in _pairs(trainings if report.thorough else trainings[:2]):
        try:
            found = steps.run_together(list(pair), report)
        except steps.RaisedError as error:
            found = {error.number: ["trained: " + _raised(error.__cause__)]}
        except Exception as error:
            found = {pair[0].subject.written.number: ["trained: " + _raised(error)]}
        for training in pair:
            report.fail(training.subject.written, found.get(training.subject.written.number, []))


def _pairs(values: list) -> list[list]:
    return [values[i : i + 2] for i in range(0, len(values), 2)]


def _raised(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = ", ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return f"raised {type(error).__name__} at {places}: {error}"


def batch_of(subjects: list[Subject], pack: int) -> Tensor:
    """A batch, if possible one whose sets differ in size: then the masks of plain execution are known."""
    graph, key = subjects[0].graph, step_key(0, 0, 0, DEVICE)
    for attempt in range(12):
        seeds = seeds_of(f"{pack} {attempt}", graph.num_nodes, graph.indices.dtype)
        if all(plain.tells_sets_apart(subject, seeds, key) for subject in subjects):
            break
    return seeds


def _captures(subjects: list[Subject], seeds: Tensor, quick: bool) -> list[Captured | None]:
    """A capture per program, ``None`` for those that cannot be captured so."""
    _, labels = measure(subjects[0].sampler, subjects[0].graph, seeds, step_key(0, 0, 0, DEVICE))
    try:
        return tracing.captured(subjects, seeds, labels, quick)
    except Exception as error:
        if not quick and not isinstance(error, CaptureError):
            raise
        if not quick or len(subjects) == 1:
            return [None] * len(subjects)
        return [made for subject in subjects for made in _captures([subject], seeds, quick)]


def _checked(subject: Subject, made: Captured | None, seeds: Tensor, report: Report, backend: str, quick: bool) -> list:
    """``check`` of one program, behind a capture of its own if there is none, or if the quick one is not enough."""
    if made is not None and quick:
        try:
            found = check(subject, made, seeds, report, backend)
        except (CaptureError, PaddingError):
            found = ["refused"]
        if not found:
            return found
        made = None
    if made is None:
        _, labels = measure(subject.sampler, subject.graph, seeds, step_key(0, 0, 0, DEVICE))
        (made,) = tracing.captured([subject], seeds, labels, quick=False)
    return check(subject, made, seeds, report, backend)


def check(subject: Subject, captured: Captured, seeds: Tensor, report: Report, backend: str) -> list[str]:
    """Runs one program in all ways; returns what differed.

    What is not in the batch holds NaN meanwhile, unless plain execution reads it.
    """
    runs = Runs(subject, seeds)
    with Strangers(subject, seeds, runs.key) as strangers:
        try:
            found = runs.plain()
            if all(value.isfinite().all() for value in (found.loss, *found.grads.values(), *found.buffers.values())):
                report.strange += 1
            else:
                strangers.restore()
        except Exception:  # so says the reference below
            strangers.restore()
        return _compared(subject, captured, runs, report, backend)


def _compared(subject: Subject, captured: Captured, runs: Runs, report: Report, backend: str) -> list[str]:
    seeds, rng, found = runs.seeds, random.Random(f"check {subject.written.number}"), []
    program = Split(subject, captured, Options("eager", autocast=autocast_of(subject.written)))
    with autocast_dtypes.checked() as narrowed:
        program.trace(seeds, runs.key)
    found += narrowed
    report.count(program)
    bare = replace(program.options, disable_passes=ALL)
    try:
        expected = runs.plain(program.options.autocast)
        report.plain += 1
    except (RuntimeError, ValueError) as error:
        report.impossible += 1
        if not any(words in str(error) for words in ONE_ROW):
            return _raises_as_well(runs, program, error)
        expected = runs.exact(program.variant(bare, texts=False))
    except plain.AmbiguousError:
        expected = runs.exact(program.variant(bare, texts=False))
    report.moving += any(bool(value.any()) for value in expected.grads.values())
    try:
        blunt = ("hardsigmoid",) if DEVICE.type == "cpu" else ("hardsigmoid", "hardswish")
        exact = of_sixths if any(name in subject.written.body.lower() for name in blunt) else usual
        tolerance = Tolerance(subject, seeds, expected) if subject.written.autocast else exact
    except (plain.AmbiguousError, ValueError) as error:  # nothing says how far autocast may be off
        if isinstance(error, ValueError) and not any(words in str(error) for words in ONE_ROW):
            raise
        report.impossible += 1
        return []
    report.autocast += bool(subject.written.autocast)

    def compare(how: str, ran: Program, got: Outcome) -> None:
        report.compared += 1
        moved = exchanged(ran, subject.model)
        off = differences(got, expected, tolerance, moved)
        if off and isinstance(tolerance, Tolerance) and tolerance.move():
            off = differences(got, expected, tolerance, moved)
        found.extend(f"{how}: {what}" for what in off)

    compiled = (
        program if backend == "eager" else program.variant(replace(program.options, backend=backend), texts=False)
    )
    compare("padded", compiled, runs.padded(compiled, *rng.choice(((1.0, 0), (1.5, 37), (1.0, 5), (2.0, 1)))))
    if backend != "eager":
        return found
    if report.thorough or rng.random() < 0.3:
        compare("exact", program, runs.exact(program))
    if report.thorough and rng.random() < 0.5:
        disabled = rng.choice((ALL, (rng.choice(ALL),)))
        other = program.variant(replace(program.options, disable_passes=disabled), texts=False)
        compare(f"exact without {disabled}", other, runs.exact(other))
    if program.sites and (report.thorough or subject.written.choices or rng.random() < 0.2):
        _check_choices(program, runs, report, rng, compare)
    return found


def _raises_as_well(runs: Runs, program: Program, error: Exception) -> list[str]:
    try:
        runs.exact(program)
    except type(error):
        return []
    return [f"exact: does not raise {type(error).__name__} as plain Python does: {error}"]


def _check_choices(program: Program, runs: Runs, report: Report, rng: random.Random, compare) -> None:
    """Takes other options at the places that offer some: all others in a steered program, else random ones.

    What a pass needs to fire goes first, so that no other choice takes away its place.
    """
    known, choices, other, needed = set(), {}, program, runs.subject.written.choices
    while new := [site for site in other.sites if site.key not in known]:  # a choice can open another
        wanted = {}
        for site in new:
            others = [option for option in site.options if option != site.default]
            taken = rng.choice(others if runs.subject.written.steered else site.options)
            wanted[site.key] = needed.get(site.kind, taken)
        known |= wanted.keys()
        every = [*choices.items(), *rng.sample(list(wanted.items()), len(wanted))]
        every.sort(key=lambda choice: choice[0].partition(":")[0] not in needed)
        choices, other = _possible(program, dict(every), needed)
    report.chosen += 1
    report.count(other)
    padded = rng.random() < 0.5
    if report.thorough or not padded:
        compare(f"exact with {choices}", other, runs.exact(other))
    if padded:
        compare(f"padded with {choices}", other, runs.padded(other, 1.5, 7))


def _possible(program: Program, wanted: dict[str, str], needed: dict) -> tuple[dict[str, str], Program]:
    """As many of the choices, in order, as go together (one can take away the place of another), and their program."""

    def under(choices: dict[str, str]) -> Program | str:
        try:
            with autocast_dtypes.checked() as narrowed:
                other = program.variant(replace(program.options, choices=choices), texts=False)
            assert not narrowed, narrowed
            return other
        except ConfigError as error:
            return str(error)

    choices = dict(wanted)
    while isinstance(other := under(choices), str):
        lost = next(key for key in choices if repr(key) in other or f"choice {key}: " in other)  # no place, no option
        if lost.partition(":")[0] in needed:  # another choice has to go
            break
        del choices[lost]
    else:
        return choices, other
    other, choices = program, {}
    for key, option in wanted.items():
        more = under({**choices, key: option})
        if not isinstance(more, str):
            other, choices = more, {**choices, key: option}
    return choices, other


def described(written: Written) -> str:
    """Number, how to repeat it, source."""
    setting = setting_of(written.number // PER_PACK)
    return (
        f"{written.title}{setting and f' ({setting})'}; repeat with: PYTHONPATH=tests python -m fuzz {written.number}\n"
        f"--- {written.file}\n{written.source}---"
    )
