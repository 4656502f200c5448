"""One capture of the programs of a pack, cut into one graph each: by the real capture, or by a quicker stand-in for it.

The real capture spends nine tenths of its time in TorchDynamo, which follows Python's byte code. The programs here need
none of that: they are straight lines. ``traced`` runs them under ``make_fx`` at once, as the second half of the capture
does, and gives the same kind of graph.
"""

import copy
from unittest import mock

import captures
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.utils.stateless import _reparametrize_module

from joestar.graph_api import Graph, SamplingContext, check_blocks
from joestar.lowering import capture as capturing
from joestar.lowering.assumptions import check_guards
from joestar.lowering.capture import Captured, is_impure
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.inputs import KEY, NUM_SEEDS, SEEDS, Input, constant, known_inputs, size_input
from joestar.lowering.sizes import RAGGED, is_counted
from joestar.lowering.verify import verify_capture

ORIGIN = "Model with Sampler"


def captured(subjects: list, seeds: Tensor, labels: list[str], quick: bool) -> list[Captured]:
    """One graph per program, which holds nothing of the others; all come from one trace.

    Args:
        seeds: a batch; labels: of the sampler's sets; quick: by ``traced``.
    """
    whole = (traced if quick else _captured)(subjects, seeds, labels)
    verify_capture(whole.gm, ORIGIN)
    return [_part(whole, subject, position) for position, subject in enumerate(subjects)]


def _captured(subjects: list, seeds: Tensor, labels: list[str]) -> Captured:
    """The real capture of all programs."""
    graph, sampler = subjects[0].graph, subjects[0].sampler
    features = graph.ndata["x"]

    def program(seeds, key, carriers):
        context = SamplingContext(key, [carrier.shape[0] for carrier in carriers])
        blocks = sampler.sample(graph.with_context(context), seeds)
        check_blocks(blocks, "Sampler")
        x = torch.index_select(features, 0, blocks[0].srcs)
        results = []
        for subject in subjects:
            results.extend(_two(*subject.value(blocks, x, seeds)))
        return tuple(results)

    return capturing.capture(
        program, seeds, labels, origin=ORIGIN, known=_data(subjects), autocast=_autocast(subjects)
    )  # fmt: skip


def _data(subjects: list) -> dict[int, Input]:
    """Data of nodes and edges, which all programs of a pack share."""
    known = known_inputs(subjects[0].graph, subjects[0].model)
    return {place: role for place, role in known.items() if role.kind in capturing.DATA}


def _autocast(subjects: list) -> torch.dtype | None:
    """All programs of a pack run under it."""
    name = subjects[0].written.autocast
    return getattr(torch, name) if name else None


def _two(loss: Tensor, outputs) -> tuple[Tensor, Tensor]:
    """A loss, and the first tensor of what a model returned: every program of a pack has as many results."""
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]
    return loss, outputs


# --- the quick one --------------------------------------------------------------------------------------------------


class Inputs:
    """Inputs of a trace: fake tensors and symbolic sizes, with their roles."""

    def __init__(self, known: dict[int, Input] | None = None):
        self.known = known or {}
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.mode.cache_enabled = False  # with symbolic sizes, to look results up takes longer than to make them
        self.roles, self.fakes, self.names, self.places = [], [], [], {}

    def add(self, role: Input, fake, name: str = "") -> int:
        """A new input; returns its place."""
        self.roles.append(role)
        self.fakes.append(fake)
        self.names.append(name)
        return len(self.fakes) - 1

    def dynamic(self, tensor: Tensor) -> Tensor:
        """A fake tensor whose number of rows is a symbol."""
        rest = tensor.dim() - 1
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * rest])
        source = ConstantSource(f"input_{tensor.shape[0]}")
        return self.mode.from_tensor(tensor, symbolic_context=sizes, source=source)

    def constant(self, tensor: Tensor, name: str) -> int:
        """Place of a tensor that no step replaces."""
        if id(tensor) not in self.places:
            fake = self.mode.from_tensor(tensor, static_shapes=True)
            self.places[id(tensor)] = self.add(self.known.get(id(tensor), constant(tensor, name)), fake, name)
        return self.places[id(tensor)]

    def begin(self, seeds: Tensor, labels: list[str]) -> tuple[int, int]:
        """What every program starts with: number of seeds, sizes, seeds, key; the places of the last two."""
        seeds = self.dynamic(torch.zeros(capturing.SEEDS_HINT, dtype=seeds.dtype))
        self.add(NUM_SEEDS, seeds.shape[0])
        for position, hint in enumerate(capturing.distinct_sizes(len(labels))):
            self.add(size_input(position), self.dynamic(torch.empty(hint, 0)).shape[0])
        key = self.mode.from_tensor(torch.zeros(3, dtype=torch.int64), static_shapes=True)
        return self.add(SEEDS, seeds), self.add(KEY, key)

    def constants(self, tensors, prefix: str) -> dict[str, int]:
        """``constant`` of everything that is a tensor."""
        named = [(name, value) for name, value in tensors if isinstance(value, Tensor)]
        return {name: self.constant(value, f"{prefix}_{name}".replace(".", "_")) for name, value in named}


