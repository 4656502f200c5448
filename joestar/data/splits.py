"""Training, validation and test sets: the official one, or a random one."""

import operator

import numpy as np

from joestar.errors import DataError

PARTS = ("train", "val", "test")
CHOICES = ("auto", "official", "random")
USUAL = (0.6, 0.2, 0.2)
SEEDS = 2**32
"""How many seeds ``RandomState`` has."""
ROUNDING = 1 + 2.0**-50
"""What a product with a sum of shares may fall short by: 0.7 + 0.1 is below 0.8."""
SplitChoice = str | tuple[float, float, float]
"""``"auto"`` (official if there is one), ``"official"``, ``"random"`` (60/20/20), or shares of a random one."""


def check_choice(split: SplitChoice) -> None:
    """Raises ``DataError`` unless ``split`` is a known choice, or shares for training, validation and test."""
    if isinstance(split, (tuple, list)):
        fine = len(split) in (2, 3) and all(isinstance(v, (int, float)) and 0 <= v <= 1 for v in split)
        if not fine or split[0] <= 0 or sum(split) > 1 + 1e-9:
            raise DataError(
                f"split: expected shares such as (0.6, 0.2, 0.2), at most 1 together, the first above 0; got {split}."
            )
    elif split not in CHOICES:
        raise DataError(
            f"split must be one of {', '.join(map(repr, CHOICES))}, or shares such as (0.6, 0.2, 0.2); got {split!r}."
        )


def split_seed(seed) -> int | None:
    """What ``RandomState`` is given: ``None``, another one every time, or a whole number modulo 2^32.

    Raises:
        DataError: it is neither ``None`` nor a whole number of at least 0; those of NumPy and torch are such.
    """
    if seed is None:
        return None
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise DataError(f"seed must be a whole number of at least 0, by which the split is drawn; got {seed!r}.")
    return number % SEEDS


def choose_split(
    official: dict[str, np.ndarray], labelled: np.ndarray, num_nodes: int, split: SplitChoice, seed: int, where: str
) -> dict[str, np.ndarray]:
    """The official split if it is wanted and there, else a random one; int64 ids, checked.

    Args:
        official: ids under ``train``, ``val``, ``test``; empty where the source has no split.
        labelled: ids of the nodes with a label.
        split: see ``SplitChoice``.

    Raises:
        DataError: no official split, or a split is out of range, overlapping, or holds unlabelled nodes.
    """
    check_choice(split)
    if isinstance(split, (tuple, list)):
        return random_split(labelled, seed, tuple(split))
    if split == "official" and not official:
        raise DataError(f"{where}: it has no official split. Use split='random', which is 60/20/20 by the seed.")
    if split == "random" or not official:
        return random_split(labelled, seed)
    made = {part: _ids(official[part], part, where) for part in PARTS}
    _check_sets(made, labelled, num_nodes, where)
    return made


def random_split(labelled: np.ndarray, seed: int | None, shares: tuple = USUAL) -> dict[str, np.ndarray]:
    """Shares of the labelled nodes, 60/20/20, in the order of ``RandomState(seed % 2**32).permutation``.

    Two shares are those of training and validation, the rest is for the test; of three, what is left is in no set.
    """
    order = labelled[np.random.RandomState(split_seed(seed)).permutation(len(labelled))].astype(np.int64)
    first, second, last = ends_of(shares, len(order))
    return dict(zip(PARTS, np.split(order[:last], [first, second]), strict=True))


def ends_of(shares: tuple, count: int) -> tuple[int, int, int]:
    """Where the shares of ``count`` nodes end."""
    first, second, last = (int(sum(shares[:many]) * ROUNDING * count) for many in (1, 2, 3))
    return first, second, count if len(shares) == 2 or sum(shares) > 1 - 1e-9 else last


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
