"""Runs random programs in every way and compares: a pack is captured at once, then every program goes on alone.

The reference is a plain PyTorch loop (``plain.py``), or, where a mask is not known, exact execution without passes.
"""

import linecache
import os
import random
import sys
import traceback
import types
from dataclasses import dataclass, field, replace

import torch
from lowering.harness import Outcome, seeded
from torch import Tensor, fx

from joestar.errors import CaptureError, ConfigError, PaddingError
from joestar.fusion import PASSES
from joestar.lowering.capture import Captured
from joestar.profile.sizes import measure, step_key
from joestar.runtime.program import Options, Program
from joestar.runtime.seeds import filled

from . import plain, steps, tracing
from .generate import FLOAT32, PER_PACK, Written, seeds_of, write

TOLERANCE = 1e-9
ALL = tuple(spec.name for spec in PASSES)


@dataclass
class Subject:
    """A program that has been built: its parts as objects."""

    written: Written
    graph: object
    sampler: object
    model: torch.nn.Module
    loss: object

    sampler_file: str

    def value(self, blocks, x: Tensor, seeds: Tensor, graph=None) -> tuple[Tensor, Tensor]:
        """(loss, logits) as ``joestar.compile`` would trace them; ``graph``: instead of the program's own."""
        logits = self.model(blocks, x)
        targets = (graph or self.graph).ndata[self.written.target]
        value = self.loss(logits, torch.index_select(targets, 0, seeds))
        return value if value.dim() == 0 else value.mean(), logits


class Split(Program):
    """A program whose capture was made together with others."""

    def __init__(self, subject: Subject, captured: Captured, options: Options):
        super().__init__("train", subject.model, subject.sampler, subject.loss, options)
        self._made = captured

    def _run_passes(self, gm: fx.GraphModule, roles: list[tuple], texts: bool = False) -> None:
        super()._run_passes(gm, roles, texts=False)

    def _capture(self, seeds: Tensor, labels: list[str]) -> Captured:
        self._check_logits(self._made.gm, "Model")
        return self._made


@dataclass
class Report:
    """What became of some programs.

    Attributes:
        thorough: whether every execution is compared, else those that find most.
        programs: how many there were; rewrites: of every pass, in all of them; compared: executions compared with the
            reference; chosen: programs that ran under other choices as well; moving: programs with gradients.
        plain: programs whose reference is a plain PyTorch loop; impossible: programs that plain Python
            cannot run on this batch; autocast: programs under autocast; trained: programs
            that went through some steps of ``joestar.compile``; overflows: batches of theirs that did not fit.
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
    overflows: int = 0

    def count(self, program: Program) -> None:
        """Adds the rewrites of a program."""
        for record in program.passes:
            self.rewrites[record.name] += record.rewrites

    def fail(self, written: Written, found: list[str]) -> None:
        """Notes a program that differs, if it does."""
        if found:
            self.failed.append(written.number)
            self.wrong.append("\n".join([described(written), *found]))


# --- building -------------------------------------------------------------------------------------------------------


def build(programs: list[Written]) -> list[Subject]:
    """The programs of a pack as objects; graph and sampler are shared."""
    floats = torch.float32 if programs[0].autocast else torch.float64
    head = _module(f"fuzz_pack_{programs[0].number // PER_PACK}", programs[0].head, 0, {})
    lines = programs[0].head.count("\n")
    subjects = []
    for written in programs:
        shared = {name: value for name, value in vars(head).items() if not name.startswith("__")}
        body = written.body.replace('graph.ndata["y"] = ', "_ = ")  # the labels of the others
        module = _module(written.file.removesuffix(".py"), body, lines, shared)
        model = varied(seeded(module.Model().to(floats), written.number))
        subjects.append(Subject(written, head.graph, head.sampler, model, module.loss, head.__file__))
    return subjects


def varied(model: torch.nn.Module) -> torch.nn.Module:
    """Running statistics as if there had been steps before."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d) and module.running_mean is not None:
            columns = torch.linspace(0, 3, module.num_features)
            module.running_mean.copy_(columns.sin() / 2)
            module.running_var.copy_(1 + columns.cos() / 2)
    return model


