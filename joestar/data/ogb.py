"""Node-property graphs of the Open Graph Benchmark, in the folders that the ``ogb`` package downloads.

Two layouts: ``raw/*.csv.gz`` (ogbn-arxiv, ogbn-products, ogbn-proteins) and ``raw/data.npz`` with
``raw/node-label.npz`` (ogbn-papers100M). Splits lie in ``split/<scheme>/{train,valid,test}.csv.gz``. Edges are
symmetrised unless the caller chooses otherwise: the CSV files of undirected graphs hold one direction only, and
citation graphs are trained undirected.
"""

import gzip
import itertools
import re
import zlib
from pathlib import Path

import numpy as np

from joestar.data.archive import Archive
from joestar.data.float32 import in_float32
from joestar.data.labels import from_array
from joestar.data.parts import Options, Parts
from joestar.data.splits import PARTS
from joestar.data.structure import EdgeRules, make_structure
from joestar.data.text_blocks import Block, blocks, columns_of
from joestar.errors import DataError

SCHEMES = {
    "ogbn-arxiv": "time",
    "ogbn-products": "sales_ranking",
    "ogbn-papers100M": "time",
    "ogbn-proteins": "species",
}
"""The graphs that can be read, and their official split."""

BLOCK = 1 << 24
"""Bytes of text that are parsed at a time."""
SPLIT_FILES = dict(zip(PARTS, ("train", "valid", "test"), strict=True))


def is_ogb(folder: Path) -> bool:
    """True if ``folder`` looks like a dataset folder of OGB."""
    return (folder / "raw").is_dir()


def folder_names(name: str) -> list[str]:
    """Names under which the ``ogb`` package may have stored the dataset ``name``."""
    under = name.replace("-", "_")
    return [under, f"{under}_pyg", f"{under}_dgl", name]


def how_to_get(name: str, root: Path) -> str:
    """Instructions for the user's own environment."""
    return (
        f"To get it: `pip install ogb` in an environment of your own, then run\n"
        f"  python -c \"from ogb.nodeproppred import NodePropPredDataset; NodePropPredDataset('{name}', '{root}')\""
    )


def read_ogb(folder: Path, name: str, options: Options) -> Parts:
    """Reads either layout.

    Raises:
        DataError: a file is missing or malformed, the dataset has several graphs, or several node types.
    """
    raw = folder / "raw"
    if (raw / "num-node-dict.csv.gz").exists() or (raw / "relations").is_dir():
        raise DataError(f"{folder}: this graph has several types of nodes; Joestar reads graphs with one type only.")
    read = _read_binary if (raw / "data.npz").exists() else _read_csv
    num_nodes, edges, x, y = read(raw)
    structure = make_structure(edges[0], edges[1], num_nodes, options.rules(EdgeRules()), str(raw))
    labels = from_array(y, num_nodes, str(folder), options.task or "classes")
    return Parts(str(folder), name, structure, x, labels, read_split(folder, name))


def _read_csv(raw: Path):
    num_nodes = _single(read_table(raw / "num-node-list.csv.gz", np.int64), raw)
    edges = read_table(raw / "edge.csv.gz", np.int64)
    if edges.shape[1] != 2:
        raise DataError(f"{raw / 'edge.csv.gz'}: expected two columns, source and destination; got {edges.shape[1]}.")
    if (raw / "node-feat.csv.gz").exists():
        x = read_table(raw / "node-feat.csv.gz", np.float32)
    elif (raw / "edge-feat.csv.gz").exists():
        x = _mean_of_edges(edges, read_table(raw / "edge-feat.csv.gz", np.float32), num_nodes, raw)
    else:
        raise DataError(f"{raw}: neither node-feat.csv.gz nor edge-feat.csv.gz is there; the nodes have no features.")
    y = read_table(raw / "node-label.csv.gz", np.float64)
    return num_nodes, edges.T, x, y


def _read_binary(raw: Path):
    data, labels = Archive(raw / "data.npz"), Archive(raw / "node-label.npz")
    num_nodes = _single(data.read("num_nodes_list"), raw)
    edges = data.read("edge_index")
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise DataError(f"{raw / 'data.npz'}: edge_index must be integers [2, E]; got {edges.dtype} {edges.shape}.")
    return num_nodes, edges, data.read("node_feat"), labels.read("node_label")