def traced(subjects: list, seeds: Tensor, labels: list[str]) -> Captured:
    """What ``capture`` gives, for programs whose Python needs no looking at: a trace with fake tensors."""
    graph, sampler = subjects[0].graph, subjects[0].sampler
    inputs = Inputs(_data(subjects))
    seeds_at, key_at = inputs.begin(seeds, labels)
    structure = inputs.constants((("indptr", graph.indptr), ("indices", graph.indices)), "graph")
    ids = inputs.constants((("ids", graph.ids),), "graph")
    data = [inputs.constants(frame.items(), "graph_data") for frame in (graph.ndata, graph.edata)]
    drawn = inputs.constants(vars(sampler).items(), "sampler")
    state = [
        inputs.constants([*subject.model.named_parameters(), *subject.model.named_buffers()], "model")
        for subject in subjects
    ]

    def program(*values):
        def of(places: dict[str, int]) -> dict[str, Tensor]:
            return {name: values[place] for name, place in places.items()}

        twin = Graph(**of(structure), ndata=of(data[0]), edata=of(data[1]))
        twin.ids = of(ids).get("ids")
        twin_sampler = copy.copy(sampler)
        vars(twin_sampler).update(of(drawn), graph=twin)
        _at(subjects[0].sampler_file)
        context = SamplingContext(values[key_at], list(values[1:seeds_at]))
        blocks = twin_sampler.sample(twin.with_context(context), values[seeds_at])
        check_blocks(blocks, "Sampler")
        x = torch.index_select(twin.ndata["x"], 0, blocks[0].srcs)
        results = []
        for subject, places in zip(subjects, state, strict=True):
            _at(subject.written.file)
            symbolic = mock.patch.dict(
                subject.loss.__globals__, len=lambda rows: rows.shape[0]
            )  # Python's gives an int
            with _reparametrize_module(subject.model, of(places)), symbolic:
                results.extend(_two(*subject.value(blocks, x, values[seeds_at], twin)))
        return tuple(results)

    compiling = mock.patch("torch.compiler.is_compiling", return_value=True)
    with inputs.mode, fx_traceback.preserve_node_meta(), compiling:
        gm = captures.twice(program, inputs, _autocast(subjects))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), inputs.names, strict=True):
        node.meta["dynamo_name"] = name or node.name
    check_guards(gm, {}, ORIGIN)
    capturing.remove_dead_code(gm)
    capturing._rename_placeholders(gm, inputs.roles)
    return Captured(gm, inputs.roles, labels)


def _at(file: str) -> None:
    """What is traced from here on comes from this file."""
    fx_traceback.set_stack_trace([f'File "{file}", line 1, in forward\n    somewhere'])


# --- taking apart ---------------------------------------------------------------------------------------------------


class _Silent(_LazyGraphModule):
    """Nobody reads these graphs: their text takes longer than the passes. Their code is made when they run."""

    def print_readable(self, *args, **kwargs) -> str:
        return ""


def _part(whole: Captured, subject, position: int) -> Captured:
    """The graph of one program: its results, its writes and draws, what they need, and the inputs of all steps."""
    nodes = list(whole.gm.graph.nodes)
    results = nodes[-1].args[0][2 * position : 2 * position + 2]
    roles = dict(zip(whole.gm.graph.find_nodes(op="placeholder"), whole.roles, strict=True))
    buffers = {id(value) for value in subject.model.buffers()}
    own = {node for node, role in roles.items() if id(role.tensor) in buffers}
    needed = set(results)
    for node in reversed(nodes[:-1]):
        writes = is_in_place(node) and any(root(value) in own for value in node.all_input_nodes)
        draws = is_impure(node) and not is_in_place(node) and subject.written.file in node.meta.get("stack_trace", "")
        counted = is_counted(node) and not needed.isdisjoint(node.args[RAGGED[node.target]].users)
        kept = not roles[node].held if node in roles else writes or draws or counted
        if kept or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    graph, copies = fx.Graph(), {}
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    kept = [role for node, role in roles.items() if node in needed]
    return Captured(_Silent(whole.gm, graph), kept, list(whole.labels))


def again(made: Captured) -> Captured:
    """A copy: the passes change what they are given."""
    return Captured(_Silent(made.gm, copy.deepcopy(made.gm.graph)), list(made.roles), list(made.labels))
