"""What a model gets besides the blocks: rows of ``graph.ndata["x"]``, or nothing where the graph has no features."""

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar.errors import GraphError, LabelError, say
from joestar.graph_api.arrays import settle
from joestar.graph_api.row_source import RowSource, device_of
from joestar.graph_api.subgraph import Subgraph
from joestar.pyg import call_on_subgraph
from joestar.pyg.call import arguments_of, takes_edge_index

LOOK_AT = 1 << 24
"""Values that are looked at together."""


def call_model(model: nn.Module, blocks: list, features: Tensor | None, source: RowSource | None = None) -> Tensor:
    """``model(blocks, x)`` with the rows of the first block's sources; ``model(blocks)`` without features.

    A ``Subgraph`` in place of blocks: ``model(x, edge_index, ...)`` on all of its nodes (``joestar.pyg``).

    ``source``: what gathers them, where that is not plain indexing (``source_of(graph.ndata, "x")``). What the sampler
    has set as ``blocks[0].srcdata["x"]`` comes before the graph's.
    """
    if isinstance(blocks[0], Subgraph):
        return call_on_subgraph(model, blocks[0], _rows_of(features, source, blocks[0].srcs))
    if features is None:
        return model(blocks)
    first = blocks[0]
    if "x" in getattr(first.srcdata, "own", ()):
        return model(blocks, first.srcdata["x"])
    return model(blocks, _rows_of(features, source, first.srcs))


def _rows_of(features: Tensor | None, source: RowSource | None, nodes: Tensor) -> Tensor | None:
    if features is None:
        return None
    return torch.index_select(features, 0, nodes) if source is None else source.rows(nodes)


def settle_and_check(model: nn.Module, graph) -> None:
    """Brings features and labels of the graph into the model's form (see ``settle``) and checks the features.

    Raises:
        GraphError: there are none although the model takes some, or they are no floating-point numbers.
    """
    settle(graph, _dtype(model))
    x = graph.ndata.get("x")
    of_pyg = takes_edge_index(model) and all(kind != "x" for _, kind in arguments_of(model, graph))
    if x is None and not of_pyg and not _runs_without(model):
        raise GraphError(
            f"the graph has no features, and {type(model).__name__}.forward takes x: set graph.ndata['x'] (float "
            "[num_nodes, F]), or learn a vector per node with joestar.nn.NodeEmbedding(graph.num_nodes, F, model)."
        )
    check_floating(graph)


def check_floating(graph) -> None:
    """Raises ``GraphError`` where features are no floating-point numbers."""
    x = graph.ndata.get("x")
    if x is not None and not x.dtype.is_floating_point:
        raise GraphError(f"graph.ndata['x'] must be floating point; got {x.dtype}. Use .float().")


def check_places(model: nn.Module, graph) -> None:
    """Raises ``GraphError`` unless data of nodes and edges, parameters and buffers are all on the graph's device."""
    frames = {"graph.ndata": graph.ndata, "graph.edata": graph.edata}
    places = {f"{frame}[{key!r}]": device_of(table, key) for frame, table in frames.items() for key in table}
    places |= {f"model.{name}": value.device for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, device in places.items():
        if device != graph.device:
            raise GraphError(
                f"{name} is on {device} and the graph on {graph.device}: move both to one device "
                "(graph.to(device), model.to(device)) before they are compiled."
            )


def not_finite(x: Tensor) -> tuple[int, ...] | None:
    """Where the first NaN or infinite value of features is, row first; ``None`` if all are finite."""
    step = max(1, LOOK_AT // max(1, x[:1].numel()))
    for first in range(0, x.shape[0], step):
        wrong = ~torch.isfinite(x[first : first + step])
        if wrong.any():
            row, *rest = wrong.nonzero()[0].tolist()
            return (first + row, *rest)
    return None


def settle_for_loss(graph, loss_fn: Callable) -> None:
    """Class ids of a floating-point dtype, as ``numpy.loadtxt`` gives them, become int64 where the loss wants classes.

    Raises:
        LabelError: they are no whole numbers.
    """
    y, name = graph.ndata.get("y"), _class_loss(loss_fn)
    if name is None or y is None or not y.dtype.is_floating_point or (y.dim() == 2 and y.shape[1] != 1) or y.dim() > 2:
        return
    known = y[~torch.isnan(y)]
    wrong = known[known != known.floor()]
    if wrong.numel():
        raise LabelError(
            f"{name} takes class ids, and graph.ndata['y'] holds {float(wrong[0]):.6g}: for targets of regression take "
            "F.mse_loss or F.l1_loss, for classes ids 0..C-1 (int64)."
        )
    dtype = str(y.dtype).removeprefix("torch.")
    say(
        f"graph.ndata['y'] of dtype {dtype} holds whole numbers: they are int64 class ids now, as {name} takes them "
        "(NaN: -100, unlabelled)."
    )
    graph.ndata["y"] = torch.where(torch.isnan(y), -100, y).to(torch.int64).reshape(-1)


def _class_loss(loss_fn) -> str | None:
    """The name of a loss of PyTorch's that takes class ids."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if loss_fn in (F.cross_entropy, F.nll_loss):
        return loss_fn.__name__
    return type(loss_fn).__name__ if isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


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
