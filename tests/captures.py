"""Cheaper captures, for tests of what comes behind the capture: it is nine tenths of a small step's first use.

``shared_captures``: a program that was captured once is not captured again for a twin (the same structure of model,
sampler, graph and loss): it gets the same graph with its own tensors. What cannot be described with certainty is
captured each time.

``quick_captures``: programs are traced by ``make_fx`` at once, as the second half of the capture does, without
TorchDynamo, which follows Python's byte code (``fuzz/tracing.py``; ``fuzz/test_reference.py`` compares the graphs).
What such a trace cannot do, or specialises on, is captured in the real way.

``cheapest_captures``: both.

With ``JOESTAR_REAL_CAPTURES=1``, as in ``make test-all``, every capture is a real one; with ``shared``, every program
is captured in the real way but for twins of one that was; with ``kinds`` the first of every kind is, and has to be the
graph that the quick one is (``kinds.py``); with ``fuzz``, as in ``make fuzz``, it is so in those tests of ``make test``
that are marked ``quick``. Tests of the capture itself, and of whole runs as a user starts them, use none of them.
"""

import contextlib
import copy
import functools
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator
from unittest import mock

import kinds
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from where import DEVICE

from joestar.graph_api import Graph, SamplingContext, check_blocks
from joestar.graph_api.history import HistoryTables
from joestar.graph_api.row_source import source_of
from joestar.lowering import capture as capturing
from joestar.lowering.assumptions import check_guards
from joestar.lowering.capture import Captured
from joestar.lowering.inputs import Input, history_inputs, known_inputs
from joestar.lowering.other_names import OTHER_NAMES
from joestar.lowering.outputs import flatten, loss_and_values
from joestar.lowering.retrace import Retrace
from joestar.lowering.traced_losses import traced_losses
from joestar.lowering.traced_norms import traced_norms
from joestar.lowering.verify import verify_capture
from joestar.runtime import traced as tracing
from joestar.runtime.features import call_model
from joestar.runtime.options import Options
from joestar.runtime.program import Program
from joestar.store import FeatureStore

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.layout, type)
_BUILT_IN = (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
OF_NODES = ("ids", "whole_degrees", "first_key", "ranks")
"""Names of a graph's tensors, beside ``indptr``, ``indices`` and ``positions``."""
_MADE: dict[tuple, tuple[Captured, list, tuple]] = {}
real = Program._capture
"""Each by itself, by TorchDynamo: ``with cheaper(real)`` where a test is about that after all."""


class Real(Captured):
    """A capture that no quick trace stands for: nothing to repeat where captures shall be real."""


class UnknownError(Exception):
    """Something that may decide what is captured, and that cannot be described."""


def no_quick_ones() -> bool:
    """Whether programs are captured in the real way, each of them or each but for its twins."""
    return os.environ.get("JOESTAR_REAL_CAPTURES") in ("1", "shared")


def passes_for(patch, device: str) -> None:
    """Programs are rewritten as for a device, and run where they are; ``patch``: pytest's."""
    own = tracing.run_passes
    patch.setattr(tracing, "run_passes", lambda *args, **options: own(*args, **{**options, "device": device}))


@contextlib.contextmanager
def cheaper(how) -> Iterator[None]:
    """Captures are ``shared`` or ``quick`` within (or ``real`` again), unless captures shall be real."""
    if os.environ.get("JOESTAR_REAL_CAPTURES") == "1":
        yield
        return
    if no_quick_ones() and how is not real:
        how = shared
    with mock.patch.object(Program, "_capture", how if how in (real, shared) else functools.partialmethod(_noted, how)):
        yield


def _noted(program: Program, how, seeds: Tensor, labels: list[str]) -> Captured:
    """A cheaper capture whose kind is noted; where the first of a kind is a real one, that one."""
    made = how(program, seeds, labels)
    if isinstance(made, Real):
        return made
    results = program.structure, program.logged, program.pushed

    def really() -> Captured:
        captured = real(program, seeds, labels)
        assert results == (program.structure, program.logged, program.pushed), "a quick trace has other results"
        return captured

    return kinds.compared([kinds.kind_of(program, seeds, labels, made.gm)], made, really)


# --- shared ---


def shared(program: Program, seeds: Tensor, labels: list[str], own=real) -> Captured:
    """The capture of a twin, with this program's tensors; its ``own`` if there is none yet."""
    try:
        tensors, key = described(program, seeds, labels)
    except UnknownError:
        return own(program, seeds, labels)
    key = own, key
    if key not in _MADE:
        made = own(program, seeds, labels)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        if all(not role.held or id(role.tensor) in places for role in made.roles):
            roles = [(role, places[id(role.tensor)] if role.held else None) for role in made.roles]
            _MADE[key] = _copy(made, made.roles), roles, (program.structure, program.logged, program.pushed)
        return made
    made, roles, (program.structure, program.logged, program.pushed) = _MADE[key]
    again = _copy(made, [role if place is None else role.holding(tensors[place]) for role, place in roles])
    program._check_outputs(again.gm, "Model")
    return again


def cheapest(program: Program, seeds: Tensor, labels: list[str]) -> Captured:
    """The capture of a twin; where there is none, a quick one."""
    return shared(program, seeds, labels, own=quick)


def _copy(made: Captured, roles: list[Input]) -> Captured:
    gm = _LazyGraphModule(made.gm, copy.deepcopy(made.gm.graph))
    return Captured(gm, list(roles), list(made.labels), made.differentiable)


def described(program: Program, seeds: Tensor, labels: list[str]) -> tuple[list[Tensor], tuple]:
    """(every tensor that a capture may hold on to, all that decides what is captured but their values).

    Raises:
        UnknownError: for what cannot be told.
    """
    graph, tensors = program.graph, []
    parts = (program.model, program.sampler, program.loss, dict(graph.ndata), dict(graph.edata), _sources(graph),
             graph.indptr, graph.indices, *of_nodes(graph), graph.positions, graph._formats)  # fmt: skip
    dtypes = torch.get_default_dtype(), program.options.autocast, seeds.dtype
    setting = (torch.is_grad_enabled(), *dtypes, seeds.device, tuple(labels))
    try:
        return tensors, (
            program.kind,
            setting,
            graph.num_nodes,
            graph.num_edges,
            *(_form(part, tensors, graph) for part in parts),
        )
    except RecursionError:  # an object that holds itself
        raise UnknownError from None


def of_nodes(graph) -> list[Tensor | None]:
    """What a graph knows of its nodes and edges besides ``ndata`` and ``edata``."""
    return [getattr(graph, name) for name in OF_NODES]


def _form(value, tensors: list[Tensor], graph):
    """What a capture can see of a value; its tensors are added to the list."""
    if isinstance(value, Tensor):
        if value.requires_grad and not value.is_leaf:
            raise UnknownError
        place = next((n for n, other in enumerate(tensors) if other is value), len(tensors))
        tensors.extend([value] * (place == len(tensors)))
        return "tensor", place, type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN):
        return type(value), value
    if value is graph:
        return "graph"
    if isinstance(value, (list, tuple, torch.Size)):
        return type(value), tuple(_form(entry, tensors, graph) for entry in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _form(entry, tensors, graph)) for key, entry in value.items())
    if isinstance(value, functools.partial):
        return "partial", _form((value.func, value.args, value.keywords), tensors, graph)
    if isinstance(value, types.FunctionType):
        return _function(value, tensors, graph)
    if isinstance(value, _BUILT_IN):
        return value
    if not hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        raise UnknownError
    return type(value), _form(_attributes(value), tensors, graph)


