"""Hoisting: what no step changes is computed once, and becomes an input of the program (gSampler 4.2).

Before                                                  After
    d = aten.sub(aten.slice(indptr, 0, 1), ...)             n = aten.index_select(hoisted_0, 0, srcs)
    s = aten.rsqrt(aten.to(d, torch.float32))
    n = aten.index_select(s, 0, srcs)                       hoisted_0: aten.rsqrt(...) of the whole graph

Degrees, normalisation, preprocessing of the whole graph's edges, biases of sampling: everything behind which there are
only tensors of the graph and the sampler that need no gradients. If one of them is written in place between two
epochs, the hoisted value is computed again (``Hoisted.refresh``). Writes are seen by PyTorch's version counter, and in
CPU tensors of at most ``WATCHED_BYTES`` by their contents, too: a write through NumPy or ``.data`` counts nothing.

Must not fire on what depends on seeds, key or sampled sets, on parameters and buffers of the model, or on plain views,
which cost nothing.
"""

import operator
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joestar.lowering.functional import ancestors, is_in_place, root
from joestar.lowering.inputs import Input, Kind
from joestar.torch_private import OpOverload

PATTERN = "hoist"
WATCHED_BYTES = 2**20
_ATEN = torch.ops.aten
_VIEWS = {
    _ATEN.view.default, _ATEN.slice.Tensor, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.default,
    _ATEN.transpose.int, _ATEN.t.default, _ATEN.permute.default, _ATEN.expand.default, _ATEN.select.int,
    _ATEN.alias.default, _ATEN.detach.default, _ATEN.unflatten.int, _ATEN.flatten.using_ints, operator.getitem,
}  # fmt: skip


@dataclass
class Hoisted:
    """A value that was computed before the first step.

    Attributes:
        value: the tensor that the program reads; graph: computes it from ``sources``.
    """

    value: Tensor
    graph: fx.GraphModule
    sources: list[Tensor]

    def __post_init__(self):
        self._state = _state(self.sources)

    def refresh(self) -> bool:
        """Computes the value again if a source was written in place since; whether it was."""
        now = _state(self.sources)
        if now == self._state:
            return False
        with torch.no_grad():
            self.value.copy_(self.graph(*self.sources))
        self._state = now
        return True


def _state(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(0 if tensor.is_inference() else tensor._version, _checksum(tensor)) for tensor in tensors]


def _checksum(tensor: Tensor) -> int:
    """Of a small tensor's contents (about a microsecond per KB); 0 on a GPU, where reading them would wait for it."""
    if tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() > WATCHED_BYTES:
        return 0
    return zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def run(gm: fx.GraphModule, context) -> int:
    """Hoists every value that steps read and do not change; returns how many."""
    constant = _constants(gm, context)
    hoisted = 0
    for node in list(gm.graph.nodes):
        if node not in constant or node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if all(user in constant for user in node.users) or not _works(node):
            continue
        if context.admits(PATTERN, node, True):
            _hoist(gm, node, constant, context)
            hoisted += 1
    return hoisted


def _constants(gm: fx.GraphModule, context) -> set[fx.Node]:
    """Nodes that have the same value in every step."""
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    for node in gm.graph.nodes:
        if node.target is _ATEN.batch_norm.default:
            written.update(arg for arg in node.args[3:5] if isinstance(arg, fx.Node))
    constant = set()
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), context.roles, strict=True):
        if role.held and node not in written and _fixed(role.tensor, context.changing):
            constant.add(node)
    for node in gm.graph.nodes:
        if node.op == "call_function" and _pure(node) and all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
    return constant


def _fixed(tensor, changing: frozenset[int]) -> bool:
    return isinstance(tensor, Tensor) and not tensor.requires_grad and memory(tensor) not in changing


def memory(tensor: Tensor) -> int:
    """Address of the memory that a tensor, or a part of it, is in."""
    return tensor.untyped_storage().data_ptr()


def _pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or is_in_place(node):
        return False
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not random and node.target is not _ATEN.batch_norm.default


def _works(node: fx.Node) -> bool:
    """Whether computing the node costs anything, and it reads a tensor."""
    behind = ancestors(node)
    reads = any(other.op == "placeholder" for other in behind)
    return reads and any(other.op == "call_function" and other.target not in _VIEWS for other in behind)


def _hoist(gm: fx.GraphModule, node: fx.Node, constant: set[fx.Node], context) -> None:
    behind = ancestors(node)
    placeholders = gm.graph.find_nodes(op="placeholder")
    roles = dict(zip(placeholders, context.roles, strict=True))
    graph, copies, sources = fx.Graph(), {}, []
    for other in behind:
        if other.op == "placeholder":
            sources.append(roles[other].tensor)
        copies[other] = graph.node_copy(other, copies.__getitem__)
    graph.output(copies[node])
    module = fx.GraphModule(torch.nn.Module(), graph)
    with torch.no_grad():
        value = module(*sources).detach().clone()
    with gm.graph.inserting_after(placeholders[-1]):
        taken = gm.graph.placeholder(f"hoisted_{len(context.hoisted)}")
    taken.meta = dict(node.meta)
    context.roles.append(Input(Kind.HOISTED, taken.name, value))
    context.hoisted.append(Hoisted(value, module, sources))
    context.fired(PATTERN, node, f"{node.target} and {len(behind) - 1} values behind it, {list(value.shape)}")
    node.replace_all_uses_with(taken)
    constant.add(taken)
