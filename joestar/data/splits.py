"""Training, validation and test sets: the official one, or a random one."""

import numpy as np

from joestar.errors import DataError

PARTS = ("train", "val", "test")
CHOICES = ("auto", "official", "random")


def check_choice(split: str) -> None:
    """Raises ``DataError`` unless ``split`` is a known choice."""
    if split not in CHOICES:
        raise DataError(f"split must be one of {', '.join(map(repr, CHOICES))}; got {split!r}.")


def choose_split(
    official: dict[str, np.ndarray], labelled: np.ndarray, num_nodes: int, split: str, seed: int, where: str
) -> dict[str, np.ndarray]:
    """The official split if it is wanted and there, else a random one; int64 ids, checked.

    Args:
        official: ids under ``train``, ``val``, ``test``; empty where the source has no split.
        labelled: ids of the nodes with a label.
        split: ``"auto"`` (official if there is one), ``"official"`` or ``"random"``.

    Raises:
        DataError: no official split, or a split is out of range, overlapping, or holds unlabelled nodes.
    """
    check_choice(split)
    if split == "official" and not official:
        raise DataError(f"{where}: it has no official split. Use split='random', which is 60/20/20 by the seed.")
    if split == "random" or not official:
        return random_split(labelled, seed)
    made = {part: _ids(official[part], part, where) for part in PARTS}
    _check_sets(made, labelled, num_nodes, where)
    return made


def random_split(labelled: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """60/20/20 of the labelled nodes in the order of ``RandomState(seed).permutation``."""
    order = labelled[np.random.RandomState(seed).permutation(len(labelled))].astype(np.int64)
    first, second = int(0.6 * len(order)), int(0.8 * len(order))
    return dict(zip(PARTS, np.split(order, [first, second]), strict=True))


def _ids(ids: np.ndarray, part: str, where: str) -> np.ndarray:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{where}: the {part} split must be a list of integer node ids; got {ids.dtype} of shape {list(ids.shape)}."
        )
    return ids.astype(np.int64)


def _check_sets(splits: dict[str, np.ndarray], labelled: np.ndarray, num_nodes: int, where: str) -> None:
    if not len(splits["train"]):
        raise DataError(f"{where}: the train split is empty. Use split='random' to draw another one.")
    has_label = np.zeros(num_nodes, dtype=bool)
    has_label[labelled] = True
    owner = np.full(num_nodes, -1, dtype=np.int8)
    for number, part in enumerate(PARTS):
        ids = splits[part]
        outside = ids[(ids < 0) | (ids >= num_nodes)]
        if len(outside):
            raise DataError(
                f"{where}: the {part} split names node {outside[0]}, but nodes are 0..{num_nodes - 1} "
                f"({len(outside)} ids are out of range)."
            )
        taken = ids[owner[ids] >= 0]
        if len(taken):
            other = PARTS[owner[taken[0]]]
            raise DataError(
                f"{where}: the splits {other} and {part} overlap in {len(taken)} nodes, for example node {taken[0]}."
            )
        owner[ids] = number
        repeated = len(ids) - np.count_nonzero(owner == number)
        if repeated:
            raise DataError(f"{where}: the {part} split names {repeated} nodes more than once.")
        if not has_label[ids].all():
            missing = ids[~has_label[ids]]
            raise DataError(
                f"{where}: the {part} split holds {len(missing)} nodes without a label, for example node {missing[0]}."
            )
