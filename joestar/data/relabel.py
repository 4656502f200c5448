"""From raw ids to 0..N-1."""

from dataclasses import dataclass

import numpy as np

from joestar.data.columns import Ids
from joestar.errors import DataError


@dataclass
class Numbered:
    """Edges with new ids, int64 ``[E]`` each, and the raw id of every node (int64 or object ``[N]``)."""

    sources: np.ndarray
    targets: np.ndarray
    raw: np.ndarray


def number_nodes(
    sides: tuple[Ids, Ids], known: Ids | None, edges, ends: list[str], nodes, key: str, rows: int | None = None
) -> Numbered:
    """Numbers the nodes: in the order of ``known``; without it, those of the edges in sorted order.

    Args:
        sides: raw ids of sources and targets; known: those of the table of nodes.
        edges, ends: the table of edges and its columns, for messages; nodes, key: likewise.
        rows: rows of an array of features: ids are then positions in it, and stay.

    Raises:
        DataError: an edge names an unknown node, or two nodes have one id.
    """
    everyone = (*sides, known) if known is not None else sides
    if any(ids.texts is not None for ids in everyone):
        everyone = tuple(ids.as_text() for ids in everyone)
        if rows is not None:
            raise DataError(
                f"{edges.where}: ids are text, such as {everyone[0].raw(0)!r}: which row of the array is whose? Give a "
                "table of nodes with the ids, in the order of the rows: nodes={'id': [...]}."
            )
        return _by_text(everyone, known is not None, edges, ends, nodes, key)
    if rows is not None:
        return _as_rows(sides, rows, edges, ends)
    return _by_number(everyone, known is not None, edges, ends, nodes, key)


def _as_rows(sides: tuple[Ids, Ids], rows: int, edges, ends: list[str]) -> Numbered:
    for ids, column in zip(sides, ends, strict=True):
        wrong = np.flatnonzero((ids.values < 0) | (ids.values >= rows))
        if len(wrong):
            raise DataError(
                f"{edges.where}: {edges.line(wrong[0])}, column {column!r}: the id {ids.raw(wrong[0])} is no row of "
                f"the array, which has {rows}. Without a table of nodes ids are its rows, from 0; else give nodes=... "
                "with the ids in the order of the rows."
            )
    return Numbered(sides[0].values, sides[1].values, np.arange(rows))


def _by_number(everyone: tuple[Ids, ...], given: bool, edges, ends: list[str], nodes, key: str) -> Numbered:
    if given:
        raw = everyone[2].values
        order = np.argsort(raw, kind="stable")
        ranked = raw[order]
        _check_distinct(np.flatnonzero(ranked[1:] == ranked[:-1]), order, everyone[2], nodes, key)
    else:
        raw = ranked = _distinct(np.concatenate([ids.values for ids in everyone]))
        order = np.arange(len(raw))
    _check_some(raw, edges)
    found = []
    for ids, column in zip(everyone[:2], ends, strict=True):
        at = np.minimum(np.searchsorted(ranked, ids.values), len(ranked) - 1)
        _check_known(np.flatnonzero(ranked[at] != ids.values), ids, edges, column, nodes)
        found.append(order[at])
    return Numbered(*found, raw)


def _by_text(everyone: tuple[Ids, ...], given: bool, edges, ends: list[str], nodes, key: str) -> Numbered:
    if given:
        known = everyone[2]
        counts = np.bincount(known.values, minlength=len(known.texts))
        doubled = np.flatnonzero(counts[known.values] > 1)
        if len(doubled):
            same = np.flatnonzero(known.values == known.values[doubled[0]])
            raise _twice(known, same[0], same[1], nodes, key)
        names = [known.texts[place] for place in known.values.tolist()]
    else:
        names = sorted({text for ids in everyone for text in ids.texts})
    number = {name: position for position, name in enumerate(names)}
    raw = np.array(names, dtype=object)
    _check_some(raw, edges)
    found = []
    for ids, column in zip(everyone[:2], ends, strict=True):
        table = np.array([number.get(text, -1) for text in ids.texts], dtype=np.int64)
        made = table[ids.values] if len(table) else ids.values
        _check_known(np.flatnonzero(made < 0), ids, edges, column, nodes)
        found.append(made)
    return Numbered(*found, raw)


def _distinct(values: np.ndarray) -> np.ndarray:
    """Sorted distinct values; by sorting, as ``numpy.unique`` hashes, which is slow for millions."""
    values = np.sort(values)
    first = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def _check_some(raw: np.ndarray, edges) -> None:
    if not len(raw):
        raise DataError(f"{edges.where}: there are neither edges nor nodes: a graph needs at least one node.")


def _check_known(unknown: np.ndarray, ids: Ids, edges, column: str, nodes) -> None:
    if len(unknown):
        more = f" ({len(unknown)} edges name unknown nodes)" if len(unknown) > 1 else ""
        first = edges.line(unknown[0]) == "line 1"
        heading = (
            " If that line names the columns, rename them to source and target, or give header=True." if first else ""
        )
        raise DataError(
            f"{edges.where}: {edges.line(unknown[0])}, column {column!r}: the node {ids.raw(unknown[0])!r} is not in "
            f"{nodes.where}{more}. Add it there, remove the edge, or give no table of nodes.{heading}"
        )


def _check_distinct(equal: np.ndarray, order: np.ndarray, known: Ids, nodes, key: str) -> None:
    if len(equal):
        first = equal[np.argmin(order[equal + 1])]
        raise _twice(known, order[first], order[first + 1], nodes, key)


def _twice(known: Ids, one: int, other: int, nodes, key: str) -> DataError:
    return DataError(
        f"{nodes.where}: the id {known.raw(one)!r} of column {key!r} stands in {nodes.line(one)} and again in "
        f"{nodes.line(other)}. A node has one row; remove one, or name another column with id=..."
    )