def _module(name: str, source: str, skipped: int, names: dict) -> types.ModuleType:
    """A module of this source, behind so many lines, which messages can cite."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    file = module.__file__ = f"{name}.py"
    text = "\n" * skipped + source
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    sys.modules[name] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def forget(programs: list[Written]) -> None:
    """Removes the modules of a pack."""
    names = [written.file.removesuffix(".py") for written in programs]
    for name in (*names, f"fuzz_pack_{programs[0].number // PER_PACK}"):
        sys.modules.pop(name, None)
        linecache.cache.pop(f"{name}.py", None)


# --- executions -----------------------------------------------------------------------------------------------------


class Runs:
    """The executions of one program on one batch; buffers are put back after each."""

    def __init__(self, subject: Subject, seeds: Tensor):
        self.subject, self.seeds = subject, seeds
        self.key = step_key(0, 0, 0, "cpu")
        self.start = {name: value.clone() for name, value in subject.model.named_buffers()}

    def plain(self, autocast: torch.dtype | None = None) -> Outcome:
        """The user's program as written."""
        with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
            loss = plain.forward(self.subject, self.seeds, self.key)
        return self._outcome(loss)

    def exact(self, program: Program) -> Outcome:
        """The optimised graph with true sizes."""
        (loss,), _ = program.exact(self.seeds, self.key)
        return self._outcome(loss)

    def padded(self, program: Program, factor: float, extra: int) -> Outcome:
        """The optimised graph under bounds of ``factor * size + extra``."""
        sizes, _ = measure(program.sampler, program.graph, self.seeds, self.key)
        batch = int(factor * len(self.seeds)) + extra
        program.compile([int(factor * size) + extra for size in sizes], batch)
        count = torch.full((), len(self.seeds), dtype=torch.int64)
        flag = torch.zeros((), dtype=torch.bool)
        (loss,), counts, ok = program.step(filled(self.seeds, batch), count, self.key, flag)
        assert bool(ok), f"a batch that fits was called too large: counts {counts.tolist()}"
        return self._outcome(loss)

    def _outcome(self, loss: Tensor) -> Outcome:
        model = self.subject.model
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(self.start[name])
        return Outcome(loss.detach(), dict(zip(names, zeros, strict=True)), buffers)


class Tolerance:
    """What tensors may be off by under autocast: a few times what plain execution under autocast is off by in float64.

    Args:
        expected: of plain execution under autocast.
    """

    def __init__(self, subject: Subject, seeds: Tensor, expected: Outcome):
        written = replace(subject.written, head=subject.written.head.replace(FLOAT32, ""), autocast="")
        (twin,) = build([written])
        with torch.no_grad():
            for own, other in zip(twin.model.parameters(), subject.model.parameters(), strict=True):
                own.copy_(other)
        true, self.expected = Runs(twin, seeds).plain(), expected
        self.off = {}
        for kind, got, wanted in _groups(expected, true):
            self.off |= {(kind, name): _off(got[name], value) for name, value in wanted.items()}
        self.share = {"bfloat16": 0.1, "float16": 0.03}[subject.written.autocast]

    def __call__(self, kind: str, name: str, scale: float) -> float:
        """The largest difference that is none."""
        return 4 * self.off[kind, name] + self.share * scale


def _off(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max()) if reference.numel() else 0.0


def _groups(got: Outcome, expected: Outcome) -> list[tuple[str, dict, dict]]:
    return [("loss", {"": got.loss}, {"": expected.loss}), ("buffer", got.buffers, expected.buffers),
            ("gradient of", got.grads, expected.grads)]  # fmt: skip


def usual(kind: str, name: str, scale: float) -> float:
    """The largest difference that is none, in float64."""
    return TOLERANCE * scale