def _sources(graph) -> list:
    """All that ``FeatureStore.rows`` reads, where rows are gathered from elsewhere than the tensors that a graph shows.

    Raises:
        UnknownError: a source gathers in another way.
    """
    frames = [getattr(frame, "sources", {}) for frame in (graph.ndata, graph.edata)]
    found = [pair for sources in frames for pair in sources.items()]
    if any(type(source) is not FeatureStore for _, source in found):
        raise UnknownError
    return [(name, s.tier, s.device, s.table, s.cache, s.slot_of) for name, s in found]


_OF_MODULES = set(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}


def _attributes(value) -> dict:
    """What an object holds, without the hooks of modules, of which there may be none."""
    found = vars(value)
    if not isinstance(value, nn.Module):
        return found
    if any(found[name] for name in _OF_MODULES if name.endswith("hooks") and name in found):
        raise UnknownError
    return {name: entry for name, entry in found.items() if name not in _OF_MODULES}


def _function(value: types.FunctionType, tensors: list[Tensor], graph) -> tuple:
    """Its code, defaults and closure; functions of one module have the same globals."""
    cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
    held = (value.__defaults__, value.__kwdefaults__, cells, vars(value))
    return value.__code__, value.__module__, _form(held, tensors, graph)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Reports lack the texts of graphs, which take about as long as the passes."""
    if os.environ.get("JOESTAR_REAL_CAPTURES") == "1":
        yield
        return
    run = Program._run_passes

    def run_passes(program, gm, roles, texts=True):
        run(program, gm, roles, texts=False)

    patched = mock.patch.object(fx.GraphModule, "print_readable", return_value="")
    with mock.patch.object(Program, "_run_passes", run_passes), patched:
        yield


# --- quick ---


def quick(program: Program, seeds: Tensor, labels: list[str]) -> Captured:
    """A trace by ``make_fx`` alone; a capture (``Real``) where that cannot be."""
    loss = getattr(program.loss, "call", None)
    if isinstance(loss, nn.Module) and any(True for _ in loss.buffers()):
        return Real(**vars(real(program, seeds, labels)))  # the trace would write into them
    with contextlib.suppress(Exception):  # the capture says what is wrong
        with traced_norms(), traced_losses():
            made = traced(program, seeds, labels)
        verify_capture(made.gm, "Model")
        program._check_outputs(made.gm, "Model")
        return made
    return Real(**vars(real(program, seeds, labels)))


class Data(dict):
    """Fake tensors in place of a graph's, and its sources, whose tables the trace knows (``_lift_constants``)."""

    def __init__(self, fakes: dict[str, Tensor], whole: dict):
        super().__init__(fakes)
        self.sources = getattr(whole, "sources", {})


