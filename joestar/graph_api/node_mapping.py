"""Which node is which: the ids of the user's files beside 0..N-1."""

import numpy as np
import torch
from torch import Tensor

from joestar.errors import GraphError


class NodeMapping:
    """A table of the ids that the nodes of a graph had where they came from; node ``i`` was ``raw[i]``.

    Args:
        raw: int64 ``[N]``, or an object array of distinct hashable ids (text).
    """

    def __init__(self, raw: np.ndarray):
        raw = np.asarray(raw)
        self.raw = raw.astype(np.int64) if raw.dtype.kind in "iu" else raw.astype(object)
        self._sorted: tuple | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the raw ids are integers."""
        return self.raw.dtype != object

    @property
    def is_identity(self) -> bool:
        """Whether raw ids and ids are the same."""
        return self.is_integer and bool((self.raw == np.arange(len(self.raw))).all())

    def __len__(self) -> int:
        return len(self.raw)

    def __eq__(self, other) -> bool:
        return isinstance(other, NodeMapping) and self.raw.dtype == other.raw.dtype and (
            self.raw.shape == other.raw.shape and bool((self.raw == other.raw).all())
        )  # fmt: skip

    __hash__ = None

    def __repr__(self) -> str:
        shown = ", ".join(repr(value) for value in self.raw[:3].tolist())
        return f"NodeMapping({len(self)} nodes: {shown}{', ...' if len(self) > 3 else ''})"

    def to_ids(self, raw) -> Tensor | int:
        """Ids of the graph for raw ids: int64 ``[n]`` for a list or array, an ``int`` for a single raw id.

        Raises:
            GraphError: a raw id that no node has.
        """
        values = _plain(raw)
        single = not isinstance(values, (list, tuple, range)) or self._is_one(values)
        wanted = [values] if single else list(values)
        found = self._of_integers(wanted) if self.is_integer else self._of_objects(wanted)
        return int(found[0]) if single else torch.from_numpy(found)

    def to_raw(self, ids):
        """Raw ids of the nodes ``ids``: a list for a list, array or tensor of ids, a single one for an ``int``.

        Raises:
            GraphError: an id out of range.
        """
        at = np.asarray(_plain(ids))
        if at.size and (at.dtype.kind not in "iu" or at.min() < 0 or at.max() >= len(self)):
            raise GraphError(f"to_raw needs node ids in 0..{len(self) - 1}; got {ids!r}.")
        found = self.raw[at.astype(np.int64)]
        return found.tolist() if at.ndim else (int(found) if self.is_integer else found)

    def _is_one(self, values) -> bool:
        """Whether a tuple is itself a raw id, as those of grids in NetworkX are."""
        return isinstance(values, tuple) and not self.is_integer and values in self._table()

    def _of_integers(self, wanted: list) -> np.ndarray:
        for value in wanted:
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise GraphError(f"the raw ids of this graph are integers; got {value!r} ({type(value).__name__}).")
        order, ranked = self._table()
        try:
            keys = np.array(wanted, dtype=np.int64)
        except OverflowError:
            raise GraphError(f"no node has the raw id {max(wanted, key=abs)!r}: it is beyond int64.") from None
        at = np.minimum(np.searchsorted(ranked, keys), len(ranked) - 1)
        unknown = np.flatnonzero(ranked[at] != keys)
        if len(unknown):
            raise self._unknown(wanted, unknown)
        return order[at]

    def _of_objects(self, wanted: list) -> np.ndarray:
        table = self._table()
        found = np.array([table.get(value, -1) for value in wanted], dtype=np.int64)
        if (found < 0).any():
            raise self._unknown(wanted, np.flatnonzero(found < 0))
        return found

    def _table(self):
        """Integers: (order, sorted raw ids); others: a dict. Made when it is first read."""
        if self._sorted is None:
            if self.is_integer:
                order = np.argsort(self.raw, kind="stable")
                self._sorted = order, self.raw[order]
            else:
                self._sorted = {value: position for position, value in enumerate(self.raw.tolist())}
        return self._sorted

    def _unknown(self, wanted: list, at: np.ndarray) -> GraphError:
        shown = self.to_raw(list(range(min(3, len(self)))))
        return GraphError(
            f"no node has the raw id {wanted[at[0]]!r} ({len(at)} of {len(wanted)} are unknown); the graph's raw ids "
            f"are such as {', '.join(map(repr, shown))}."
        )


def _plain(values):
    """Without the wrapper of a tensor or a column."""
    for method in ("tolist", "to_list"):
        if hasattr(values, method):
            return getattr(values, method)()
    return values
