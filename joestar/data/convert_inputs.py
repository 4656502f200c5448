"""What ``joestar convert`` reads: which files of a source are edges, features, labels and splits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from joestar.data import ogb
from joestar.data.archive import DAMAGED, Archive
from joestar.data.from_tables import edge_columns
from joestar.data.nameless import without_index
from joestar.data.rows import MemoryRows, Rows, npy_rows, npz_keys, npz_rows
from joestar.data.splits import PARTS
from joestar.data.stream_nodes import TextRows
from joestar.data.stream_splits import split_ids
from joestar.data.structure import EdgeRules
from joestar.data.table import ENDS, PARQUET, TEXT, is_table, only_one
from joestar.errors import ConfigError, DataError

CITATIONS = Path("processed/paper___cites___paper/edge_index.npy")
PAPERS = Path("processed/paper")
"""Where MAG240M has the citations, and features and labels of its papers."""
READ = {"edge_index", "symmetric", "x", "node_feat", "y", "node_label", "num_nodes_list", *(f"{p}_idx" for p in PARTS)}
"""Keys of ``.npz`` archives."""
AS_GIVEN = EdgeRules(False, False, False)


@dataclass
class Inputs:
    """The files of a source.

    Attributes:
        name: of the graph. edges: its file; ``key``: which array of it, of an archive.
        num_nodes: ``None``: as many as there are features or labels, else the largest id and one.
        x, y: features ``[N, F]`` and labels ``[N]`` or ``[N, T]``. splits: arrays of ids.
        usual: what the format has done with edges. task: of the labels, if the format says so.
        layout: (header, delimiter) of edges in text whose format says so.
        files: all that is read, to see whether something changed. notes: what to tell.
    """

    name: str
    edges: Path
    key: str | None = None
    num_nodes: int | None = None
    x: Rows | None = None
    y: Rows | None = None
    splits: dict[str, np.ndarray] = field(default_factory=dict)
    usual: EdgeRules = AS_GIVEN
    task: str | None = None
    layout: tuple[bool, str] | None = None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_inputs(source: Path, features: Path | None, labels: Path | None, limit: int) -> Inputs:
    """Looks at a source: a folder of OGB, of MAG240M or with ``edges.*``; or a file of edges.

    Raises:
        DataError: nothing that is known is there, or a file is damaged.
    """
    if not source.exists():
        raise DataError(f"{source}: there is no such file or folder. {_KNOWN}")
    found = _of_folder(source, limit) if source.is_dir() else _of_file(source)
    for what, given, usual in (("x", features, "features.npy"), ("y", labels, "labels.npy")):
        if given is not None:
            setattr(found, what, npy_rows(given))
            found.files = [*(path for path in found.files if path != source / usual), given]
    if found.edges.parent == source:  # a folder of one's own
        read = {path.resolve() for path in found.files}
        data = (path for path in source.iterdir() if path.name.endswith(_DATA))
        others = sorted(path.name for path in data if path.resolve() not in read)
        found.notes += [f"files that are not converted: {', '.join(others)}"] * bool(others)
    return found


_KNOWN = (
    "joestar convert reads folders of OGB (raw/), of MAG240M (processed/), folders with edges.npy, edges.csv or "
    "edges.parquet, and such files; 'ogb:ogbn-products' is downloaded by the ogb package."
)


def _of_folder(folder: Path, limit: int) -> Inputs:
    if (folder / CITATIONS).is_file():
        return _of_mag(folder)
    if ogb.is_ogb(folder):
        return _of_ogb(folder, limit)
    edges, nodes = only_one(folder, "edges", (".npy", *ENDS)), only_one(folder, "nodes", ENDS)
    if edges is None:
        raise DataError(f"{folder}: none of its files is known. {_KNOWN}")
    if nodes is not None:
        raise DataError(
            f"{nodes}: joestar convert reads no table of nodes, which says whose row is which. joestar.load reads the "
            "folder (edges as edges.csv), and joestar.data.save(joestar.load(folder), out) writes the same as convert; "
            f"or give convert {edges} alone, and --features, --labels with a row per id."
        )
    made = Inputs(folder.name, edges, files=[edges])
    for what, name in (("x", "features.npy"), ("y", "labels.npy")):
        if (folder / name).is_file():
            setattr(made, what, npy_rows(folder / name))
            made.files.append(folder / name)
    for part in PARTS:
        path = folder / f"{part}_idx.npy"
        if path.is_file():
            made.splits[part] = split_ids(npy_rows(path))
            made.files.append(path)
    return made


_DATA = (".npy", ".npz", ".csv", ".csv.gz", ".tsv", ".tsv.gz", *PARQUET)
"""How names of files end that may be meant for a part of the graph."""


def _of_file(path: Path) -> Inputs:
    made = Inputs(path.name.partition(".")[0], path, files=[path])
    if path.suffix == ".npz":
        keys = npz_keys(path)
        both = "symmetric" in keys and bool(_number(path, "symmetric"))
        made.key, made.usual = "edge_index", EdgeRules(undirected=not both)
        if "x_indptr" in keys:
            raise DataError(
                f"{path}: its features are sparse: joestar.data.save(joestar.load(path), folder) writes it."
            )
        for what, names in (("x", ("x", "node_feat")), ("y", ("y", "node_label"))):
            key = next((name for name in names if name in keys), None)
            if key is not None:
                setattr(made, what, npz_rows(path, key))
        made.splits = {part: split_ids(npz_rows(path, f"{part}_idx")) for part in PARTS if f"{part}_idx" in keys}
        if "num_nodes_list" in keys:
            made.num_nodes = _number(path, "num_nodes_list")
        if "x" in keys:
            made.notes.append("features stay as they are (joestar.load of an archive standardises each column)")
        others = sorted(set(keys) - READ)
        made.notes += [f"keys that are not converted: {', '.join(others)}"] * bool(others)
    elif path.suffix != ".npy" and not is_table(path):
        raise DataError(f"{path}: expected .npy, .npz, {', '.join((*TEXT, *PARQUET))}, or .gz behind text. {_KNOWN}")
    return made


def _number(path: Path, key: str) -> int:
    """A single number of an archive."""
    try:
        return int(Archive(path).read(key).reshape(-1)[0])
    except (*DAMAGED, IndexError) as error:
        raise DataError(f"{path}: expected a number under {key!r}, but it cannot be read ({error}).") from error


def _of_ogb(folder: Path, limit: int) -> Inputs:
    raw, name = folder / "raw", next(
        (known for known in ogb.SCHEMES if folder.name in ogb.folder_names(known)), folder.name
    )  # fmt: skip
    if (raw / "num-node-dict.csv.gz").exists() or (raw / "relations").is_dir():
        raise DataError(f"{folder}: this graph has several types of nodes; Joestar reads graphs with one type only.")
    made = Inputs(name, raw, usual=EdgeRules(), task="classes", splits=ogb.read_split(folder, name))
    made.files = list(ogb.split_files(folder, name).values())
    if (raw / "data.npz").exists():
        data, labels = raw / "data.npz", raw / "node-label.npz"
        made.edges, made.key, made.files = data, "edge_index", [data, labels, *made.files]
        made.x, made.y = npz_rows(data, "node_feat"), npz_rows(labels, "node_label")
        made.num_nodes = _single(npz_rows(data, "num_nodes_list").read(0, 2), raw)
        return made
    made.edges, made.layout = raw / "edge.csv.gz", (False, ",")
    if not made.edges.exists():
        raise DataError(f"{made.edges} is missing. Is the download complete?")
    counts = raw / "num-node-list.csv.gz"
    made.num_nodes = _single(ogb.read_table(counts, np.int64), raw)
    features = raw / "node-feat.csv.gz"
    if not features.exists():
        raise DataError(
            f"{raw}: node-feat.csv.gz is missing. Graphs whose features come from edges, as ogbn-proteins, are read by "
            "joestar.load and written by joestar.data.save."
        )
    made.x = TextRows(features, made.num_nodes, limit)
    made.y = MemoryRows(ogb.read_table(raw / "node-label.csv.gz", np.float64), str(raw / "node-label.csv.gz"))
    made.files += [made.edges, counts, features, raw / "node-label.csv.gz"]
    return made


def _of_mag(folder: Path) -> Inputs:
    """The graph of citations among MAG240M's papers."""
    edges, x, y = folder / CITATIONS, folder / PAPERS / "node_feat.npy", folder / PAPERS / "node_label.npy"
    for path in (x, y):
        if not path.is_file():
            raise DataError(f"{path} is missing. Is the download complete?")
    splits, files = {}, [edges, x, y]
    if (folder / "split_dict.pt").is_file():
        files.append(folder / "split_dict.pt")
        splits = _mag_splits(folder / "split_dict.pt")
    return Inputs("mag240m-c", edges, None, None, npy_rows(x), npy_rows(y), splits, EdgeRules(), "classes", files=files)