def traced(program: Program, seeds: Tensor, labels: list[str], results=None) -> Captured:
    """What ``Program._capture`` gives, for programs whose Python needs no looking at.

    Args:
        results: ``(context, graph, blocks, seeds) -> tensors``, if not those of the program.
    """
    from fuzz.tracing import Inputs

    graph, sampler, model = program.graph, program.sampler, program.model
    results = results or functools.partial(_results, program)
    tables = getattr(sampler, "history_tables", None)
    inputs = Inputs(known_inputs(graph, model) | history_inputs(tables))
    seeds_at, key_at = inputs.begin(seeds, labels)
    structure = inputs.constants((("indptr", graph.indptr), ("indices", graph.indices)), "graph")
    ids = inputs.constants(zip(OF_NODES, of_nodes(graph), strict=True), "graph")
    data = [inputs.constants(frame.items(), name) for frame, name in ((graph.ndata, "node"), (graph.edata, "edge"))]
    for place, name in ((data[0].get("x"), "features"), (data[0].get("y"), "targets")):
        if place is not None:
            inputs.names[place] = name  # as in ``runtime.traceable``
    drawn = inputs.constants(vars(sampler).items(), "sampler")
    state = inputs.constants([*model.named_parameters(), *model.named_buffers()], "model")
    named = [(re.sub(r"\W+", "_", role.name), role.tensor) for role in history_inputs(tables).values()]
    history = inputs.constants(named, "sampler")

    def forward(*values):  # the name under which stack traces begin
        def of(places: dict[str, int]) -> dict[str, Tensor]:
            return {name: values[place] for name, place in places.items()}

        twin = Graph(**of(structure), ndata=Data(of(data[0]), graph.ndata), edata=Data(of(data[1]), graph.edata))
        for name, value in of(ids).items():
            setattr(twin, name, value)
        twin.positions, twin._whole_sizes = graph.positions, graph._whole_sizes
        twin_sampler = copy.copy(sampler)
        vars(twin_sampler).update(of(drawn), graph=twin)
        if tables is not None:
            each = list(of(history).values())
            twin_sampler.history_tables = HistoryTables(each[::3], each[1::3], each[2::3])
        context = SamplingContext(values[key_at], list(values[1:seeds_at]))
        blocks = twin_sampler.sample(twin.with_context(context), values[seeds_at])
        check_blocks(blocks, type(sampler).__name__)
        with _reparametrize_module(model, of(state)):
            return results(context, twin, blocks, values[seeds_at])

    compiling = mock.patch("torch.compiler.is_compiling", return_value=True)
    frames = mock.patch("torch.fx.proxy.CapturedTraceback", _Frames)
    inputs.mode.allow_non_fake_inputs = True  # tensors that functions hold on to
    with inputs.mode, compiling, frames, _use_lazy_graph_module(True):  # its code is made when it runs
        try:
            gm = twice(forward, inputs, getattr(program, "options", Options()).autocast, record_stack_traces=True)
        finally:
            _forget_fakes(model)
    _lift_constants(gm, inputs)
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), inputs.names, strict=True):
        node.meta["dynamo_name"] = name or node.name
    check_guards(gm, {}, "Model")
    capturing.remove_dead_code(gm)
    roles = _without_unused(gm, inputs.roles)
    capturing._rename_placeholders(gm, roles)
    return Captured(gm, roles, labels)


