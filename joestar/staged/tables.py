"""Tensors of the user's own with a row per node or edge: in an arena, whose ids are slots, other rows would be read."""

import torch
from torch import Tensor, fx

from joestar.errors import ConfigError, SamplerError
from joestar.graph_api import Graph
from joestar.lowering.inputs import Input, Kind

_ATEN = torch.ops.aten
_GATHERS = {_ATEN.index_select.default: 2, _ATEN.embedding.default: 1, _ATEN.index.Tensor: 1, _ATEN.gather.default: 2}
"""Operations that look rows up in their first argument -> where the ids are."""
_SAME_IDS = {_ATEN._to_copy.default, _ATEN.to.dtype, _ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default}
_ADVICE = "put it into graph.ndata or graph.edata before compile, and use it by its name there"


def refuse_tables_of(sampler) -> None:
    """Raises ``SamplerError`` for tensors of the sampler that seem to be about nodes or edges of the whole graph: of
    integers or booleans (ids, masks), or with as many rows as it has nodes or edges."""
    graph: Graph = sampler.graph
    for name, value in vars(sampler).items():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if not value.is_floating_point() or value.shape[0] in (graph.num_nodes, graph.num_edges):
            raise SamplerError(
                f"{type(sampler).__name__}.{name} is a tensor {list(value.shape)} that seems to be about nodes or "
                f"edges of a graph in host memory: in macro-batches they have other numbers. For memory= and "
                f"first_stage=, {_ADVICE}."
            )


def refuse_tables(program, whole: Graph) -> None:
    """Looks at what a program, as it was traced, reads besides the arena.

    Raises:
        ConfigError: for a tensor with a row per node or edge of the whole graph, unless rows of it are looked up by
            ``graph.ids`` only.
    """
    placeholders = program.lowered.find_nodes(op="placeholder")
    ids = next((n for n, r in zip(placeholders, program.lowered_roles, strict=True) if r.name == "graph.ids"), None)
    for node, role in zip(placeholders, program.lowered_roles, strict=True):
        if role.of_graph or not role.held or not role.tensor.dim() or not _read_by_position(node, role, whole, ids):
            continue
        raise ConfigError(
            f"{role.name} {list(role.tensor.shape)} is read by ids of nodes or edges. With memory= and first_stage= "
            f"those are places on the device, not rows of a tensor of your own: {_ADVICE}, or learn it with "
            "joestar.nn.NodeEmbedding."
        )


def _read_by_position(node: fx.Node, role: Input, whole: Graph, ids: fx.Node | None) -> bool:
    rows = role.tensor.shape[0]
    if role.kind is Kind.CONSTANT and rows in (whole.num_nodes, whole.num_edges):
        return True
    gathers = [user for user in node.users if user.target in _GATHERS and user.args[0] is node]
    return rows >= whole.num_nodes and not all(_of_ids(user.args[_GATHERS[user.target]], ids) for user in gathers)


def _of_ids(index, ids: fx.Node | None) -> bool:
    """Whether ids come from ``graph.ids``."""
    if isinstance(index, (list, tuple)):
        index = index[0]
    while isinstance(index, fx.Node) and index.target in _SAME_IDS:
        index = index.args[0]
    return isinstance(index, fx.Node) and index.target is _ATEN.index_select.default and index.args[0] is ids
