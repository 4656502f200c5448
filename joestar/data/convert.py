"""``joestar convert``: datasets of any size, from the files in which they are published to a folder for ``load``.

Edges are sorted outside of memory (``external_sort``), features and labels are copied in pieces. What is done is noted
in a journal in the folder, which is called ``NAME.partial-...`` until it is complete: the same call goes on after it
was killed, or after the disk was full.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from joestar.data.convert_inputs import Inputs, check_text, chooser, find_inputs
from joestar.data.degrees import degrees_of
from joestar.data.edge_sources import Edges, ParquetEdges, array_edges, check_unchanged, fingerprint, text_edges
from joestar.data.external_sort import MOST_NODES, Sorter, highest_id
from joestar.data.folder_meta import META, PARTIAL
from joestar.data.folder_writer import FolderWriter, check_target, full
from joestar.data.journal import Journal
from joestar.data.ogb_download import download
from joestar.data.parts import Options, tell
from joestar.data.progress import Progress, silent
from joestar.data.rows import npy_rows, npz_rows
from joestar.data.sizes import bytes_of
from joestar.data.stream_nodes import DTYPES, Labels, check_features, features_dtype, write_features
from joestar.data.stream_splits import check_labelled, checked_splits
from joestar.data.structure import EdgeRules
from joestar.data.table import PARQUET
from joestar.errors import ConfigError, DataError

LEAST = 1 << 20
"""Bytes below which pieces would become too small."""
SPARSE, MANY = 50, 10_000_000
"""A number of nodes that is taken from the largest id is doubted beyond ``MANY``, if it is ``SPARSE`` times that of
edges."""


def convert(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    features: str | os.PathLike | None = None,
    labels: str | os.PathLike | None = None,
    num_nodes: int | None = None,
    undirected: bool | None = None,
    drop_duplicates: bool | None = None,
    drop_self_loops: bool | None = None,
    dtype: str | None = None,
    task: str | None = None,
    check: bool = False,
    memory: str | int = "4GiB",
    header: bool | None = None,
    delimiter: str | None = None,
    columns: tuple[str | int, str | int] | None = None,
    root: str | os.PathLike = "dataset",
    overwrite: bool = False,
    verbose: bool = True,
    progress: Progress = silent,
) -> Path:
    """Writes a dataset on disk as a folder for ``joestar.load``, in bounded memory.

    Called again after it was stopped by whatever cause it goes on where it was, if neither the files nor the arguments
    that decide what is written have changed (``memory`` may).

    Args:
        source: a folder that the ``ogb`` package downloads (``raw/*.csv.gz`` or ``raw/data.npz``); MAG240M's folder
            (the citations among papers); a folder with ``edges.npy``, ``edges.csv`` or ``edges.parquet``, and if you
            like ``features.npy``, ``labels.npy`` and ``train_idx.npy``, ``val_idx.npy``, ``test_idx.npy``; a file of
            edges: ``.npy`` ``[2, E]`` or ``[E, 2]``, ``.npz`` (keys ``edge_index``, ``x``, ``y``), CSV, TSV, Parquet.
            Ids are whole numbers 0..N-1. Or ``"ogb:ogbn-papers100M"``, ``"ogb:mag240m"``: downloaded by the package
            ``ogb`` (``pip install joestar[ogb]``) into ``root``, if it is not there.
        features, labels: ``.npy`` files ``[N, F]`` and ``[N]`` or ``[N, T]``, a row per node.
        num_nodes: N. ``None``: as many as rows of features or labels, else the largest id and one.
        undirected, drop_duplicates, drop_self_loops: as in ``joestar.load``. ``None``: what the format says (OGB,
            MAG240M and ``.npz``: all three; others: as given).
        dtype: of the features, ``"fp32"``, ``"fp16"``, ``"bf16"``. ``None``: float16 stays, others become float32.
        task: ``"classes"`` or ``"regression"`` of labels ``[N]``; default: classes.
        check: look for NaN and infinite features.
        memory: how much may be used beside what Python and PyTorch take, ``"4GiB"`` or bytes.
        header, delimiter, columns: of text files; see ``joestar.data.from_tables``. ``columns``: (source, target).
        overwrite: replace a converted folder in which nothing else lies. verbose: print what was done.
        progress: see ``joestar.data.progress``.

    Returns:
        The folder.

    Raises:
        DataError: a file is missing, damaged or of another form; it names the file and row. The disk is full.
        ConfigError: an unknown dtype or task; header, delimiter or columns of edges that are no such table.
    """
    limit = _checked(memory, dtype, task, num_nodes)
    target = check_target(Path(folder), overwrite)
    named = os.fspath(source).startswith("ogb:")
    source = download(os.fspath(source), Path(root).expanduser()) if named else Path(source).expanduser()
    extra = [None if path is None else Path(path).expanduser() for path in (features, labels)]
    inputs = find_inputs(source, *extra, limit)
    check_target(Path(folder), overwrite, (source, *inputs.files))
    check_text(inputs, header, delimiter, columns)
    rules = Options(undirected=undirected, drop_duplicates=drop_duplicates, drop_self_loops=drop_self_loops).rules(
        inputs.usual
    )
    request = {
        "files": [fingerprint(path) for path in inputs.files], "source": str(source.absolute()), "nodes": num_nodes,
        "rules": dataclasses.asdict(rules), "dtype": dtype, "task": task, "check": check,
        "text": [header, delimiter, columns],
    }  # fmt: skip
    tag = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]
    writer, complete = None, False
    try:
        writer = FolderWriter(target, overwrite=overwrite, tag=tag, resume=True)
        journal = Journal(writer.folder, request)
        if not journal.complete:
            work = _Work(inputs, writer, journal, limit, progress)
            work.run(rules, num_nodes, dtype, task or inputs.task, check, (header, delimiter, columns))
            check_unchanged(inputs.files, request["files"])
        done, complete = read_edges(writer.folder), True
        writer.settle()
    except OSError as error:
        raise full(target, error) from error
    except DataError as error:
        if complete:
            raise DataError(f"{error} The graph is kept in {writer.folder}: the same command then names it.") from None
        if writer is not None:  # of a file: once it is mended, nothing of this is of use
            writer.discard()
        raise
    finally:
        if writer is not None:
            writer.close()
    if verbose:
        others = sorted(path.name for path in target.parent.glob(f"{target.name}{PARTIAL}*"))
        hint = f"{', '.join(others)} beside it are of other conversions; remove them if they are given up"
        tell(str(target), [_sentence(rules, done)], done["notes"], [hint] * bool(others))
    return target


def read_edges(folder: Path) -> dict[str, Any]:
    """What ``meta.json`` of a complete folder says of the conversion of its edges."""
    return json.loads((folder / META).read_text())["edges"]


class _Work:
    """A conversion: its files, its journal, and the memory that it may use."""

    def __init__(self, inputs: Inputs, writer: FolderWriter, journal: Journal, limit: int, progress: Progress):
        self.inputs, self.writer, self.journal, self.limit, self.progress = inputs, writer, journal, limit, progress

    def run(self, rules: EdgeRules, num_nodes: int | None, dtype, task, check: bool, text: tuple) -> None:
        """All phases; those that are done are passed over."""
        inputs, journal = self.inputs, self.journal
        if inputs.x is not None:
            check_features(inputs.x, None)
        number = self._known_number(num_nodes)
        if inputs.x is not None:
            check_features(inputs.x, number)
        facts = None if number is None else self._labels(number, task)  # they may be wrong, and edges take long
        edges = self._edges(text)
        if number is None:
            number = journal.once("nodes", lambda: self._number(edges))
            facts = self._labels(number, task)
        counts = Sorter(self.writer, journal, rules, number, self.limit).run(edges, self.progress)
        if inputs.x is not None:
            write_features(
                inputs.x, self.writer, journal, features_dtype(inputs.x, dtype), self.limit, check, self.progress
            )
        self.progress("checksums", 0, 0)
        degrees = degrees_of(npy_rows(self.writer.folder / "indptr.npy"), max(1, self.limit // 64))
        source = {"converted": Path(self.inputs.edges).name, "rules": dataclasses.asdict(rules)}
        others = ", ".join(name or "one without a name" for name in edges.others)
        notes = inputs.notes + [f"columns of edges that are not converted: {others}"] * bool(others)
        self.writer.complete(
            name=inputs.name, **facts, in_degree=degrees, self_loops=counts["kept"], directed=not rules.undirected,
            source=source, edges=counts | {"notes": notes},
        )  # fmt: skip

    def _edges(self, text: tuple) -> Edges:
        """The edges, parsed or unpacked if need be."""
        header, delimiter, columns = text
        path, folder = self.inputs.edges, self.writer.folder
        source, destination = columns or (None, None)
        if path.suffix.lower() in PARQUET:
            return ParquetEdges(path, chooser(path, source, destination))
        if path.suffix in (".npy", ".npz"):
            rows = npy_rows(path) if path.suffix == ".npy" else npz_rows(path, self.inputs.key)
            return array_edges(rows, self.journal, folder, self.limit, self.progress)
        if self.inputs.layout is not None:
            header, delimiter = self.inputs.layout
        choose = chooser(path, source, destination)
        return text_edges(path, header, delimiter, choose, self.journal, folder, self.limit, self.progress)

    def _known_number(self, asked: int | None) -> int | None:
        """How many nodes there are, if somebody says so beside the edges."""
        rows = [part.shape[0] for part in (self.inputs.x, self.inputs.y) if part is not None]
        found = next((n for n in (asked, self.inputs.num_nodes, *rows) if n is not None), None)
        return None if found is None else _in_range(found, str(self.inputs.edges))

    def _number(self, edges: Edges) -> int:
        """How many nodes there are, by the largest id."""
        found = highest_id(edges, self.limit, self.progress) + 1
        if MANY < found <= MOST_NODES and found > SPARSE * edges.count:
            raise DataError(
                f"{edges.where}: the largest id is {found - 1}, but there are {edges.count} edges only: ids must be "
                "0..N-1. joestar.data.from_tables numbers others; or say num_nodes= (--nodes)."
            )
        return _in_range(found, edges.where)

    def _labels(self, number: int, task: str | None) -> dict[str, Any]:
        """Writes labels and splits; what ``meta.json`` says of them."""
        inputs, facts = self.inputs, {"num_classes": None, "multilabel": False, "class_names": None}
        where = str(inputs.edges)
        labels = None if inputs.y is None else Labels(inputs.y, number, task)
        splits = checked_splits(inputs.splits, number, where)
        if labels is not None:
            found = labels.write(self.writer, self.limit, self.progress)
            facts |= {key: found[key] for key in ("num_classes", "multilabel")}
            check_labelled(splits, npy_rows(self.writer.folder / "ndata.y.npy"), self.limit, where)
        for part, ids in splits.items():
            self.writer.write(f"{part}_idx", ids)
        return facts


def _in_range(nodes: int, where: str) -> int:
    if not 0 < nodes <= MOST_NODES:
        raise DataError(f"{where}: expected 1 to {MOST_NODES:,} nodes; got {nodes:,}.")
    return nodes


def _checked(memory, dtype: str | None, task: str | None, num_nodes: int | None) -> int:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    if task not in (None, "classes", "regression"):
        raise ConfigError(f"task must be 'classes' or 'regression'; got {task!r}.")
    if num_nodes is not None and not 0 < num_nodes <= MOST_NODES:
        raise ConfigError(f"num_nodes must be 1 to {MOST_NODES:,}; got {num_nodes}.")
    limit = bytes_of(memory)
    if limit < LEAST:
        raise DataError(f"memory={memory!r} is too little to work in: give at least {LEAST >> 20}MiB.")
    return limit


def _sentence(rules: EdgeRules, counts: dict[str, Any]) -> str:
    """What was done to the edges."""
    parts = [f"{counts['given']:,} edges given"]
    if counts["loops"]:
        parts.append(f"{counts['loops']:,} self-loops {'dropped' if rules.drop_self_loops else 'kept'}")
    parts.append("reverses added" if rules.undirected else "directed as given")
    parts.append("duplicates dropped" if rules.drop_duplicates else "duplicates kept")
    return f"{'; '.join(parts)}: {counts['written']:,} edges."
