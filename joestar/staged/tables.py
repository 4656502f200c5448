"""Tensors of the user's own with a row per node or edge: in an arena, whose ids are slots, other rows would be read."""

from torch import Tensor

from joestar.errors import SamplerError
from joestar.graph_api import Graph

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
