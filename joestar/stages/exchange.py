"""Historical embeddings between host and device: what a macro-batch reads, and when what it wrote counts.

The rule, whatever threads do: macro-batch ``m`` of a run reads what the macro-batches up to ``m - 2`` have pushed, as
it is loaded while ``m - 1`` is in use; the first of an epoch reads all that came before.

Several ranks, each with a macro-batch ``m`` of its own parts, write to the same tables on the host. A rank writes what
it has pushed itself, so that no two write the same row under the same number. They meet twice per macro-batch: when
none reads for ``m - 1`` any more, and when all have written what ``m`` reads. The first of an epoch reads what two have
pushed, and ranks meet between the two: what a state has left to one rank may be of rows that another has pushed since.

Over several hosts, each with a part of the tables (``stages.host_history``), what counts for ``m`` goes to its host
behind the first meeting, where a rank writes it as its own; behind the second one, rows of other hosts are fetched for
all pieces of ``m``. Threads that have met take part in both, whatever is over by then. For a state nobody may load.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from joestar.errors import CheckpointError, ConfigError
from joestar.locks import synchronize
from joestar.stages.device_history import DeviceHistory
from joestar.stages.exchanged import Marked, Pulls, Ranks, Rows
from joestar.stages.history import HistoryStore, Pushed, Replaced
from joestar.stages.history_rows import MarkedRows
from joestar.stages.history_state import check_place, check_pushes
from joestar.stages.host_history import HostHistory, check_whole
from joestar.stages.partitions import PartitionBatch

_NOTHING: tuple[Callable, Any] = (lambda: None, None)


def exchanged_rows(macro: PartitionBatch, tables: Sequence[Tensor | None]) -> tuple[MarkedRows, MarkedRows]:
    """(Halo nodes, whose hidden rows are read; inner ones with rows that are worth keeping).

    Args:
        tables: of every layer, as of ``MarkedRows``.
    """
    return MarkedRows(macro.ids, macro.halo, tables), MarkedRows(macro.ids, macro.inner, tables, placed=True)


def rows_of(macro: PartitionBatch, slots: Tensor, half: int, reads: MarkedRows, keeps: MarkedRows) -> Rows:
    """What a macro-batch reads and keeps, from the slots of its local nodes and what ``exchanged_rows`` found."""
    pulls, pull_ids, pull_rows = reads.at(slots)
    pushes, push_ids, _ = keeps.at(slots)
    return Rows(half, pulls, pushes, pull_ids, push_ids, pull_rows, macro.number, macro.sees)


def seen_by(base: int, index: int) -> int:
    """Up to which number pushes count for macro-batch ``index`` of an epoch whose first one has the number ``base``."""
    return base + index - (1 if index == 0 else 2)


class Exchange:
    """The tables on the host, the slices on the device, and what is under way between them.

    Used by the thread of the steps and the one that loads.

    Args:
        store: the tables, of which several ``ranks`` have one. ranks: that write to them; ``None``: this process alone.

    Attributes:
        apart: the tables, if other hosts have others.
        latest: number of the last macro-batch that was shown, -1 before the first.
        epoch, base: the epoch that it belongs to, and the number of that one's first macro-batch.
        nodes: of the macro-batches shown so far; pulls: what they have pulled, per layer.
    """

    def __init__(self, store: HistoryStore, device: DeviceHistory, ranks: Ranks | None = None):
        self.store, self.device, self.ranks = store, device, ranks
        self.apart = store if isinstance(store, HostHistory) else None
        self._lock = threading.RLock()
        self._begun, self._turn = 0, None
        self._last_exchanged = _NOTHING
        self.clear()

    def clear(self) -> None:
        """Forgets every row."""
        with self._lock:
            self.store.clear()
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.store.reset_counts()
        self.latest, self.epoch, self.base, self.nodes = -1, None, 0, 0
        self.pulls = [Pulls() for _ in self.store.tables]
        self._out: list[Rows] = []
        self._waiting: list[Pushed] = []
        self._undo: list[tuple[Pushed, list[Replaced]]] = []

    @property
    def is_new(self) -> bool:
        """Whether no macro-batch has been used since all rows were forgotten."""
        return self.latest < 0 and not (self._out or self._waiting or self._undo)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Macro-batches that are shown within are only looked at, before the first one is used: none counts."""
        epoch, base = self.epoch, self.base
        try:
            yield
        finally:  # nothing was pushed: tables are as they were
            with self._lock:
                self._begin_anew()
                self.epoch, self.base, self._turn = epoch, base, None

    # --- an epoch's macro-batches ---

    def number_epoch(self, epoch: int) -> int:
        """The number of an epoch's first macro-batch: the one that it had, if it is the latest one."""
        if epoch != self.epoch:
            self.epoch, self.base = epoch, self.latest + 1
        return self.base

    def check_turn(self, epoch: int) -> None:
        """Raises ``ConfigError`` if another epoch has begun since this one did."""
        if epoch != self.epoch:
            raise ConfigError(
                f"epoch {epoch} over partitions cannot go on: epoch {self.epoch} has begun since, and what hidden rows "
                "were then is gone. Finish an epoch, or leave it, before the next one."
            )

    def begin(self, index: int) -> None:
        """Before macro-batch ``index`` of the epoch is loaded, perhaps once more: the tables as they were for it.

        In the thread of the steps; all ranks come here.
        """
        self._begun += 1
        if self.ranks is not None:  # nobody loads
            self.ranks.any(f"macro-batch {index} of an epoch over partitions", False)
        with self._lock:
            self._wait()
            self._collect(self._out)
            self._out, self._turn = [], None  # nothing is in use
            self._rewind(seen_by(self.base, index))
        if self.apart is not None:
            self.apart.forget_expected()

    def _meet(self, where: str, stopped: Callable[[], bool]) -> None:
        """Waits for the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.meet(f"{self._begun}/{where}", stopped)

    def _wait(self) -> None:
        if self.device.device.type == "cuda":
            synchronize(self.device.device)

    # --- loading ---

    def expect(self, macro: PartitionBatch) -> None:
        """A whole macro-batch, before pieces that it may be cut into: rows of other hosts come for all at once."""
        if self.apart is not None:
            self.apart.expect(macro.number, macro.halo_ids)

    def fits(self, macro) -> bool:
        """Whether there is room for a macro-batch's rows."""
        if not isinstance(macro, PartitionBatch):
            return True
        reads, keeps = self._exchanged(macro)
        found, rooms = (*reads.counts, *keeps.counts), (*self.device.pulls, *self.device.pushes)
        return all(count <= room for count, room in zip(found, rooms, strict=True))

    def _exchanged(self, macro: PartitionBatch) -> tuple[MarkedRows, MarkedRows]:
        """As ``exchanged_rows``; known of the macro-batch that was asked for last."""
        asked, found = self._last_exchanged
        if asked() is not macro:
            self._last_exchanged = found = _NOTHING  # as large as the next one, which takes its memory
            found = exchanged_rows(macro, self.store.places)
            self._last_exchanged = weakref.ref(macro), found
        return found

    def prepare(self, macro, slots: Tensor, half: int) -> Rows:
        """What a macro-batch reads and keeps, from the slots of its local nodes; from any thread."""
        if not isinstance(macro, PartitionBatch):
            layers = len(self.store.tables)
            nobody = Marked(slots[:0], [slots[:0].to(torch.bool)] * layers)
            return Rows(half, nobody, nobody, [macro.ids[:0]] * layers, [macro.ids[:0]] * layers)
        rows = rows_of(macro, slots, half, *self._exchanged(macro))
        self._last_exchanged = _NOTHING
        if self.apart is not None:  # where rows are is known to their hosts
            rows.pull_rows = None
        return rows

    def load(self, rows: Rows, stopped: Callable[[], bool] | None = None) -> int:
        """Brings rows into their half, on the current stream, behind the steps that used it; returns their bytes.

        Args:
            stopped: whether there is no need to wait for other ranks any more.
        """
        slices = []
        if rows.number is not None:
            self._write_for(rows, _never if stopped is None else stopped)
            with self._lock:
                known = [None] * len(rows.pull_ids) if rows.pull_rows is None else rows.pull_rows
                pairs = enumerate(zip(rows.pull_ids, known, strict=True))
                slices = [self.store.pull(layer, ids, rows.number, where) for layer, (ids, where) in pairs]
        rows.pulled = [given.counts for given in slices]
        self.device.load(rows.half, rows.pulls, rows.pushes, slices)
        return rows.pulls.nbytes + rows.pushes.nbytes + sum(given.nbytes for given in slices)

    def _write_for(self, rows: Rows, stopped: Callable[[], bool]) -> None:
        """What a macro-batch sees is in the tables, and no more; all pieces of one that was cut see the same."""
        first = rows.number != self._turn
        if first:
            self._meet(f"{rows.number}/read", stopped)
        with self._lock:
            self._collect(self._out[:-1])  # the last one may be in use
        if first:
            self._route(rows.sees)
        with self._lock:
            self._apply(rows.sees - 1)
        if first and rows.sees == rows.number - 1:  # those of two numbers may be of the same rows, on different ranks
            self._meet(f"{rows.number}/older", stopped)
        with self._lock:
            self._apply(rows.sees)
        if first:
            self._meet(f"{rows.number}/written", stopped)
            if self.apart is not None:
                with self.apart.hosts.all_or_none():
                    self.apart.fetch(rows.number)
            self._turn = rows.number

    def show(self, rows: Rows, nodes: int) -> None:
        """The rows that were loaded last are those of the steps to come."""
        with self._lock:
            self.device.show()
            if rows.number is None:
                return
            self.latest = rows.number
            self._out.append(rows)
            self.nodes += nodes
            for layer, (missing, old, ages, oldest) in enumerate(rows.pulled):
                seen = self.pulls[layer]
                seen.rows += rows.pull_ids[layer].numel()
                seen.missing, seen.too_old, seen.ages = seen.missing + missing, seen.too_old + old, seen.ages + ages
                seen.oldest = max(seen.oldest, oldest)

    # --- pushes ---

    def _collect(self, out: list[Rows]) -> None:
        """Brings back what these have pushed so far; those that may push more stay in the list."""
        for rows in list(out):
            collected = self.device.collected(rows.half, rows.push_counts)
            layers = [(ids[which], values) for ids, (which, values) in zip(rows.push_ids, collected, strict=True)]
            if any(ids.numel() for ids, _ in layers):
                self._waiting.append(Pushed(rows.number, layers))
            self.device.forget(rows.half, rows.push_counts)  # behind that: an interrupt loses nothing
            if rows is not self._out[-1]:
                self._out.remove(rows)

    def _route(self, upto: int) -> None:
        """What was pushed by macro-batches up to this number goes to the host of its rows; all ranks do so together."""
        if self.apart is None:
            return
        with self.apart.hosts.all_or_none():
            with self._lock:
                due = [pushed for pushed in self._waiting if pushed.number <= upto]
            found = self.apart.routed(due)
            with self._lock:
                self._waiting[: len(due)] = found

    def _apply(self, upto: int) -> None:
        """Writes what was pushed by macro-batches up to this number into the tables."""
        while self._waiting and self._waiting[0].number <= upto:
            pushed = self._waiting[0]
            if self._undo and self._undo[-1][0].number != pushed.number:
                self._undo = []
            if not self._undo or self._undo[-1][0] is not pushed:  # else an interrupt came between
                room = [self.store.room_for(layer, ids) for layer, (ids, _) in enumerate(pushed.layers)]
                self._undo.append((pushed, room))
            for layer, (ids, values) in enumerate(pushed.layers):
                replaced = self._undo[-1][1][layer]
                self.store.push(layer, ids, values, pushed.number, replaced=replaced, once=True)
            self._waiting.pop(0)

    def _rewind(self, upto: int) -> None:
        """Takes back what macro-batches behind this number have written, so that it counts later."""
        while self._undo and self._undo[-1][0].number > upto:
            pushed, before = self._undo[-1]
            for layer, ((ids, _), old) in enumerate(zip(pushed.layers, before, strict=True)):
                if old.is_there:
                    self.store.put_back(layer, ids, old.values, old.stamps)
            if not self._waiting or self._waiting[0] is not pushed:
                self._waiting.insert(0, pushed)
            self._undo.pop()

    # --- state ---

    def state_dict(self, cut: bool = False, moment: str = "") -> dict[str, Any]:
        """Tables, not copied, and what is under way; nothing of it changes until the next step.

        Several ranks call it together, and all get the state of all; over several hosts rank 0 does, and nobody loads.

        Args:
            cut: pieces of the macro-batch in use are still to be loaded: what the next one sees is not yet written.
            moment: of the run, which is that of all ranks.
        """
        if self.ranks is not None:
            cut = self.ranks.any(f"step.state_dict over partitions, which all ranks call, {moment}", cut)
        with self._lock:
            self._wait()
            self._collect(self._out)
            if not cut and self.apart is None:
                self._apply(self.latest - 1)
            waiting = [self._plain(pushed) for pushed in self._waiting]
            undo = [{**self._plain(pushed), "before": self._before(pushed, old)} for pushed, old in self._undo]
        waiting, undo = self._of_all("waiting", waiting), self._of_all("undo", undo)
        return {
            "tables": self.store.state_dict(), "latest": self.latest, "epoch": self.epoch, "base": self.base,
            "waiting": waiting, "undo": undo,
        }  # fmt: skip

    def _before(self, pushed: Pushed, old: list[Replaced]) -> list[list[Tensor]]:
        """What a push wrote over, or, of a layer where it was interrupted before, what is there."""
        pairs = enumerate(zip(pushed.layers, old, strict=True))
        return [
            [each.values, each.stamps] if each.is_there else list(self.store.peek(layer, ids))
            for layer, ((ids, _), each) in pairs
        ]

    def _plain(self, pushed: Pushed) -> dict[str, Any]:
        rank = 0 if self.ranks is None else self.ranks.rank
        return {"number": pushed.number, "rank": rank, "layers": [list(pair) for pair in pushed.layers]}

    def _of_all(self, name: str, own: list[dict]) -> list[dict]:
        """Entries of all ranks, older ones first: those of one rank, which may be of the same rows, in their order."""
        if self.ranks is None:
            return own
        found = self.ranks.joined(f"step.state_dict over partitions, {name}", own)
        return sorted(found, key=lambda entry: entry["number"])

    def _own(self, entries: list[dict], also: str | None = None) -> list[Pushed]:
        """Entries of a state that this rank takes over: those that the same rank has written, in their order.

        Over several hosts they come from rank 0. ``also``: further rows, to go with values.
        """
        rank, world = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world)
        found = [(entry.get("rank", 0) % world, _pushed(entry, also)) for entry in entries]
        if self.apart is not None:
            with self.apart.hosts.all_or_none():
                return self.apart.dealt(found)
        return [pushed for owner, pushed in found if owner == rank]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``CheckpointError`` unless ``load_state_dict`` can take it over."""
        known = {"tables", "latest", "epoch", "base", "waiting", "undo"}
        if not isinstance(state, dict) or not known <= state.keys():
            raise CheckpointError(
                "the checkpoint has no history: expected one that was saved in training over partitions. To begin with "
                "an empty history, load its 'model' into the model."
            )
        check_place(state)
        whole = self.apart is None or self.ranks.rank == 0
        if whole:
            check_whole(state)
        self.store.check_state(state["tables"])
        if whole:
            tables = self.store.tables
            check_pushes(state, [table.shape[1] for table in tables], tables[0].dtype, self.store.num_nodes)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, of any number of ranks.

        Raises:
            CheckpointError: of other tables; nothing was changed then.
        """
        self.check_state(state)
        if self.ranks is not None:  # none forgets rows after this
            self.ranks.any("step.load_state_dict over partitions, which all ranks call", False)
        with self._lock:
            if self.apart is not None or self.ranks is None or self.ranks.rank == 0:  # others read when all have begun
                self.store.load_state_dict(state["tables"])
            self.store.reset_counts()
            self._out = []
            self.latest, self.epoch, self.base = state["latest"], state["epoch"], state["base"]
            self._waiting = self._own(state["waiting"])
            undo = self._own(state["undo"], "before")
            if self.apart is not None:  # who has written a row takes it back
                with self.apart.hosts.all_or_none():
                    undo = self.apart.routed(undo)
            self._undo = [
                (
                    Pushed(each.number, [layer[:2] for layer in each.layers]),
                    [Replaced(*layer[2:]) for layer in each.layers],
                )
                for each in undo
            ]


def _never() -> bool:
    return False


def _pushed(entry: dict[str, Any], also: str | None = None) -> Pushed:
    """On the CPU, wherever a checkpoint was read to."""
    names = ["layers"] if also is None else ["layers", also]
    given = zip(*(entry[name] for name in names), strict=True)
    return Pushed(entry["number"], [tuple(tensor.cpu() for pair in pairs for tensor in pair) for pairs in given])