def _mag_splits(path: Path) -> dict[str, np.ndarray]:
    """``train`` and ``valid``; of the test nodes the labels are not public."""
    try:
        with torch.serialization.safe_globals(_arrays()):
            found = torch.load(path, weights_only=True)
        arrays = {part: np.asarray(found[name]).reshape(-1) for part, name in (("train", "train"), ("val", "valid"))}
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(f"{path}: expected a dict with 'train' and 'valid' ids ({first}).") from error
    return {part: split_ids(MemoryRows(ids, f"{path}, {part}")) for part, ids in arrays.items()}


def _arrays() -> list:
    """What pickled NumPy arrays are made of, under the names that NumPy 1 and 2 give it: no other code is run."""
    from numpy._core import multiarray

    made = [np.ndarray, np.dtype, *(getattr(np.dtypes, name) for name in np.dtypes.__all__)]
    for package in ("numpy.core", "numpy._core"):
        made += [(getattr(multiarray, name), f"{package}.multiarray.{name}") for name in ("_reconstruct", "scalar")]
    return made


def _single(counts: np.ndarray, raw: Path) -> int:
    if counts.size != 1:
        raise DataError(f"{raw}: expected one graph; the dataset holds {counts.size}. Joestar trains on one graph.")
    return int(counts.reshape(-1)[0])


