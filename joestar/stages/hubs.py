"""Hub nodes: those with the most influence on all training nodes, pinned into every macro-batch (thesis 4.3.3)."""

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import to_ids
from joestar.whole_numbers import plain

EDGES_AT_ONCE = 1 << 25
STAY = 0.5
"""A lazy random walk stays where it is with this probability."""


def influence(graph: Graph, train: Tensor, steps: int) -> Tensor:
    """Landing probabilities of reverse lazy random walks from the training nodes: float64 ``[num_nodes]``.

    Each walk begins at a training node and takes ``steps`` steps: it stays, or goes to a random in-neighbour, with
    probability one half each; where there is no in-neighbour it stays. The sum over walks is eq. 4.1; the sum over
    partitions of their scores is the same, as the walk is linear.
    """
    mass = torch.zeros(graph.num_nodes, dtype=torch.float64, device="cpu")
    mass.index_add_(0, train.to(torch.int64), torch.ones(train.shape[0], dtype=torch.float64, device="cpu"))
    for _ in range(steps):
        mass = _step(graph, mass)
    return mass


def hub_nodes(graph: Graph, count: int, steps: int, train: Tensor | None = None) -> Tensor:
    """The ``count`` nodes with the largest ``influence``, ascending, in the graph's id dtype.

    Nodes that no walk reaches are never hubs, so there may be fewer. Of equal ones the lower ids are taken.

    Args:
        steps: of the walks: layers of the model.
        train: training nodes; ``None``: ``graph.train_idx``.

    Raises:
        ConfigError: a negative count or number of steps, no training nodes, or what is no ids.
    """
    train = graph.train_idx if train is None else to_ids(train, "train", ConfigError)
    if train is None or train.numel() == 0:
        raise ConfigError("hub nodes are those that influence training nodes; the graph has none: set graph.train_idx.")
    count, steps = plain(count), plain(steps)
    for name, value in (("count", count), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"hub_nodes: {name} must be a whole number, at least 0; got {value!r}.")
    mass = influence(graph, train, steps)
    best = torch.argsort(mass, descending=True, stable=True)[:count]
    return best[mass[best] > 0].sort().values.to(graph.indices.dtype)


def _step(graph: Graph, mass: Tensor) -> Tensor:
    degrees = graph.indptr.diff()
    moving = torch.where(degrees > 0, (1 - STAY) * mass, 0.0)
    after = mass - moving
    share = moving / degrees.clamp(min=1)
    for first, last in row_pieces(graph.indptr, EDGES_AT_ONCE):
        sources = graph.indices[int(graph.indptr[first]) : int(graph.indptr[last])].to(torch.int64)
        after.index_add_(0, sources, share[first:last].repeat_interleave(degrees[first:last]))
    return after


def row_pieces(indptr: Tensor, edges: int) -> list[tuple[int, int]]:
    """Consecutive ranges of rows with at most ``edges`` edges each, or one row."""
    rows, pieces, first = indptr.shape[0] - 1, [], 0
    while first < rows:
        last = int(torch.searchsorted(indptr, int(indptr[first]) + edges, right=True)) - 1
        last = min(max(last, first + 1), rows)
        pieces.append((first, last))
        first = last
    return pieces
