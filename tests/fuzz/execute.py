"""Runs random programs in every way and compares: a pack is captured at once, then every program goes on alone."""

import copy
import linecache
import random
import sys
import types
from dataclasses import dataclass, field, replace

import torch
from lowering.harness import Outcome, seeded
from torch import Tensor, fx

from joestar.errors import CaptureError, ConfigError, PaddingError
from joestar.fusion import PASSES
from joestar.graph_api import SamplingContext, check_blocks
from joestar.lowering.capture import Captured, capture
from joestar.lowering.functional import is_in_place
from joestar.lowering.verify import verify_capture
from joestar.profile.sizes import measure, step_key
from joestar.runtime.program import Options, Program
from joestar.runtime.seeds import filled

from .generate import PER_PACK, Written, seeds_of, write

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

    def value(self, blocks, x: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, logits) as ``joestar.compile`` would trace them."""
        logits = self.model(blocks, x)
        value = self.loss(logits, torch.index_select(self.graph.ndata[self.written.target], 0, seeds))
        return value if value.dim() == 0 else value.mean(), logits


class Split(Program):
    """A program whose capture was made together with others."""

    def __init__(self, subject: Subject, captured: Captured, options: Options):
        super().__init__("train", subject.model, subject.sampler, subject.loss, options)
        self._made = captured

    def _run_passes(self, gm: fx.GraphModule, roles: list[tuple], texts: bool = False) -> None:
        super()._run_passes(gm, roles, texts)

    def _capture(self, seeds: Tensor, labels: list[str]) -> Captured:
        self._check_logits(self._made.gm, "Model")
        return self._made


@dataclass
class Report:
    """What became of some programs.

    Attributes:
        programs: how many there were; rewrites: of every pass, in all of them; compared: executions compared with the
            reference; chosen: programs that ran under other choices as well; moving: programs with gradients.
        refused: title -> message; wrong: programs that differ, with their source.
    """

    programs: int = 0
    rewrites: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALL, 0))
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    chosen: int = 0
    compared: int = 0
    moving: int = 0

    def count(self, program: Program) -> None:
        """Adds the rewrites of a program."""
        for record in program.passes:
            self.rewrites[record.name] += record.rewrites


# --- building -------------------------------------------------------------------------------------------------------


def build(programs: list[Written]) -> list[Subject]:
    """The programs of a pack as objects; graph and sampler are shared."""
    head = _module(f"fuzz_pack_{programs[0].number // PER_PACK}", programs[0].head, 0, {})
    lines = programs[0].head.count("\n")
    subjects = []
    for written in programs:
        shared = {name: value for name, value in vars(head).items() if not name.startswith("__")}
        body = written.body.replace('graph.ndata["y"] = ', "_ = ")  # the labels of the others
        module = _module(written.file.removesuffix(".py"), body, lines, shared)
        model = seeded(module.Model().double(), written.number)
        subjects.append(Subject(written, head.graph, head.sampler, model, module.loss))
    return subjects


def _module(name: str, source: str, skipped: int, names: dict) -> types.ModuleType:
    """A module of this source, behind so many lines, which messages can cite."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    file = f"{name}.py"
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


# --- capture --------------------------------------------------------------------------------------------------------


def captured_alone(subjects: list[Subject], seeds: Tensor, key: Tensor) -> list[Captured]:
    """One capture of all programs, cut into one graph each, which holds nothing of the others."""
    graph, sampler = subjects[0].graph, subjects[0].sampler
    features = graph.ndata["x"]
    _, labels = measure(sampler, graph, seeds, key)

    def program(seeds, key, carriers):
        context = SamplingContext(key, [carrier.shape[0] for carrier in carriers])
        blocks = sampler.sample(graph.with_context(context), seeds)
        check_blocks(blocks, "Sampler")
        x = torch.index_select(features, 0, blocks[0].srcs)
        results = []
        for subject in subjects:
            results.extend(subject.value(blocks, x, seeds))
        return tuple(results)

    for subject in subjects:
        subject.model.train()
    whole = capture(program, seeds, labels, origin="Model with Sampler")
    verify_capture(whole.gm, "Model with Sampler")
    if len(subjects) == 1:
        return [whole]
    return [_part(whole, subject, position) for position, subject in enumerate(subjects)]


def _part(whole: Captured, subject: Subject, position: int) -> Captured:
    graph = copy.deepcopy(whole.gm.graph)
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][2 * position : 2 * position + 2]),)
    buffers = {id(value) for value in subject.model.buffers()}
    placeholders = graph.find_nodes(op="placeholder")
    own = {node for node, role in zip(placeholders, whole.roles, strict=True) if id(role[-1]) in buffers}

    def stays(node: fx.Node) -> bool:
        writes = is_in_place(node) and bool(own & set(node.all_input_nodes))
        draws = node.is_impure() and not is_in_place(node) and subject.written.file in node.meta.get("stack_trace", "")
        return node.op in ("placeholder", "output") or writes or draws

    graph.eliminate_dead_code(is_impure_node=stays)
    return Captured(fx.GraphModule(whole.gm, graph), list(whole.roles), list(whole.labels))


