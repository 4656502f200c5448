"""What the inputs of a captured program are: tensors that it holds on to, by kind, and what every step is given."""

import enum
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn

from joestar.lowering import fakes


class Kind(enum.Enum):
    """What an input is of; the first group are tensors that a program holds on to."""

    STRUCTURE = "structure"
    FEATURE = "feature"
    LABEL = "label"
    NODE_DATA = "node data"
    EDGE_DATA = "edge data"
    HISTORY = "history"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    HOISTED = "hoisted"

    SEEDS = "seeds"
    NUM_SEEDS = "num_seeds"
    KEY = "key"
    SIZE = "size"
    SEED_COUNT = "seed_count"
    FLAG = "flag"


_OF_GRAPH = frozenset({Kind.STRUCTURE, Kind.FEATURE, Kind.LABEL, Kind.NODE_DATA, Kind.EDGE_DATA, Kind.HISTORY})
DATA = frozenset({Kind.FEATURE, Kind.NODE_DATA, Kind.EDGE_DATA})
"""What rows of nodes and edges hold, but for labels."""
_STRUCTURE = ("indptr", "indices", "ids", "whole_degrees", "positions", "first_key", "ranks")


@dataclass(frozen=True)
class Input:
    """What a placeholder stands for.

    Attributes:
        kind: see ``Kind``; name: where it comes from, ``graph.indptr``, ``model.head.weight``, ``seeds``.
        tensor: what the program holds on to; ``None`` for what every step is given.
        index: of a size, its position in program order.
    """

    kind: Kind
    name: str
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    index: int | None = None

    @property
    def held(self) -> bool:
        """Whether the program holds on to a tensor, the same one in every step."""
        return self.tensor is not None

    @property
    def of_graph(self) -> bool:
        """Whether it is structure or data of the graph."""
        return self.kind in _OF_GRAPH

    @property
    def of_data(self) -> bool:
        """Whether it holds rows of nodes or edges."""
        return self.kind in DATA

    @property
    def needs_grad(self) -> bool:
        """Whether it is a tensor that requires gradients."""
        return self.tensor is not None and self.tensor.requires_grad

    def holding(self, tensor: Tensor) -> "Input":
        """The same input with another tensor."""
        return replace(self, tensor=tensor)


SEEDS, KEY, NUM_SEEDS, SEED_COUNT, FLAG = (
    Input(kind, kind.value) for kind in (Kind.SEEDS, Kind.KEY, Kind.NUM_SEEDS, Kind.SEED_COUNT, Kind.FLAG)
)


def size_input(index: int) -> Input:
    """The size of a sampled set, by its position in program order."""
    return Input(Kind.SIZE, f"size_{index}", index=index)


def constant(tensor: Tensor, name: str) -> Input:
    """A tensor that is neither of the graph nor of the model."""
    return Input(Kind.CONSTANT, name, tensor)


def known_inputs(graph, model: nn.Module) -> dict[int, Input]:
    """The tensors of graph and model that a program may hold on to: ``id(tensor)`` -> input."""
    special = {"x": Kind.FEATURE, "y": Kind.LABEL}
    found = [(Kind.STRUCTURE, f"graph.{name}", getattr(graph, name, None)) for name in _STRUCTURE]
    found += [(special.get(key, Kind.NODE_DATA), f"graph.ndata[{key!r}]", value) for key, value in graph.ndata.items()]
    found += [(Kind.EDGE_DATA, f"graph.edata[{key!r}]", value) for key, value in graph.edata.items()]
    found += [(Kind.PARAMETER, f"model.{name}", value) for name, value in model.named_parameters()]
    found += [(Kind.BUFFER, f"model.{name}", value) for name, value in model.named_buffers()]
    known: dict[int, Input] = {}
    for kind, name, tensor in found:
        if isinstance(tensor, Tensor):
            known.setdefault(id(tensor), Input(kind, name, tensor))
    return known


def key_node(gm: fx.GraphModule, roles: list[Input]) -> fx.Node:
    """The key's placeholder; added, with its role, if the sampler draws nothing (dropout may still need it)."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = {role: node for node, role in zip(placeholders, roles, strict=True)}
    if KEY in inputs:
        return inputs[KEY]
    device = inputs[SEEDS].meta["val"].device
    return _added(gm, roles, KEY, KEY.name, fakes.run(gm.graph, torch.empty, 3, dtype=torch.int64, device=device))


def ids_node(gm: fx.GraphModule, roles: list[Input], ids: Tensor | None) -> fx.Node | None:
    """The placeholder of ``graph.ids``, if there are some; added, with its role, if the sampler draws nothing."""
    return None if ids is None else structure_node(gm, roles, ids, "graph.ids")


def structure_node(gm: fx.GraphModule, roles: list[Input], tensor: Tensor, name: str) -> fx.Node:
    """The placeholder of a tensor ``[n]`` of the graph's structure; added, with its role, if there is none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, role in zip(placeholders, roles, strict=True):
        if role.tensor is tensor:
            return node
    target, taken = name.replace(".", "_"), {node.target for node in placeholders}
    while target in taken:
        target += "_"
    fake = fakes.run(gm.graph, torch.empty, tensor.shape[0], dtype=tensor.dtype, device=tensor.device)
    return _added(gm, roles, Input(Kind.STRUCTURE, name, tensor), target, fake)


def history_inputs(tables) -> dict[int, Input]:
    """The tensors of ``graph_api.history.HistoryTables`` as inputs, as ``known_inputs``; none for ``None``."""
    if tables is None:
        return {}
    found = {}
    for layer, each in enumerate(zip(tables.places, tables.pulled, tables.usable, strict=True)):
        found |= zip((f"history.{name}[{layer}]" for name in ("place", "pulled", "usable")), each, strict=True)
    return {id(tensor): Input(Kind.HISTORY, name, tensor) for name, tensor in found.items()}


def _added(gm: fx.GraphModule, roles: list[Input], role: Input, name: str, fake: Tensor) -> fx.Node:
    with gm.graph.inserting_before(gm.graph.find_nodes(op="placeholder")[0]):
        node = gm.graph.placeholder(name)
    node.meta["val"] = fake
    roles.insert(0, role)
    return node
