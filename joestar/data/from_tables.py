"""``from_tables``: a graph from a table of edges and a table of nodes, as people have them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joestar.data import labels as label_forms
from joestar.data.archive import DAMAGED, check_npy
from joestar.data.columns import Ids, on_host
from joestar.data.labels import Labels, check_task
from joestar.data.parts import Options, Parts, to_graph
from joestar.data.relabel import Numbered, number_nodes
from joestar.data.splits import CHOICES, check_choice
from joestar.data.structure import EdgeRules, make_structure
from joestar.data.table import open_table
from joestar.errors import DataError
from joestar.graph_api import Graph, NodeMapping

SOURCES = ("source", "src", "from", "u", "head")
TARGETS = ("target", "dst", "to", "v", "tail", "destination")
WEIGHTS = ("weight", "w", "edge_weight")
IDS = ("id", "node", "node_id", "nodeid", "name")
LABELS = ("label", "y", "class", "target")
SPLITS = ("split",)


@dataclass
class Nodes:
    """What is known of the nodes besides their ids, and how they were numbered; what columns of ``x`` are called."""

    numbered: Numbered
    x: np.ndarray | None
    y: Labels | None
    splits: dict[str, np.ndarray]
    feature_names: list[str] | None = None


def from_tables(
    edges,
    nodes=None,
    *,
    source: str | int | None = None,
    target: str | int | None = None,
    weight: str | bool | None = None,
    edge_attr: Sequence[str] | None = None,
    id: str | int | None = None,
    features=None,
    label=None,
    split=None,
    seed: int | None = 0,
    task: str | None = None,
    fill: float | None = None,
    undirected: bool = False,
    drop_duplicates: bool | None = None,
    drop_self_loops: bool | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    name: str | None = None,
    verbose: bool = True,
) -> Graph:
    """A graph from a table of edges and, if there is one, a table of nodes; ids may be of any kind.

    Nodes become 0..N-1: in the order of the table of nodes, without one in the order of the sorted ids.
    ``graph.mapping`` leads from ids to what they were called and back. What was guessed or done is printed.

    Args:
        edges: path of a CSV, TSV (also ``.gz``) or Parquet file, a pandas or polars frame, or a dict of columns.
        nodes: likewise, a row per node; without it, nodes are those that edges name.
        source, target: columns of ``edges``, by name or position (of all, the index of a frame too). Default: columns
            called so, or the first two.
        weight: column for ``edata["edge_weight"]`` float32 ``[E]``; ``None``: one called ``weight`` or ``w``;
            ``False``: none.
        edge_attr: columns for ``edata["edge_attr"]`` float32 ``[E, D]``; ``None``: all others; ``[]``: none.
        id: column of ``nodes`` with their ids; ``None``: one called so, or the first.
        features: columns of ``nodes`` for ``ndata["x"]`` float32 ``[N, F]``; ``None``: all that are nothing else;
            ``[]``: none. Or an array ``[N, F]``, or the path of an ``.npy`` file: a row for each row of ``nodes``;
            without ``nodes``, row i is of the node with the id i.
        label: column of ``nodes`` for ``ndata["y"]``: text becomes classes (``graph.class_names``), whole numbers are
            classes, others targets; empty: unlabelled. Several columns: targets ``[N, T]``. ``None``: one called
            ``label``, ``y`` or ``class``, unless it is empty; ``False``: none. Or an array or ``.npy`` file, as for
            ``features``.
        split: a column of ``nodes`` with ``train``, ``val`` and ``test``; or shares of the labelled nodes, such as
            ``(0.6, 0.2, 0.2)``; ``None``: a column called ``split``, else ``"random"``, which is 60/20/20.
        seed: of the random split, a whole number of at least 0, taken modulo 2^32; ``None``: another one every time.
        task: ``"classes"`` or ``"regression"``; ``None``: by the labels, see ``label``.
        fill: number for missing features, weights and edge attributes; ``None``: they are an error.
        undirected: add the reverse of every edge that has none, with the data of its edge.
        drop_duplicates, drop_self_loops: whether equal edges, and edges from a node to itself, are left out. Default:
            they are kept, but duplicates are dropped where reverses are added.
        header: whether text files begin with names of columns; ``None``: looked at. delimiter: between fields.
        name: of the graph; default: that of the file of edges. verbose: print what was guessed and done.

    Raises:
        DataError: with the file, the column and the first line that is wrong.
    """
    check_task(task)
    asked = _named(source, target, weight, edge_attr)
    table = open_table(edges, "edges", header=header, delimiter=delimiter, asked=asked)
    notes = [note for note in (table.note(),) if note]
    ends = edge_columns(table, source, target)
    weight = _optional(table, weight, WEIGHTS, ends)
    attributes = _rest(table, edge_attr, [*ends, weight])
    for numbers in ([weight], attributes):  # a weight may be an attribute, too
        _check_roles(table, {"source": ends[:1], "target": ends[1:], "weight or edge_attr": numbers})
    numbers = [*attributes, weight]
    read = table.read(dict.fromkeys(ends, "id") | {name: "number" for name in numbers if name is not None})
    sides = (read[ends[0]], read[ends[1]])
    known = _read_nodes(nodes, sides, table, ends, (id, features, label, split, task, fill, header, delimiter), notes)
    edata = {}
    if weight:
        edata["edge_weight"] = _filled(table, weight, read[weight], fill).astype(np.float32)
    if attributes:
        columns = [_filled(table, key, read[key], fill) for key in attributes]
        edata["edge_attr"] = np.stack(columns, axis=1).astype(np.float32)
        notes.append(f"edge_attr: {', '.join(attributes)}")
    numbered = known.numbered
    options = Options(
        _choice(split, known.splits), seed, undirected, drop_duplicates, drop_self_loops, task, verbose
    )  # fmt: skip
    rules = options.rules(EdgeRules(False, False, False))
    structure = make_structure(
        numbered.sources, numbered.targets, len(numbered.raw), rules, table.where, order=bool(edata)
    )
    notes.insert(0, f"{ends[0]} -> {ends[1]}; {len(numbered.raw):,} nodes, {structure.sentence()}")
    parts = Parts(table.where, _name(edges, name), structure, known.x, known.y, known.splits, edata, notes)
    graph = to_graph(parts, Options(options.split, seed, task=task, verbose=False))
    graph.mapping, graph.feature_names = NodeMapping(numbered.raw), known.feature_names
    if verbose:
        _tell(parts, graph)
    return graph


def _tell(parts: Parts, graph: Graph) -> None:
    from joestar.data.parts import tell

    if graph.train_idx is not None:
        sizes = [len(getattr(graph, f"{part}_idx")) for part in ("train", "val", "test")]
        source = "from the table" if parts.splits else "random, by seed"
        parts.notes.append(f"split: {sizes[0]:,} train, {sizes[1]:,} val, {sizes[2]:,} test ({source})")
    tell(parts.where, parts.notes)


def _name(edges, name: str | None) -> str:
    if name is not None:
        return name
    return Path(edges).name.split(".")[0] if isinstance(edges, (str, os.PathLike)) else "tables"


# --- nodes ------------------------------------------------------------------------------------------------------------


def _read_nodes(nodes, sides: tuple[Ids, Ids], table, ends: list[str], chosen: tuple, notes: list[str]) -> Nodes:
    id, features, label, split, task, fill, header, delimiter = chosen
    x, y = _array(features, "features"), _array(label, "label")
    if nodes is None:
        return _without_table(sides, table, ends, (x, y, features, label, split, id), task)
    asked = _named(id, label, split if isinstance(split, str) else None, features)
    ids = IDS if id is None else ()
    found = open_table(nodes, "nodes", header=header, delimiter=delimiter, asked=asked, ids=ids)
    notes += [f"{found.where}: {note}" for note in (found.note(),) if note]
    key = _chosen(found, id, IDS, 0)
    labels = [] if y is not None else _labels(found, label, key)
    column = _optional(found, split if isinstance(split, str) and split not in CHOICES else None, SPLITS, [key])
    if not (split is None or isinstance(split, str)):
        column = None
    widths = [] if x is not None else _rest(found, features, [key, *labels, column])
    _check_roles(found, {"id": [key], "label": labels, "split": [column], "features": widths})
    roles = {key: "id"} | dict.fromkeys(widths, "number") | {name: "coded" for name in (*labels, column) if name}
    read = found.read(roles)
    numbered = number_nodes(sides, read[key], table, ends, found, key)
    count = len(numbered.raw)
    if widths:
        x = np.empty((count, len(widths)), dtype=np.float32)
        for place, name in enumerate(widths):
            x[:, place] = _filled(found, name, read.pop(name), fill)
        notes.append(f"features: {len(widths)} columns ({', '.join(widths[:4])}{', ...' if len(widths) > 4 else ''})")
    if label is None and labels and all(value is None for value in read[labels[0]].values):
        notes.append(f"{labels.pop()}: empty, the graph has no labels")
    given = y is not None
    y = label_forms.from_array(y, count, "label", task) if given else _of_columns(found, labels, read, task)
    if labels and y is not None:
        y.note = f"{', '.join(labels)}: {y.note}"
    splits = {}
    if column and (split is None or isinstance(split, str)):
        splits = label_forms.split_of(read[column], f"{found.where}, column {column!r}")
    return Nodes(numbered, _checked(x, count), y, splits, widths if widths and found.named else None)


def _without_table(sides, table, ends: list[str], chosen: tuple, task: str | None) -> Nodes:
    """Nodes are those that edges name; with arrays of features or labels, ids are their rows."""
    x, y, features, label, split, id = chosen
    wanted = {"features": features, "label": label, "id": id}
    if isinstance(split, str) and split not in CHOICES:
        wanted["split"] = split
    for what, value in wanted.items():
        if (isinstance(value, str) or _names_columns(value)) and value and not _is_npy(value):
            raise DataError(
                f"{what}={value!r} names columns of the nodes, and there is no table of nodes: give "
                f"nodes=...{_AS_ARRAY}"
            )
    rows = next((len(array) for array in (x, y) if array is not None), None)
    numbered = number_nodes(sides, None, table, ends, None, "", rows)
    labels = None if y is None else label_forms.from_array(y, len(numbered.raw), "label", task)
    return Nodes(numbered, _checked(x, len(numbered.raw)), labels, {})


def _labels(table, label, key: str) -> list[str]:
    if label is False:
        return []
    if isinstance(label, (list, tuple)):
        return [_column(table, name, "label") for name in label]
    found = _optional(table, label, LABELS, [key])
    return [found] if found else []


def _of_columns(table, labels: list[str], read: dict, task: str | None) -> Labels | None:
    if not labels:
        return None
    if len(labels) == 1:
        return label_forms.from_coded(read[labels[0]], f"{table.where}, column {labels[0]!r}", task, table.line)
    columns = []
    for name in labels:
        made = label_forms.from_coded(read[name], f"{table.where}, column {name!r}", "regression", table.line)
        columns.append(made.y)
    return label_forms.from_array(np.stack(columns, axis=1), len(columns[0]), table.where, task)


def _checked(x: np.ndarray | None, count: int) -> np.ndarray | None:
    if x is None:
        return None
    if x.dtype.kind not in "iufb" or x.ndim != 2 or len(x) != count:
        raise DataError(f"features must be numbers [{count}, F], a row per node; got {x.dtype} {list(x.shape)}.")
    bad = np.argwhere(~np.isfinite(x)) if x.dtype.kind == "f" else ()
    if len(bad):
        raise DataError(f"features must be finite, but row {bad[0][0]}, column {bad[0][1]} is {x[tuple(bad[0])]}.")
    return x if x.dtype.kind == "f" else x.astype(np.float32)


# --- columns ----------------------------------------------------------------------------------------------------------


def _named(*values) -> list[str | int]:
    """Names and positions of columns among what was asked for, and in lists of it."""
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return [one for one in flat if isinstance(one, (str, int)) and not isinstance(one, bool)]


def _is_npy(value) -> bool:
    return isinstance(value, (str, os.PathLike)) and str(value).endswith(".npy")


def _array(value, what: str) -> np.ndarray | None:
    """An array, or that of an ``.npy`` file; ``None`` for names of columns."""
    if isinstance(value, os.PathLike) or _is_npy(value):
        try:
            path = Path(value).expanduser()
            check_npy(path)
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except DAMAGED as error:
            raise DataError(f"{what}: {value} cannot be read as an .npy file of numbers ({error}).") from None
    if value is None or isinstance(value, (str, bool, int)) or _names_columns(value):
        return None
    return on_host(value)


def _names_columns(value) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, (str, int)) for name in value)


_AS_ARRAY = " (a list names columns; values, one per node, are an array: numpy.array([...]))"


def _check_roles(table, roles: dict[str, list]) -> None:
    """Raises ``DataError`` for a column that is asked for twice: an id as a number, a label as a feature."""
    taken: dict[str, str] = {}
    for role, names in roles.items():
        for name in (name for name in names if name is not None):
            if name in taken:
                twice = f"twice as {role}" if taken[name] == role else f"as {taken[name]} and as {role}"
                raise DataError(
                    f"{table.where}: the column {name!r} is asked for {twice}. Name others, or leave one of the two "
                    f"out, such as by label=False{_AS_ARRAY}."
                )
            taken[name] = role


def _column(table, name: str | int, what: str) -> str:
    if isinstance(name, int) and not isinstance(name, bool):
        if not 0 <= name < len(table.every):
            raise DataError(f"{table.where}: {what}={name} is no column; there are {len(table.every)}, from 0.")
        return table.every[name]
    if name not in table.names:
        raise DataError(
            f"{table.where}: there is no column {name!r} ({what}); there is: {', '.join(table.names)}{_AS_ARRAY}."
        )
    return name


def _chosen(table, name, usual: tuple[str, ...], place: int) -> str:
    if name is not None:
        return _column(table, name, "id")
    first = table.levels[0] if table.levels else table.names[place]
    return next((column for column in table.names if column.lower() in usual), first)


def edge_columns(table, source, target) -> list[str]:
    if len(table.names) < 2:
        raise DataError(
            f"{table.where}: a table of edges needs two columns, source and target; got {', '.join(table.names)}. "
            "Give delimiter=..., if fields are separated by something else."
        )
    found = []
    for given, usual, what in ((source, SOURCES, "source"), (target, TARGETS, "target")):
        named = next((column for column in table.names if column.lower() in usual), None)
        found.append(named if given is None else _column(table, given, what))
    for side in (0, 1):
        if found[side] is None:
            found[side] = next(name for name in table.names if name not in found)
    if found[0] == found[1]:
        raise DataError(f"{table.where}: source and target are both the column {found[0]!r}; give source= and target=.")
    return found


def _optional(table, name, usual: tuple[str, ...], taken: list) -> str | None:
    if name is False:
        return None
    if name is not None and name is not True:
        return _column(table, name, "column")
    return next((column for column in table.names if column.lower() in usual and column not in taken), None)


def _rest(table, names, taken: list) -> list[str]:
    """Columns that were named, or all that are nothing else."""
    if names is False:
        return []
    if names is not None:
        return [_column(table, name, "column") for name in ([names] if isinstance(names, str) else names)]
    return [name for name in table.names if name not in taken]


def _choice(split, official: dict):
    """What ``choose_split`` is asked for."""
    if isinstance(split, (tuple, list)) or split in CHOICES:
        check_choice(split)
        return split
    return "official" if official else "auto"


def _filled(table, name: str, values: np.ndarray, fill: float | None) -> np.ndarray:
    """The column without gaps; raises for missing and infinite values."""
    missing = np.isnan(values)
    if missing.any() and fill is None:
        rows = np.flatnonzero(missing)
        raise DataError(
            f"{table.where}: the column {name!r} has {len(rows)} missing values, the first in {table.line(rows[0])}. "
            "Give fill=0.0 (or another number), or leave the column out."
        )
    values = np.where(missing, fill, values) if missing.any() else values
    beyond = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
    if len(beyond):
        raise DataError(
            f"{table.where}: the column {name!r} must hold finite numbers of float32; {table.line(beyond[0])} has "
            f"{values[beyond[0]]}."
        )
    return values
