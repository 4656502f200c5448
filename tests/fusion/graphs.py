"""Small graphs for pass tests: written by hand, or captured from a model with every pass switched off."""

import copy
from dataclasses import replace

import torch
from lowering.harness import NUM_CLASSES, NUM_FEATURES, Case
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from joestar import fn
from joestar.fusion import PASSES, run_passes
from joestar.lowering.inputs import constant

ATEN, JOESTAR = torch.ops.aten, torch.ops.joestar
ALL = tuple(spec.name for spec in PASSES)


class Model(nn.Module):
    """``f(self, blocks, x)`` gives rows of the seeds, ``[num_seeds, F]``; a linear layer follows."""

    def __init__(self, f, width: int = NUM_FEATURES, **parts):
        super().__init__()
        self.f = f
        self.head = nn.Linear(width, NUM_CLASSES)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, blocks, x):
        return self.head(self.f(self, blocks, x))


def build(write) -> fx.GraphModule:
    """A graph written by hand: ``write(call, value)`` returns the output node; every value is a float ``[4]``.

    ``call(target, *args)`` adds a call, ``value(name)`` an input.
    """
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(target, *args, **kwargs):
        return shaped(graph.call_function(target, args, kwargs))

    def value(name: str):
        return shaped(graph.placeholder(name))

    def shaped(node):
        with mode:
            node.meta["val"] = torch.empty(4)
        return node

    result = write(call, value)
    graph.output((result,))
    return fx.GraphModule(nn.Module(), graph)


def run(gm: fx.GraphModule, *names: str):
    """Runs the passes of these names alone, as if their requirements held: (records, places)."""
    roles = [constant(None, "value")] * len(gm.graph.find_nodes(op="placeholder"))
    passes = tuple(spec for spec in PASSES if spec.name in names)
    free = tuple(type(spec)(spec.name, spec.run) for spec in passes)
    records, context = run_passes(gm, roles, passes=free)
    return records, context.places


def captured(model: nn.Module, fanouts=(3, 2), disable=ALL, **options) -> Case:
    """A traced case, by default without any pass."""
    case = Case(model, fanouts=fanouts, disable=disable, **options)
    case.trace()
    return case


def again(case: Case, disable=None, choices=None) -> Case:
    """The same capture with other passes switched off, or under other choices: what is not given stays."""
    other, options = copy.copy(case), case.program.options
    disable = options.disable_passes if disable is None else disable
    choices = options.choices if choices is None else choices
    other.program = case.program.variant(replace(options, disable_passes=disable, choices=choices))
    return other


def captured_each(model: nn.Module, fanouts=(3, 2), *, disables, **options) -> list[Case]:
    """The case once for every choice of passes to switch off; it is captured only once."""
    first = captured(model, fanouts, disables[0], **options)
    return [first, *(again(first, disable) for disable in disables[1:])]


def count(gm: fx.GraphModule, target) -> int:
    """Calls of an op."""
    return sum(node.target is target for node in gm.graph.nodes)


def only(*names: str) -> tuple[str, ...]:
    """What to disable so that these passes (and the clean-up they need) are left."""
    return tuple(name for name in ALL if name not in (*names, "dce", "simplify", "cse", "dce-after"))


def reasons(case: Case, pattern: str) -> list[str]:
    """Why a pattern was refused, at every place where it was."""
    return [place.detail for place in case.program.places if place.pattern == pattern and not place.fired]


def mean(block, x):
    return block.pull(fn.copy_u(x), "mean")


def degree_weights(block):
    """A weight of every edge, in float64: of the degrees of both ends."""
    return torch.ops.joestar.sddmm(
        block.indptr, block.indices, block.out_degrees().double().rsqrt(), block.in_degrees().double(), "mul"
    )