def twice(forward, inputs, autocast: torch.dtype | None, **options) -> fx.GraphModule:
    """Under autocast Python sees its dtypes, but values are those without, as where Dynamo's graph is traced again."""
    plain = torch.autocast(DEVICE.type, enabled=False)
    with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None, cache_enabled=False):
        gm = make_fx(forward, OTHER_NAMES, pre_dispatch=True, **options)(*inputs.fakes)
    if autocast is None:
        return gm
    with plain, fx_traceback.preserve_node_meta():
        short = capturing.short_data(inputs.roles, inputs.fakes, autocast)
        return capturing.recorded(Retrace(gm, autocast).run, inputs.fakes, short)


def _lift_constants(gm: fx.GraphModule, inputs) -> None:
    """Tensors that functions hold on to become inputs, as in TorchDynamo; not those that Python made of numbers."""
    lift, places = torch.ops.aten.lift_fresh_copy.default, gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="get_attr"):
        tensor = getattr(gm, node.target)
        if not isinstance(tensor, Tensor) or all(user.target is lift for user in node.users):
            continue
        position = inputs.constant(tensor, node.name)
        if position == len(places):
            with gm.graph.inserting_after(places[-1]):
                places.append(gm.graph.placeholder(node.name))
            places[-1].meta["val"] = inputs.fakes[position]
        node.replace_all_uses_with(places[position])
        gm.graph.erase_node(node)


def _forget_fakes(model: nn.Module) -> None:
    """Recurrent modules keep their weights in a list, too: a capture would see them replace what a trace left there."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


_TRACERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), name)
    for name in ("fx", "_ops.py", "_dynamo", "_compile.py", "_library", "_subclasses", "_prims", "utils")
)


class _Frames:
    """The stack from ``forward`` on without the tracer's own, as TorchDynamo has it: the rest takes time."""

    @classmethod
    def extract(cls, **_):
        """Where the trace is."""
        return cls()

    def summary(self) -> traceback.StackSummary:
        """The frames, outermost first."""
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_TRACERS):
                frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
            frame = None if code.co_name == "forward" and code.co_filename == __file__ else frame.f_back
        return traceback.StackSummary(frames[::-1])


def _results(program: Program, context: SamplingContext, graph, blocks: list, seeds: Tensor) -> tuple:
    """Loss, what it logs, rows for history tables, and outputs."""
    loss = program.loss
    outputs, tensors = call_model(program.model, blocks, graph.ndata.get("x"), source_of(graph.ndata, "x")), []
    program.structure, program.logged, program.pushed = flatten(outputs, tensors), (), ()
    if loss is None:
        return tuple(tensors)
    rows = {k: torch.index_select(graph.ndata[k], 0, seeds) for k in ("y", *loss.inputs) if k != "seeds"}
    rows |= {"seeds": graph.ids_of(seeds).long()} if "seeds" in loss.inputs else {}
    value, logged = loss_and_values(loss.call(outputs, rows.pop("y"), **rows), loss.name)
    program.logged = tuple(logged)
    program.pushed = tuple(layer for layer, *_ in context.pushed)
    pushed = [tensor for _, *pair in context.pushed for tensor in pair]
    return (value, *logged.values(), *pushed, *tensors)


def _without_unused(gm: fx.GraphModule, roles: list[Input]) -> list[Input]:
    """Removes constants that nobody reads; returns the roles of the other inputs."""
    kept = []
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if role.held and not node.users:
            gm.graph.erase_node(node)
        else:
            kept.append(role)
    return kept
