"""Random programs as objects: their source is executed, as if it were a file."""

import linecache
import sys
import types
from dataclasses import dataclass

import captures
import torch
from lowering.harness import seeded
from torch import Tensor, fx

from joestar.lowering.capture import Captured
from joestar.lowering.inputs import Input
from joestar.lowering.outputs import LEAF
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .generate import PER_PACK, Written
from .tracing import again


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
    """A program whose capture was made together with others; one after a change of the model is its own.

    What was changed back is captured as it was before.
    """

    def __init__(self, subject: Subject, captured: Captured, options: Options):
        super().__init__("train", subject.model, subject.sampler, subject.loss, options)
        self._first, self._made = captured, {}

    def _run_passes(self, gm: fx.GraphModule, roles: list[Input], texts: bool = False) -> None:
        super()._run_passes(gm, roles, texts=False)

    def _capture(self, seeds: Tensor, labels: list[str]) -> Captured:
        if not self._made:
            self._made[self._traced_with] = self._first
        made = self._made.get(self._traced_with)
        if made is None:
            return captures.quick(self, seeds, labels)
        self.structure = LEAF  # of all that a model returns, it holds the first; a capture of its own held the others
        self._check_outputs(made.gm, "Model")
        return again(made)


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