# --- executions -----------------------------------------------------------------------------------------------------


class Runs:
    """The executions of one program on one batch; buffers are put back after each."""

    def __init__(self, subject: Subject, seeds: Tensor):
        self.subject, self.seeds = subject, seeds
        self.key = step_key(0, 0, 0, "cpu")
        self.start = {name: value.clone() for name, value in subject.model.named_buffers()}

    def plain(self) -> Outcome:
        """The user's program as written."""
        subject = self.subject
        blocks = subject.sampler.sample(subject.graph.keyed(0, 0, 0), self.seeds)
        x = torch.index_select(subject.graph.ndata["x"], 0, blocks[0].srcs)
        subject.model.train()
        return self._outcome(subject.value(blocks, x, self.seeds)[0])

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


def differences(got: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> list[str]:
    """Every tensor that is off by more than ``tolerance`` times its scale, with words.

    The scale of a tensor is its largest entry; of a gradient, not less than a thousandth of the largest of all: what
    cancels to nothing (a bias in front of a batch norm) has no scale of its own.
    """
    found = []
    largest = max((float(value.abs().max()) for value in expected.grads.values()), default=0.0)
    groups = [("loss", {"": got.loss}, {"": expected.loss}, 0.0), ("buffer", got.buffers, expected.buffers, 0.0),
              ("gradient of", got.grads, expected.grads, largest * 1e-3)]  # fmt: skip
    for kind, values, references, floor in groups:
        for name, reference in references.items():
            value = values[name]
            if not (torch.isfinite(reference).all() and torch.isfinite(value).all()):
                found.append(f"{kind} {name}: not finite")
                continue
            scale = max(float(reference.abs().max()) if reference.numel() else 0.0, floor, 1e-6)
            off = float((value - reference).abs().max()) if reference.numel() else 0.0
            if value.shape != reference.shape or value.dtype != reference.dtype or off > tolerance * scale:
                found.append(f"{kind} {name}: off by {off:.3g} at a scale of {scale:.3g}".replace(" :", ":"))
    return found


# --- the whole ------------------------------------------------------------------------------------------------------


def run_pack(pack: int, report: Report, backend: str = "eager", only: int | None = None) -> None:
    """Generates, captures, runs and compares the programs of a pack (or the one numbered ``only``)."""
    programs = [write(pack * PER_PACK + position) for position in range(PER_PACK)]
    programs = [written for written in programs if only in (None, written.number)]
    subjects = build(programs)
    seeds = seeds_of(pack, subjects[0].graph.num_nodes, subjects[0].graph.indices.dtype)
    key = step_key(0, 0, 0, "cpu")
    try:
        captures = captured_alone(subjects, seeds, key)
    except CaptureError:  # of one of them
        captures = [None] * len(subjects)
    for subject, captured in zip(subjects, captures, strict=True):
        report.programs += 1
        try:
            if captured is None:
                (captured,) = captured_alone([subject], seeds, key)
            found = check(subject, captured, seeds, report, backend)
        except (CaptureError, PaddingError) as error:
            report.refused[subject.written.title] = str(error)
            if f"{subject.written.file}:" not in str(error) and "joestar/nn/" not in str(error):
                report.wrong.append(f"{described(subject.written)}\nrefused without its line: {error}")
            continue
        except Exception as error:
            error.add_note(described(subject.written))
            raise
        if found:
            report.wrong.append("\n".join([described(subject.written), *found]))
    forget(programs)


def check(subject: Subject, captured: Captured, seeds: Tensor, report: Report, backend: str) -> list[str]:
    """Runs one program in all ways; returns what differed."""
    rng = random.Random(f"check {subject.written.number}")
    runs, found = Runs(subject, seeds), []
    program = Split(subject, captured, Options("eager"))
    program.trace(seeds, runs.key)
    report.count(program)
    expected = runs.exact(program.variant(Options("eager", ALL), texts=False))

    report.moving += any(bool(value.any()) for value in expected.grads.values())

    def compare(how: str, got: Outcome) -> None:
        report.compared += 1
        found.extend(f"{how}: {what}" for what in differences(got, expected))

    compiled = program if backend == "eager" else program.variant(Options(backend), texts=False)
    compare("padded", runs.padded(compiled, *rng.choice(((1.0, 0), (1.5, 37), (1.0, 5), (2.0, 1)))))
    if backend != "eager":
        return found
    compare("exact", runs.exact(program))
    if not subject.written.keyed:
        compare("plain", runs.plain())
    if rng.random() < 0.3:
        name = rng.choice(ALL)
        compare(f"exact without {name}", runs.exact(program.variant(Options("eager", (name,)), texts=False)))
    if program.sites:
        _check_choices(program, runs, report, rng, compare)
    return found


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
    compare(f"exact with {choices}", runs.exact(other))
    if rng.random() < 0.5:
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
