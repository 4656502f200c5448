"""From edge lists to CSC: sorted; what happens to directions, duplicates and self-loops is chosen, counted and told."""

from dataclasses import dataclass

import numpy as np
import torch

from joestar.errors import DataError
from joestar.graph_api import Graph

COUNTED = 20_000_000
"""Edges up to which edges without a reverse are counted where none is added: it takes another sort."""


@dataclass(frozen=True)
class EdgeRules:
    """What to do with an edge list.

    Attributes:
        undirected: add the reverse of every edge that has none (edges that have one keep their own data).
        drop_duplicates: keep the first of equal edges. Where it is false and ``undirected`` true, every edge but
            self-loops gets a reverse of its own, also where there is one (``A + A.T``).
        drop_self_loops: leave out edges from a node to itself.
    """

    undirected: bool = True
    drop_duplicates: bool = True
    drop_self_loops: bool = True


@dataclass
class Structure:
    """A CSC structure and how it came about.

    Attributes:
        indptr: int64 ``[N + 1]``; indices: ``[E']``, int32 where ``N`` permits, else int64, ascending in every row.
        order: for each edge the position of the given edge whose data it has; ``None`` if it was not asked for.
        given: edges that were given; loops, duplicates: how many of them are self-loops, and copies of another.
        added: reverses that were added; one_way: edges that have no reverse, ``None`` if nobody counted.
    """

    indptr: np.ndarray
    indices: np.ndarray
    order: np.ndarray | None
    given: int
    loops: int
    duplicates: int
    added: int
    one_way: int | None
    rules: EdgeRules

    @property
    def changed(self) -> bool:
        """Whether the edges are others than those given."""
        loops, copies = self.loops and self.rules.drop_self_loops, self.duplicates and self.rules.drop_duplicates
        return bool(self.added or loops or copies)

    def sentence(self) -> str:
        """What was found, what was done about it, and the arguments that choose otherwise."""
        parts = [f"{self.given:,} edges given"]
        done = (("self-loop", self.loops, "drop_self_loops"), ("duplicate", self.duplicates, "drop_duplicates"))
        for what, count, option in done:
            dropped = getattr(self.rules, option)
            if count:
                what += "s" * (count > 1)
                parts.append(f"{count:,} {what} {'dropped' if dropped else 'kept'} ({option}={not dropped} otherwise)")
        if self.added:
            parts.append(f"{self.added:,} reverses added (undirected=False otherwise)")
        elif self.rules.undirected:
            parts.append("every edge has its reverse")
        elif self.one_way is None:
            parts.append("directed as given (undirected=True adds reverses)")
        elif self.one_way:
            parts.append(f"directed: {self.one_way:,} have no reverse (undirected=True adds them)")
        else:
            parts.append("every edge has its reverse")
        return f"{'; '.join(parts)}: {len(self.indices):,} edges."


def make_structure(
    sources: np.ndarray, targets: np.ndarray, num_nodes: int, rules: EdgeRules, where: str, *, order: bool = False
) -> Structure:
    """CSC of an edge list under ``rules``.

    One int64 key per edge (``dst * num_nodes + src``) is sorted: without ``order`` the peak is 16 bytes per edge,
    counting added reverses, beside the input. That is 52 GB for the 3.2 billion edges of ogbn-papers100M.

    Args:
        sources, targets: integers ``[E]`` in ``[0, num_nodes)``.
        where: named in messages. order: also find which given edge each edge is.

    Raises:
        DataError: an id is out of range.
    """
    _check_ids(sources, targets, num_nodes, where)
    keys, place = np.empty(len(sources), dtype=np.int64), None
    keys[:] = targets
    keys *= num_nodes
    keys += sources
    is_loop = np.asarray(sources == targets)
    loops = int(np.count_nonzero(is_loop))
    if order:
        place = np.arange(len(keys))
    if rules.drop_self_loops and loops:
        keys, place = keys[~is_loop], None if place is None else place[~is_loop]
    del is_loop
    keys, place = _sorted(keys, place)
    new = _first_of_equal(keys)
    duplicates = len(keys) - int(np.count_nonzero(new))
    one_way = None
    if rules.drop_duplicates and duplicates:
        keys, place = keys[new], None if place is None else place[new]
    del new
    before = len(keys)
    if rules.undirected:
        keys, place = _mirrored(keys, place, num_nodes, rules.drop_duplicates)
    elif len(keys) <= COUNTED:
        one_way = _without_reverse(keys, num_nodes)
    indptr, indices = _compressed(keys, num_nodes)
    return Structure(indptr, indices, place, len(sources), loops, duplicates, len(indices) - before, one_way, rules)


