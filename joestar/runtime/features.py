"""What a model gets besides the blocks: rows of ``graph.ndata["x"]``, or nothing where the graph has no features."""

import inspect

import torch
from torch import Tensor, nn

from joestar.errors import GraphError
from joestar.graph_api.arrays import settle


def call_model(model: nn.Module, blocks: list, features: Tensor | None) -> Tensor:
    """``model(blocks, x)`` with the rows of the first block's sources; ``model(blocks)`` without features."""
    if features is None:
        return model(blocks)
    return model(blocks, torch.index_select(features, 0, blocks[0].srcs))


def settle_and_check(model: nn.Module, graph) -> None:
    """Brings features and labels of the graph into the model's form (see ``settle``) and checks the features.

    Raises:
        GraphError: there are none although the model takes some, or they are no floating-point numbers.
    """
    settle(graph, _dtype(model))
    x = graph.ndata.get("x")
    if x is None and not _runs_without(model):
        raise GraphError(
            f"the graph has no features, and {type(model).__name__}.forward takes x: set graph.ndata['x'] (float "
            "[num_nodes, F]), or learn a vector per node with joestar.nn.NodeEmbedding(graph.num_nodes, F, model)."
        )
    if x is not None and not x.dtype.is_floating_point:
        raise GraphError(f"graph.ndata['x'] must be floating point; got {x.dtype}. Use .float().")


def _dtype(model: nn.Module) -> torch.dtype | None:
    """Of the model's floating-point parameters, if it is one."""
    found = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return found.pop() if len(found) == 1 else None


def _runs_without(model: nn.Module) -> bool:
    """Whether ``model(blocks)`` is a possible call."""
    try:
        inspect.signature(model.forward).bind([])
    except TypeError:
        return False
    except ValueError:
        return True
    return True
