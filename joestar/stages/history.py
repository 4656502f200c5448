"""Historical embeddings on the host: the latest hidden states of nodes, and how old they are (thesis 5.2.2)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joestar.errors import CheckpointError, ConfigError
from joestar.kernels.cpu_stages import fresh
from joestar.stages.history_rows import HistoryRows
from joestar.store.fill import host_gather, kernel_for
from joestar.whole_numbers import plain

NEVER = -1
"""Stamp of a row that was never pushed."""
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Slice:
    """Rows of one layer, for a macro-batch.

    Attributes:
        values: ``[m, width]`` in the table's dtype; 0 in rows that are not to be used.
        usable: bool ``[m]``: pushed before, and not older than the bound.
        age: int32 ``[m]``: macro-batches since the push; -1 where there was none.
        counts: rows that were never pushed, or have none; that are over the bound; sum and largest of the others' ages.
    """

    values: Tensor
    usable: Tensor
    age: Tensor
    counts: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.values.nbytes + self.usable.nbytes + self.age.nbytes


@dataclass(frozen=True)
class Staleness:
    """What was pulled from one layer since the last ``reset_counts``, and how old it was.

    Attributes:
        rows: of the table; pushed: those that have a value.
        pulled: rows asked for; missing: of these, never pushed, or without a row; too_old: of these, over the bound.
        mean_age, max_age: macro-batches, of the usable ones; ``None`` if there was none.
    """

    rows: int
    pushed: int
    pulled: int
    missing: int
    too_old: int
    mean_age: float | None
    max_age: int | None


@dataclass(eq=False)
class Replaced:
    """What a push writes over: ``values`` ``[m, width]`` and ``stamps`` ``[m]``, once ``done`` (int64 ``[1]``) is 1."""

    values: Tensor
    stamps: Tensor
    done: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.int64, device="cpu"))

    @property
    def is_there(self) -> bool:
        """Whether the push has happened."""
        return bool(self.done)


@dataclass(eq=False)
class Pushed:
    """What a macro-batch has pushed, on the host: per layer (ids, values)."""

    number: int
    layers: list[tuple[Tensor, ...]]


class HistoryStore:
    """Tables of hidden states in host memory, one per hidden layer, with an age per row.

    Time counts macro-batches: ``now`` of a pull or push is the number of the macro-batch in the run, which never falls.
    Not for use from several threads at once.

    Attributes:
        num_rows: rows of every layer's table.
        tables, stamps: per layer ``[rows, width]``, and int32 ``[rows]``: the macro-batch of the last push, -1 before
            the first.

    Args:
        num_nodes: of the graph.
        widths: numbers per row of every hidden layer, the first behind the input first.
        nodes: ids of the nodes that get a row, in every layer or per layer (see ``stages.history_rows``), or where
            these are; ``None``: all.
        dtype: of the tables: float32 or bfloat16.
        max_age: rows pushed more macro-batches ago than this are not used; ``None``: no bound.
        empty: makes tables and stamps of a shape and dtype: on the CPU; ``None``: ordinary memory, in huge pages.
        pinned: whether what is pulled is put into page-locked memory, for a GPU.
        shared: whether other processes write to the same tables.

    Raises:
        ConfigError: impossible widths, dtype, bound or node ids.
    """

    def __init__(
        self,
        num_nodes: int,
        widths: Sequence[int],
        nodes: Tensor | Sequence[Tensor] | HistoryRows | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        max_age: int | None = None,
        empty: Callable[..., Tensor] | None = None,
        pinned: bool = False,
        shared: bool = False,
    ):
        check_history(dtype, max_age)
        widths = plain(widths)
        if not widths or not all(isinstance(width, int) and width > 0 for width in widths):
            raise ConfigError(f"history: expected a positive width for every hidden layer, got {widths!r}.")
        empty = empty or _in_huge_pages
        self.num_nodes, self.max_age, self.pinned, self.shared = num_nodes, max_age, pinned, shared
        self._places = nodes if isinstance(nodes, HistoryRows) else HistoryRows(num_nodes, len(widths), nodes)
        self.num_rows = self._places.counts
        rows = [max(1, count) for count in self.num_rows]  # one that nothing points to, to look rows up in
        self.tables = [empty((n, width), dtype=dtype).zero_() for n, width in zip(rows, widths, strict=True)]
        self.stamps = [empty((n,), dtype=torch.int32).fill_(NEVER) for n in rows]
        self._met = _in_huge_pages((max(rows),), dtype=torch.int32)
        self._found: list[tuple | None] = [None] * len(widths)
        """Of the ids that were asked for last, per layer: a pull that is not given rows asks twice."""
        self.reset_counts()

    @staticmethod
    def nbytes_of(rows: Sequence[int], num_nodes: int, widths: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of host memory of one that is made for so many nodes with a row per layer, others in every layer."""
        rows = [max(1, count) for count in rows]
        tables = sum(count * (width * dtype.itemsize + 4) for count, width in zip(rows, widths, strict=True))
        return tables + 4 * max(rows) + 4 * num_nodes * len(widths)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(tensor.nbytes for tensor in (*self.tables, *self.stamps, self._met)) + self._places.nbytes

    @property
    def places(self) -> list[Tensor | None]:
        """Where the row of every node is, per layer, as ``MarkedRows`` takes it."""
        return self._places.tables

    def pull(self, layer: int, ids: Tensor, now: int, rows: Tensor | None = None) -> Slice:
        """The rows of ``ids`` ``[m]``, any of which may repeat, for macro-batch ``now``.

        Args:
            rows: int32 ``[m]``: those of the table that these are, if that is known.
        """
        self._check_time(now)
        if rows is None:
            self._rows(layer, ids)  # which are checked, and known from now on
        table = self.tables[layer]
        values = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype, device="cpu", pin_memory=self.pinned)
        given = Slice(values, *self._pulled(layer, ids, now, values, rows))
        missing, too_old, total, oldest = given.counts
        before = self._counts[layer]
        self._counts[layer] = (
            before[0] + len(ids), before[1] + missing, before[2] + too_old, before[3] + total, max(before[4], oldest)
        )  # fmt: skip
        return given

    def _pulled(
        self, layer: int, ids: Tensor, now: int, values: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple]:
        """Writes the rows to ``values``: (usable, age, counts) as of a ``Slice``."""
        rows, known = self._rows(layer, ids) if rows is None else (rows, None)
        kernel = kernel_for(values, "pull_hidden")
        return kernel(self.tables[layer], self.stamps[layer], rows, known, now, self.max_age, values)

    def push(
        self, layer: int, ids: Tensor, values: Tensor, now: int, written: Tensor | None = None,
        replaced: Replaced | None = None, once: bool = False,
    ) -> int:  # fmt: skip
        """Stores the rows of ``ids`` ``[m]``, each once; nodes without a row are passed over.

        Args:
            values: ``[m, width]`` of any floating-point dtype; no gradient is kept.
            written: bool ``[m]``: which of them to store; ``None``: all.
            replaced: room for what is written over (``room_for``); what is there already is not touched.
            once: no id stands twice, which is not looked at then.

        Returns:
            How many rows were stored.

        Raises:
            ConfigError: another shape or width than the table's, ids that are no nodes, or one that stands twice.
        """
        self._check_time(now)
        table = self.tables[layer]
        if values.shape != (ids.shape[0], table.shape[1]) or not values.dtype.is_floating_point:
            raise ConfigError(
                f"history of layer {layer}: expected values [{ids.shape[0]}, {table.shape[1]}] of a floating-point "
                f"dtype, got {values.dtype} {list(values.shape)}."
            )
        if written is not None and (written.dtype != torch.bool or written.shape != ids.shape):
            raise ConfigError(f"history: expected written bool [{ids.shape[0]}], got {list(written.shape)}.")
        rows, stored = self._rows(layer, ids)
        stored = stored if written is None else stored & written
        values = values.detach().to(table.dtype).contiguous()
        if not once:
            self._check_once(rows, ids, stored)
        kept = None
        if replaced is not None and not replaced.is_there:
            kept = replaced.values, replaced.stamps, replaced.done
        count = kernel_for(table, "push_hidden")(table, self.stamps[layer], rows, stored, now, values, kept)
        self._latest = max(self._latest, now)
        return count

    def room_for(self, layer: int, ids: Tensor) -> Replaced:
        """Room for what a push of these writes over."""
        table = self.tables[layer]
        values = _in_huge_pages((ids.shape[0], table.shape[1]), dtype=table.dtype)
        stamps = torch.empty(ids.shape[0], dtype=torch.int32, device="cpu")
        return Replaced(values, stamps, torch.zeros(1, dtype=torch.int64, device="cpu"))

    def has_row(self, layer: int, ids: Tensor) -> Tensor:
        """bool ``[m]``: which nodes have a row in a layer's table."""
        return self._places.has_row(layer, ids)

    def peek(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of rows and stamps as they are, for ``put_back``."""
        rows, _ = self._rows(layer, ids)
        return host_gather(self.tables[layer], rows), host_gather(self.stamps[layer], rows)

    def put_back(self, layer: int, ids: Tensor, values: Tensor, stamps: Tensor) -> None:
        """Makes rows what they were when ``peek`` gave ``values`` and ``stamps``; ids without a row are left out."""
        rows, known = self._rows(layer, ids)
        self.tables[layer][rows[known]] = values[known]
        self.stamps[layer][rows[known]] = stamps[known]
        self._latest = self._last_stamp()

    def _last_stamp(self) -> int:
        """Of what this process has pushed, as far as that is known."""
        return NEVER if self.shared else int(max(stamp.max() for stamp in self.stamps))

    def pushed_rows(self, layer: int) -> int:
        """Rows of a layer that have a value."""
        return int((self.stamps[layer] != NEVER).sum())

    def staleness(self, layer: int) -> Staleness:
        """What was pulled since ``reset_counts``, and how old it was."""
        pulled, missing, too_old, total, oldest = self._counts[layer]
        usable = pulled - missing - too_old
        return Staleness(
            self.num_rows[layer],
            self.pushed_rows(layer),
            pulled,
            missing,
            too_old,
            total / usable if usable else None,
            oldest if usable else None,
        )

    def reset_counts(self) -> None:
        """Forgets what was pulled so far."""
        self._counts = [(0, 0, 0, 0, 0) for _ in self.tables]
        self._latest = self._last_stamp()

    def clear(self) -> None:
        """Forgets every row, as after new weights were loaded."""
        for stamp in self.stamps:
            stamp.fill_(NEVER)
        self.reset_counts()

    def state_dict(self) -> dict[str, Any]:
        """Tables and stamps, not copied."""
        return self._state(list(self.tables), list(self.stamps))

    def _state(self, tables: list[Tensor], stamps: list[Tensor]) -> dict[str, Any]:
        return {"tables": tables, "stamps": stamps, "num_nodes": self.num_nodes, "rows": self._digests()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``CheckpointError`` unless it is of tables like these: their number, nodes, widths and dtype."""
        counts = self._all_rows() * 2
        ours, theirs = self._forms(self.tables + self.stamps, counts), None
        if isinstance(state, dict) and {"tables", "stamps", "num_nodes"} <= state.keys():
            theirs = self._forms([*state["tables"], *state["stamps"]])
        if ours != theirs or state["num_nodes"] != self.num_nodes:
            raise CheckpointError(
                f"history: expected tables and stamps {ours} of {self.num_nodes:,} nodes, got {theirs}. It belongs to "
                "another model, graph, partitioning or training set, or to an older version, whose tables had rows of "
                "nodes that no step reads. Begin with an empty history: load its 'model' into the model."
            )
        if state.get("rows", self._digests()) != self._digests():  # of as many nodes as there may be, where missing
            raise CheckpointError(
                "history: as many rows as expected, of other nodes: it belongs to another graph, partitioning or "
                "training set. Begin with an empty history: load its 'model' into the model."
            )

    def _digests(self) -> list[str]:
        """Of the nodes that the rows of every layer are of."""
        return self._places.digests

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave.

        Raises:
            CheckpointError: as ``check_state``; nothing was changed then.
        """
        self.check_state(state)
        for own, given in zip(self.tables + self.stamps, [*state["tables"], *state["stamps"]], strict=True):
            own.copy_(given)
        self.reset_counts()

    def _all_rows(self) -> list[int]:
        """Of the tables of a state."""
        return [table.shape[0] for table in self.tables]

    @staticmethod
    def _forms(tensors: list[Tensor], rows: list[int] | None = None) -> list[str]:
        """In words: dtypes and shapes, of so many ``rows`` each."""
        counts = [tensor.shape[0] for tensor in tensors] if rows is None else rows
        shapes = [[count, *tensor.shape[1:]] for count, tensor in zip(counts, tensors, strict=True)]
        return [f"{str(t.dtype).removeprefix('torch.')} {shape}" for t, shape in zip(tensors, shapes, strict=True)]

    def _rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows ``[m]``, 0 where there is none; bool ``[m]``: whether there is one)."""
        if not 0 <= layer < len(self.tables):
            raise ConfigError(f"history: expected a layer from 0 to {len(self.tables) - 1}, got {layer}.")
        last = self._found[layer]  # once: another thread may look others up
        if last is not None and last[0] is ids and last[1] == ids._version:
            return last[2:]
        if ids.dim() != 1 or (ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_nodes)):
            raise ConfigError(f"history: expected node ids [m] below {self.num_nodes:,}; got others.")
        rows, known = self._places.find(layer, ids)
        self._found[layer] = ids, ids._version, rows, known
        return rows, known

    def _check_once(self, rows: Tensor, ids: Tensor, stored: Tensor) -> None:
        twice = kernel_for(rows, "row_twice")(rows, stored, self._met)
        if twice >= 0:
            raise ConfigError(f"history: node {int(ids[twice])} stands twice in one push; which value counts?")

    def _check_time(self, now: int) -> None:
        if not self._latest <= now < 2**31:
            raise ConfigError(f"history: macro-batch {now} comes after {self._latest}; numbers never fall.")


def _in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that is read and written at random."""
    return fresh(math.prod(shape), dtype).view(shape)


def check_history(dtype, max_age) -> tuple[torch.dtype, int | None]:
    """Both, if tables of that dtype and a bound of that age can be.

    Raises:
        ConfigError: they cannot.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"history: expected float32 or bfloat16, got {dtype}.")
    max_age = plain(max_age)
    if max_age is not None and (isinstance(max_age, bool) or not isinstance(max_age, int) or max_age < 0):
        raise ConfigError(f"history: max_age must be a number of macro-batches, at least 0; got {max_age!r}.")
    return dtype, max_age
