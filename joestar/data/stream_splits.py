"""Splits of a converted folder: checked as those that ``load`` reads, with no more memory than their ids take."""

import numpy as np

from joestar.data.labels import labelled_nodes
from joestar.data.rows import Rows
from joestar.data.splits import PARTS
from joestar.errors import DataError

MOST = 1 << 22
"""Rows of labels that are looked at together, at most."""
PER_VALUE = 32
"""Bytes of memory of a label while it is looked at."""


def split_ids(rows: Rows) -> np.ndarray:
    """The ids of a split.

    Raises:
        DataError: they are not integers ``[n]``.
    """
    if len(rows.shape) != 1 or rows.dtype.kind not in "iu":
        raise DataError(f"{rows.where}: a split must be integer node ids [n]; got {rows.dtype} {list(rows.shape)}.")
    return rows.read(0, rows.shape[0])


def checked_splits(splits: dict[str, np.ndarray], num_nodes: int, where: str) -> dict[str, np.ndarray]:
    """The splits as int64, in the order of ``PARTS``.

    Raises:
        DataError: an id is no node, or stands twice; the training set is there and empty.
    """
    for part, ids in splits.items():
        wrong = ids[(ids < 0) | (ids >= num_nodes)]
        if len(wrong):
            raise DataError(f"{where}: the {part} split names node {wrong[0]}, but nodes are 0..{num_nodes - 1}.")
    if "train" in splits and not len(splits["train"]):
        raise DataError(f"{where}: the train split is empty. Leave all splits out to have a random one drawn by load.")
    made = {part: splits[part].astype(np.int64) for part in PARTS if part in splits}
    joined = np.sort(np.concatenate([np.empty(0, np.int64), *made.values()]))
    twice = joined[1:][joined[1:] == joined[:-1]]
    if len(twice):
        raise DataError(f"{where}: the splits name {len(twice)} nodes twice, for example {twice[0]}.")
    return made


def check_labelled(splits: dict[str, np.ndarray], y: Rows, limit: int, where: str) -> None:
    """Raises ``DataError`` for a node of a split that has no label in ``y``, as ``ndata.y`` is stored.

    Args:
        limit: bytes to work in.
    """
    if not splits:
        return
    ordered = {part: np.sort(ids) for part, ids in splits.items()}
    bare: dict[str, list[np.ndarray]] = {part: [] for part in ordered}
    step = max(1, min(MOST, limit // PER_VALUE) // (1 if len(y.shape) == 1 else y.shape[1]))
    for first in range(0, y.shape[0], step):
        count = min(step, y.shape[0] - first)
        has_label = np.zeros(count, dtype=bool)
        has_label[labelled_nodes(y.read(first, count))] = True
        for part, ids in ordered.items():
            here = ids[np.searchsorted(ids, first) : np.searchsorted(ids, first + count)]
            bare[part].append(here[~has_label[here - first]])
    for part, found in bare.items():
        nodes = np.concatenate(found)
        if len(nodes):
            raise DataError(
                f"{where}: the {part} split holds {len(nodes)} nodes without a label, for example node {nodes[0]}."
            )