def differences(got: Outcome, expected: Outcome, tolerance=usual) -> list[str]:
    """Every tensor that is off by more than ``tolerance(kind, name, scale)``, with words.

    The scale of a tensor is its largest entry; of a gradient, not less than a thousandth of the largest of all: what
    cancels to nothing (a bias in front of a batch norm) has no scale of its own; of 16 bits, a tenth.
    """
    found = []
    largest = max((float(value.abs().max()) for value in expected.grads.values()), default=0.0)
    for kind, values, references in _groups(got, expected):
        floor = largest * (1e-3 if tolerance is usual else 0.1) if kind == "gradient of" else 0.0
        for name, reference in references.items():
            value = values[name]
            if not (torch.isfinite(reference).all() and torch.isfinite(value).all()):
                found.append(f"{kind} {name}: not finite")
                continue
            scale = max(float(reference.abs().max()) if reference.numel() else 0.0, floor, 1e-6)
            off = _off(value, reference)
            same = value.shape == reference.shape and value.dtype == reference.dtype
            if not same or off > tolerance(kind, name, scale):
                found.append(f"{kind} {name}: off by {off:.3g} at a scale of {scale:.3g}".replace(" :", ":"))
    return found


# --- the whole ------------------------------------------------------------------------------------------------------


def run_pack(pack: int, report: Report, backend: str = "eager", only: int | None = None, quick: bool = True) -> None:
    """Generates, captures, runs and compares the programs of a pack (or the one numbered ``only``).

    Args:
        quick: capture by ``tracing.traced``; what is refused or differs is captured once more in the real way.
    """
    programs = [write(pack * PER_PACK + position) for position in range(PER_PACK)]
    programs = [written for written in programs if only in (None, written.number)]
    subjects = build(programs)
    seeds = batch_of(subjects, pack)
    captures = _captures(subjects, seeds, quick)
    for subject, made in zip(subjects, captures, strict=True):
        report.programs += 1
        try:
            found = _checked(subject, made, seeds, report, backend, quick)
        except (CaptureError, PaddingError) as error:
            report.refused[subject.written.title] = str(error)
            found = [f"refused without its line: {error}"] if not _has_line(subject, error) else []
        except Exception as error:
            found = [_raised(error)]
        report.fail(subject.written, found)
    if backend == "eager":
        _train(subjects, captures, report)
    forget(programs)


def _train(subjects: list[Subject], captures: list[Captured | None], report: Report) -> None:
    """Some programs of a pack through whole training steps, two at a time: those that take the labels of the graph."""
    labelled = [
        (subject, made)
        for subject, made in zip(subjects, captures, strict=True)
        if made is not None and subject.written.target == "y" and not subject.written.autocast
        and subject.written.title not in report.refused and subject.written.number not in report.failed
    ]  # fmt: skip
    trainings = [steps.Training(subject, tracing.again(made), Split) for subject, made in labelled]
    for pair in _pairs(trainings if report.thorough else trainings[:2]):
        written = pair[0].subject.written
        try:
            found = steps.run_together(list(pair), report)
        except Exception as error:
            found = {written.number: ["trained: " + _raised(error)]}
        for training in pair:
            report.fail(training.subject.written, found.get(training.subject.written.number, []))


def _pairs(values: list) -> list[list]:
    return [values[i : i + 2] for i in range(0, len(values), 2)]


