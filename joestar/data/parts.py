"""What every reader hands over, its checks, and the graph made of it."""

import warnings
from dataclasses import dataclass, field

import numpy as np
import torch

from joestar.data.splits import choose_split
from joestar.errors import DataError
from joestar.graph_api import Graph

UNLABELLED = -100


@dataclass
class Parts:
    """A dataset as NumPy arrays.

    Attributes:
        where: the file or folder, for messages.
        name: the graph's name.
        indptr, indices: CSC, see ``edges_to_csc``.
        x: features ``[N, F]``, floating point; may be memory-mapped.
        y: labels as found: ``[N]`` or ``[N, 1]`` class ids (floats allowed, NaN = unlabelled), ``[N, T]`` targets.
        splits: the official ``train``, ``val`` and ``test`` ids, or empty.
    """

    where: str
    name: str
    indptr: np.ndarray
    indices: np.ndarray
    x: np.ndarray
    y: np.ndarray
    splits: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.indptr) - 1


def to_graph(parts: Parts, split: str, seed: int) -> Graph:
    """Checks the parts and builds a ``Graph`` with ``ndata["x"]`` and ``ndata["y"]`` and the three index sets.

    Args:
        split: ``"auto"``, ``"official"`` or ``"random"``, see ``joestar.load``.
        seed: of the random split.

    Raises:
        DataError: shapes or dtypes do not fit, labels or splits are out of range.
    """
    y = clean_labels(parts.y, parts.num_nodes, parts.where)
    _check_features(parts.x, parts.num_nodes, parts.where)
    labelled = labelled_nodes(y)
    if len(labelled) == 0:
        raise DataError(
            f"{parts.where}: not one of the {parts.num_nodes} nodes has a label; node classification needs some."
        )
    splits = choose_split(parts.splits, labelled, parts.num_nodes, split, seed, parts.where)
    ndata = {"x": as_tensor(np.ascontiguousarray(parts.x)), "y": as_tensor(y)}
    graph = Graph.from_csc(as_tensor(parts.indptr), as_tensor(parts.indices), ndata, validate=False)
    graph.name = parts.name
    graph.multilabel = y.ndim == 2
    graph.num_classes = y.shape[1] if y.ndim == 2 else int(y.max()) + 1
    graph.train_idx, graph.val_idx, graph.test_idx = (as_tensor(splits[part]) for part in ("train", "val", "test"))
    return graph


def clean_labels(y: np.ndarray, num_nodes: int, where: str) -> np.ndarray:
    """Class ids int64 ``[N]`` with -100 where unlabelled, or targets float32 ``[N, T]`` with NaN where unknown."""
    if y.ndim not in (1, 2) or len(y) != num_nodes:
        raise DataError(
            f"{where}: labels must be [{num_nodes}] class ids or [{num_nodes}, T] targets; got shape {list(y.shape)}."
        )
    if y.dtype.kind not in "iufb":
        raise DataError(f"{where}: labels must be numbers; got dtype {y.dtype}. Map class names to 0..C-1 first.")
    if y.ndim == 2 and y.shape[1] != 1:
        return _targets(y, where)
    y = y.reshape(-1)
    if y.dtype.kind == "f":
        missing = np.isnan(y)
        y = np.where(missing, UNLABELLED, y)
        if (y != np.floor(y)).any():
            raise DataError(f"{where}: class ids must be whole numbers; got {y[y != np.floor(y)][0]}.")
    y = y.astype(np.int64)
    wrong = y[(y < 0) & (y != UNLABELLED)]
    if len(wrong):
        raise DataError(
            f"{where}: class ids must be 0..C-1, or NaN or {UNLABELLED} for unlabelled nodes; got {wrong[0]} "
            f"on {len(wrong)} nodes."
        )
    return y


def labelled_nodes(y: np.ndarray) -> np.ndarray:
    """Ids of the nodes with a class, respectively with any known target."""
    return np.flatnonzero(~np.isnan(y).all(axis=1) if y.ndim == 2 else y != UNLABELLED)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory, read-only maps included (write to such a tensor and the process dies)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _targets(y: np.ndarray, where: str) -> np.ndarray:
    y = y.astype(np.float32)
    if np.isinf(y).any():
        row, column = np.argwhere(np.isinf(y))[0]
        raise DataError(f"{where}: multi-label targets must be finite; node {row}, task {column} is {y[row, column]}.")
    return y


def _check_features(x: np.ndarray, num_nodes: int, where: str) -> None:
    if x.ndim != 2 or len(x) != num_nodes or x.shape[1] == 0:
        raise DataError(f"{where}: features must be [{num_nodes}, F] with F > 0; got shape {list(x.shape)}.")
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise DataError(f"{where}: features must be float16, float32 or float64; got {x.dtype}.")