def edges_to_csc(sources: np.ndarray, targets: np.ndarray, num_nodes: int, *, mirror: bool, where: str):
    """(indptr, indices) without duplicates and self-loops; see ``make_structure``."""
    made = make_structure(sources, targets, num_nodes, EdgeRules(undirected=mirror), where)
    return made.indptr, made.indices


def to_symmetric(graph: Graph) -> Graph:
    """The undirected version of a graph: every edge in both directions, no duplicates, no self-loops.

    Node data, splits and name are shared with ``graph``.

    Raises:
        DataError: the graph has edge data, which has no meaning for the new edges.
    """
    if graph.edata:
        names = ", ".join(map(repr, graph.edata))
        raise DataError(
            f"to_symmetric: edge data {names} of graph {graph.name!r} cannot follow, since edges are added and merged. "
            "Clear `graph.edata` first, or symmetrise the edge list yourself."
        )
    targets = np.repeat(np.arange(graph.num_nodes, dtype=np.int64), np.diff(graph.indptr.cpu().numpy()))
    indptr, indices = edges_to_csc(
        graph.indices.cpu().numpy(), targets, graph.num_nodes, mirror=True, where=f"graph {graph.name!r}"
    )
    made = Graph.from_csc(
        torch.from_numpy(indptr).to(graph.device),
        torch.from_numpy(indices).to(graph.device, graph.indices.dtype),
        ndata=graph.ndata,
        validate=False,
    )
    return graph._describe(made)


def _sorted(keys: np.ndarray, place: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys in order, equal ones as they came; in place where nothing goes with them."""
    if place is None:
        keys.sort()
        return keys, None
    order = np.argsort(keys, kind="stable")
    return keys[order], place[order]


def _first_of_equal(keys: np.ndarray) -> np.ndarray:
    first = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first


def _reverse(keys: np.ndarray, num_nodes: int) -> np.ndarray:
    """Keys of the reverses, in the same order."""
    turned = np.remainder(keys, max(num_nodes, 1))
    turned *= num_nodes
    step = 1 << 24
    for start in range(0, len(keys), step):  # in pieces: no second array of quotients
        turned[start : start + step] += keys[start : start + step] // max(num_nodes, 1)
    return turned


def _without_reverse(keys: np.ndarray, num_nodes: int) -> int:
    """How many of the sorted keys have no reverse among them."""
    if not len(keys):
        return 0
    turned = np.sort(_reverse(keys, num_nodes))
    at = np.minimum(np.searchsorted(keys, turned), len(keys) - 1)
    return int(np.count_nonzero(keys[at] != turned))


def _mirrored(keys: np.ndarray, place: np.ndarray | None, num_nodes: int, merge: bool):
    """Sorted keys and those of the reverses; a loop is its own reverse."""
    turned = _reverse(keys, num_nodes)
    back = place
    if not merge:
        others = turned != keys
        turned, back = turned[others], None if place is None else place[others]
    both = np.concatenate([keys, turned])
    del turned
    both, place = _sorted(both, None if place is None else np.concatenate([place, back]))
    if not merge:
        return both, place
    first = _first_of_equal(both)
    return both[first], None if place is None else place[first]


def _compressed(keys: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.searchsorted(keys, np.arange(num_nodes + 1, dtype=np.int64) * num_nodes)
    np.remainder(keys, max(num_nodes, 1), out=keys)
    small = num_nodes <= np.iinfo(np.int32).max
    return indptr.astype(np.int64, copy=False), keys.astype(np.int32) if small else keys


def _check_ids(sources: np.ndarray, targets: np.ndarray, num_nodes: int, where: str) -> None:
    for side, ids in (("source", sources), ("destination", targets)):
        if len(ids) == 0:
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_nodes:
            raise DataError(
                f"{where}: {side} ids must lie in 0..{num_nodes - 1} ({num_nodes} nodes), but range from {low} to "
                f"{high}. Correct the number of nodes, or have them renumbered by joestar.data.from_tables."
            )