def _raised(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = ", ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return f"raised {type(error).__name__} at {places}: {error}"


def _has_line(subject: Subject, error: Exception) -> bool:
    return f"{subject.written.file}:" in str(error) or "joestar/nn/" in str(error)


def batch_of(subjects: list[Subject], pack: int) -> Tensor:
    """A batch, if possible one whose sets differ in size: then the masks of plain execution are known."""
    graph, key = subjects[0].graph, step_key(0, 0, 0, "cpu")
    for attempt in range(12):
        seeds = seeds_of(f"{pack} {attempt}", graph.num_nodes, graph.indices.dtype)
        if all(plain.tells_sets_apart(subject, seeds, key) for subject in subjects):
            break
    return seeds


def _captures(subjects: list[Subject], seeds: Tensor, quick: bool) -> list[Captured | None]:
    """A capture per program, ``None`` for those that cannot be captured so."""
    _, labels = measure(subjects[0].sampler, subjects[0].graph, seeds, step_key(0, 0, 0, "cpu"))
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
            found = check(subject, tracing.again(made), seeds, report, backend)
        except (CaptureError, PaddingError):
            found = ["refused"]
        if not found:
            return found
        made = None
    if made is None:
        _, labels = measure(subject.sampler, subject.graph, seeds, step_key(0, 0, 0, "cpu"))
        (made,) = tracing.captured([subject], seeds, labels, quick=False)
    return check(subject, tracing.again(made), seeds, report, backend)


def check(subject: Subject, captured: Captured, seeds: Tensor, report: Report, backend: str) -> list[str]:
    """Runs one program in all ways; returns what differed."""
    rng = random.Random(f"check {subject.written.number}")
    runs, found = Runs(subject, seeds), []
    program = Split(subject, captured, Options("eager", autocast=autocast_of(subject.written)))
    program.trace(seeds, runs.key)
    report.count(program)
    try:
        expected = runs.plain(program.options.autocast)
        report.plain += 1
    except (RuntimeError, ValueError) as error:  # a batch norm of one row, a maximum of nothing
        report.impossible += 1
        return _raises_as_well(runs, program, error)
    except plain.AmbiguousError:
        expected = runs.exact(program.variant(replace(program.options, disable_passes=ALL), texts=False))
    report.moving += any(bool(value.any()) for value in expected.grads.values())
    tolerance = Tolerance(subject, seeds, expected) if subject.written.autocast else usual
    report.autocast += bool(subject.written.autocast)

    def compare(how: str, got: Outcome) -> None:
        report.compared += 1
        found.extend(f"{how}: {what}" for what in differences(got, expected, tolerance))

    compiled = (
        program if backend == "eager" else program.variant(replace(program.options, backend=backend), texts=False)
    )
    compare("padded", runs.padded(compiled, *rng.choice(((1.0, 0), (1.5, 37), (1.0, 5), (2.0, 1)))))
    if backend != "eager":
        return found
    if report.thorough or rng.random() < 0.3:
        compare("exact", runs.exact(program))
    if report.thorough and rng.random() < 0.5:
        disabled = rng.choice((ALL, (rng.choice(ALL),)))
        other = program.variant(replace(program.options, disable_passes=disabled), texts=False)
        compare(f"exact without {disabled}", runs.exact(other))
    if program.sites and (report.thorough or subject.written.choices or rng.random() < 0.4):
        _check_choices(program, runs, report, rng, compare)
    return found


def _raises_as_well(runs: Runs, program: Program, error: Exception) -> list[str]:
    try:
        runs.exact(program)
    except type(error):
        return []
    return [f"exact: does not raise {type(error).__name__} as plain Python does: {error}"]


def autocast_of(written: Written) -> torch.dtype | None:
    """The dtype under which a program runs."""
    return getattr(torch, written.autocast) if written.autocast else None


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
        compare(f"exact with {choices}", runs.exact(other))
    if padded:
        compare(f"padded with {choices}", runs.padded(other, 1.5, 7))


def _possible(program: Program, wanted: dict[str, str], needed: dict) -> tuple[dict[str, str], Program]:
    """As many of the choices, in order, as go together (one can take away the place of another), and their program."""

    def under(choices: dict[str, str]) -> Program | str:
        try:
            return program.variant(replace(program.options, choices=choices), texts=False)
        except ConfigError as error:
            return str(error)

    choices = dict(wanted)
    while isinstance(other := under(choices), str):
        lost = next(key for key in choices if repr(key) in other)
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
    return (
        f"{written.title}; repeat with: PYTHONPATH=tests python -m fuzz {written.number}\n"
        f"--- {written.file}\n{written.source}---"
    )