def read_table(path: Path, dtype) -> np.ndarray:
    """A gzipped CSV file of numbers, two-dimensional; an empty or quoted-empty field is NaN.

    Raises:
        DataError: the file is missing, cut short, or holds something that is no number; of float32, an infinite one.
    """
    if not path.exists():
        raise DataError(f"{path} is missing; {_listing(path.parent)} Is the download complete?")
    options = {"delimiter": ",", "ndmin": 2, "dtype": np.float64}
    if path.name == "node-label.csv.gz":
        options |= {"quotechar": '"', "converters": lambda text: float(text or "nan")}
    try:
        with gzip.open(path, "rt") as file:
            first = next((line for line in file if line.partition("#")[0].strip()), "")
            if first and np.issubdtype(dtype, np.floating):
                table = np.loadtxt(itertools.chain([first], file), **options)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected comma-separated numbers, gzipped, but {error}. Is it complete?") from error
    if not first:
        raise DataError(f"{path}: expected comma-separated numbers, but the file is empty. Is the download complete?")
    if np.issubdtype(dtype, np.integer):
        return _whole_numbers(path, first.partition("#")[0].count(",") + 1, dtype)
    if table.dtype != dtype:
        _check_finite(table, path)
    return table if table.dtype == dtype else in_float32(table, str(path))


def _whole_numbers(path: Path, width: int, dtype) -> np.ndarray:
    """A table of ids, of which none is cut from a decimal; what is behind ``#`` is a comment, as to ``loadtxt``."""
    places = list(range(width))
    without = (Block(_COMMENT.sub(b"", each.content), each.start, each.line) for each in blocks(path, BLOCK))
    pieces = [columns_of(block, path, width, places, ",", dtype) for block in without]
    return np.stack([np.concatenate(column) for column in zip(*pieces, strict=True)], axis=1)


_COMMENT = re.compile(rb"[ \t]*#[^\r\n]*")


def _check_finite(table: np.ndarray, path: Path) -> None:
    places = np.argwhere(np.isinf(table))
    if len(places):
        row, column = places[0]
        raise DataError(f"{path}: expected finite numbers; row {row}, column {column} is {table[row, column]}.")


def read_split(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The official split of a dataset folder; empty if there is none."""
    return {part: read_table(path, np.int64)[:, 0] for part, path in split_files(folder, name).items()}


def split_files(folder: Path, name: str) -> dict[str, Path]:
    """The files of ``read_split``.

    Raises:
        DataError: there are several splits, and none is the official one.
    """
    split = folder / "split"
    schemes = sorted(path.name for path in split.iterdir() if path.is_dir()) if split.is_dir() else []
    if not schemes:
        return {}
    scheme = SCHEMES.get(name)
    if scheme not in schemes:
        if len(schemes) > 1:
            raise DataError(f"{split}: expected one split scheme; found {', '.join(schemes)}. Remove all but one.")
        scheme = schemes[0]
    return {part: split / scheme / f"{file}.csv.gz" for part, file in SPLIT_FILES.items()}


def _single(counts: np.ndarray, raw: Path) -> int:
    if counts.size != 1:
        raise DataError(f"{raw}: expected one graph; the dataset holds {counts.size}. Joestar trains on one graph.")
    return int(counts.reshape(-1)[0])


def _mean_of_edges(edges: np.ndarray, values: np.ndarray, num_nodes: int, raw: Path) -> np.ndarray:
    """Mean feature of the edges at each node, both directions, as OGB's own ogbn-proteins baseline takes it."""
    if len(values) != len(edges):
        where = raw / "edge-feat.csv.gz"
        raise DataError(f"{where}: expected a row for each of {len(edges)} edges; got {len(values)}.")
    ends = edges.reshape(-1)
    degrees = np.maximum(np.bincount(ends, minlength=num_nodes), 1)
    sums = [np.bincount(ends, weights=np.repeat(column, 2), minlength=num_nodes) for column in values.T]
    return (np.stack(sums, axis=1) / degrees[:, None]).astype(np.float32)


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"{folder} holds {', '.join(names) or 'nothing'}."