def check_text(inputs: Inputs, header: bool | None, delimiter: str | None, columns: tuple | None) -> None:
    """Raises ``ConfigError`` where one of these would be passed over: edges in arrays, or in a format's own text."""
    own = inputs.layout is None and is_table(inputs.edges)
    used = {"header": own and inputs.edges.suffix.lower() not in PARQUET, "columns": own}
    used["delimiter"] = used["header"]
    for name, value in (("header", header), ("delimiter", delimiter), ("columns", columns)):
        if value is not None and not used[name]:
            forms = f"{', '.join(TEXT)} or {', '.join(PARQUET)}" if name == "columns" else ", ".join(TEXT)
            raise ConfigError(
                f"{name}={value!r} is for edges in tables of one's own ({forms}), and {inputs.edges} is none: leave it "
                "out."
            )


class _Columns:
    """Names of columns with the file that has them, as ``edge_columns`` takes them."""

    def __init__(self, names: list[str], every: list[str], where: str):
        self.names, self.every, self.where = names, every, where


def chooser(path: Path, source, target) -> Callable[[list[str]], list[str]]:
    """From the names of columns to those of sources and destinations, of which the index of a data frame is none."""

    def choose(names: list[str]) -> list[str]:
        return edge_columns(_Columns(without_index(names, (source, target))[0], names, str(path)), source, target)

    return choose
