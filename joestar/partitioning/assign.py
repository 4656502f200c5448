"""``joestar.partition``: which part every node belongs to."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from joestar.errors import ConfigError, GraphError
from joestar.graph_api import Graph
from joestar.kernels.cpu_partition import GapStream
from joestar.partitioning.labels import training_labels
from joestar.partitioning.partitioning import Partitioning, fingerprint_of
from joestar.whole_numbers import plain

METHODS = ("gap", "random", "metis")
GROWTH = 1.3
"""By how much balance costs more from one pass to the next."""
WEAKEST = 0.05
"""Least share of the last pass's cost."""
CHUNK = 1 << 20
"""Nodes between two reports of progress."""
MOST_COUNTERS = 1 << 27
"""Most counters per part and label: some 3 GB."""

Progress = Callable[[int, float], None]


def partition(
    graph: Graph,
    parts: int,
    *,
    method: str = "gap",
    passes: int = 10,
    cap: float = 1.5,
    balance: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Partitioning:
    """Divides the nodes of a graph into parts with few edges between them and alike training labels.

    GAP (thesis 4.3.2) streams the nodes ``passes`` times past the parts: each goes where most of its in-neighbours are,
    less a cost that grows with the nodes of its label there. One pass takes O(edges + nodes log parts); memory beside
    the graph is O(nodes + parts x classes). The result depends on the arguments alone, not on the number of threads.

    Args:
        graph: on the CPU; memory-mapped folders are read in place. Only in-edges are looked at, so store both
            directions of undirected graphs. Balanced are the classes of ``train_idx`` (of targets that are no classes:
            training nodes as such) and the rest.
        parts: from 1 to the number of nodes. Thousands cost little.
        method: ``"gap"``, ``"random"`` (parts of equal size) or ``"metis"`` (needs ``pip install joestar[metis]``;
            many times the memory).
        passes: of GAP. One is enough to be far better than random; about 10 come close to METIS's cut.
        cap: most nodes of a part, as a multiple of the mean; never exceeded (but by rounding up to whole nodes).
        balance: multiplies the cost of uneven labels; more means more alike parts and more edges between them.
        seed: where the stream of nodes begins; of ``"random"``, the permutation.
        progress: called with (number of the pass, share of it that is done) now and then.

    Raises:
        ConfigError: an impossible number of parts, passes, cap or balance; pymetis is not installed.
        GraphError: the graph has no nodes, or is not on the CPU.
    """
    parts, passes, seed = plain([parts, passes, seed])
    _check(graph, parts, method, passes, cap, balance)
    if method == "random":
        assignment = random_parts(graph.num_nodes, parts, seed)
    elif method == "metis":
        assignment = metis_parts(graph, parts, seed)
    else:
        assignment = _gap(graph, parts, passes, cap, balance, seed, progress or _silent)
    settings = {"method": method, "seed": seed}
    if method == "gap":
        settings |= {"passes": passes, "cap": cap, "balance": balance}
    return Partitioning(assignment, parts, seed, fingerprint_of(graph), settings)


def most_nodes(num_nodes: int, parts: int, cap: float) -> int:
    """The largest part that ``cap`` allows: at least the mean, rounded up."""
    return max(-(-num_nodes // parts), math.floor(cap * num_nodes / parts))


def strengths(graph: Graph, passes: int, balance: float) -> list[float]:
    """What an even share of a label costs in every pass, in neighbours.

    The last is Fennel's: with gamma = 1.5 and alpha = sqrt(k) m / n^1.5 the derivative at an even share is
    1.5 alpha sqrt(n / k) = 1.5 m / n, where m undirected edges are half of those stored. Before, balance costs less, so
    that parts first grow around neighbours.
    """
    last = 0.75 * balance * graph.num_edges / graph.num_nodes
    return [last * max(WEAKEST, GROWTH ** (1 + index - passes)) for index in range(passes)]


def random_parts(num_nodes: int, parts: int, seed: int) -> Tensor:
    """Parts of equal size, up to one node: int32 ``[num_nodes]``."""
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed), device="cpu")
    assignment = torch.empty(num_nodes, dtype=torch.int32, device="cpu")
    assignment[order] = (torch.arange(num_nodes, device="cpu") % parts).to(torch.int32)
    return assignment


def metis_parts(graph: Graph, parts: int, seed: int = 0) -> Tensor:
    """METIS's k-way partitioning of the graph with both directions of every edge: int32 ``[num_nodes]``."""
    try:
        import pymetis
    except ImportError as error:
        raise ConfigError("method 'metis' needs the package pymetis: pip install 'joestar[metis]'.") from error
    both = Graph(graph.indptr, graph.indices).to_bidirected().remove_self_loops()
    adjacency = pymetis.CSRAdjacency(both.indptr.numpy(), both.indices.numpy())
    _, found = pymetis.part_graph(parts, adjacency, options=pymetis.Options(seed=seed))
    return torch.tensor(found, dtype=torch.int32, device="cpu")


def _gap(graph: Graph, parts: int, passes: int, cap: float, balance: float, seed: int, progress: Progress) -> Tensor:
    labels, num_labels = training_labels(graph)
    if (num_labels + 1) * parts > MOST_COUNTERS:
        raise ConfigError(
            f"{parts:,} parts with {num_labels:,} classes each need {(num_labels + 1) * parts:,} counters; expected at "
            f"most {MOST_COUNTERS:,}. Choose fewer parts."
        )
    nodes = graph.num_nodes
    assignment = torch.from_numpy(np.full(nodes, -1, np.int32))  # NumPy asks for huge pages: fewer misses of the TLB
    limit = most_nodes(nodes, parts, cap)
    stream = GapStream(graph.indptr, graph.indices, labels, num_labels, assignment, parts, limit)
    start = int(torch.randint(nodes, (), generator=torch.Generator().manual_seed(seed), device="cpu"))
    for index, strength in enumerate(strengths(graph, passes, balance)):
        done = 0
        for first, last in _chunks(start, nodes):
            progress(index, done / nodes)
            stream.place(first, last, strength)
            done += last - first
    progress(passes, 0.0)
    return assignment


def _chunks(start: int, nodes: int) -> list[tuple[int, int]]:
    """The whole ring of nodes from ``start`` on, in pieces."""
    pieces = []
    for low, high in ((start, nodes), (0, start)):
        pieces += [(first, min(first + CHUNK, high)) for first in range(low, high, CHUNK)]
    return pieces


def _silent(index: int, share: float) -> None:
    pass


def _check(graph: Graph, parts: int, method: str, passes: int, cap: float, balance: float) -> None:
    if not isinstance(graph, Graph):
        raise GraphError(f"expected a joestar.Graph, got {type(graph).__name__}; joestar.load reads most formats.")
    if graph.num_nodes == 0:
        raise GraphError("the graph has no nodes, so there is nothing to partition.")
    if graph.device.type != "cpu":
        raise GraphError(f"expected the graph on the CPU, got {graph.device}; pass graph.to('cpu').")
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}.")
    if not _whole(parts) or not 1 <= parts <= graph.num_nodes:
        raise ConfigError(f"parts: expected a whole number from 1 to the {graph.num_nodes:,} nodes, got {parts!r}.")
    if not _whole(passes) or passes < 1:
        raise ConfigError(f"passes: expected a whole number, at least 1, got {passes!r}.")
    if not math.isfinite(cap) or cap < 1:
        raise ConfigError(f"cap: expected a multiple of the mean part, at least 1, got {cap!r}.")
    if not math.isfinite(balance) or balance < 0:
        raise ConfigError(f"balance: expected a finite number, at least 0, got {balance!r}.")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
