"""Historical embeddings over several hosts: each has the rows of its own parts, and all rows are one history.

What is pushed goes to the host of its row when it is to count; what a macro-batch reads of other hosts is fetched when
all that it sees is written. Both are exchanges of all ranks, in bounded pieces. A rank turns to one rank of every other
host, which reads and writes for it.
"""

import contextlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from joestar.errors import CheckpointError, StageError
from joestar.stages.history import NEVER, HistoryStore, Pushed
from joestar.stages.history_rows import HistoryRows

AT_ONCE = 1 << 25
"""Most bytes of rows that a rank reads for others at a time."""


class Hosts(Protocol):
    """All ranks, and what they exchange.

    Attributes:
        rank, world: of this process; host: number of its host, that of rank 0 being 0. ranks_of: of every host.
        swap: what every rank has given for this one, by rank, from what this one gives for every rank.
    """

    rank: int
    world: int
    host: int
    ranks_of: list[list[int]]
    swap: Callable[[Sequence[Sequence[Tensor]]], list[list[Tensor]]]

    def all_or_none(self) -> contextlib.AbstractContextManager:
        """Around exchanges that all ranks carry out: an error within ends the job."""

    def largest(self, number: int) -> int:
        """Over the ranks."""


@dataclass(eq=False)
class Fetched:
    """Rows of other hosts, for a macro-batch: per layer ids, ascending, ``[m, width]`` and stamps ``[m]``."""

    number: int
    layers: list[tuple[Tensor, Tensor, Tensor]]


def divided(sizes: Tensor, hosts: int) -> Tensor:
    """The host of every part: int16 ``[parts]``, so that all hold about as much; the same wherever it is asked.

    Args:
        sizes: of every part's hidden rows ``[parts]``, in any unit.
    """
    loads = [(0, host) for host in range(hosts)]
    found = torch.zeros(sizes.numel(), dtype=torch.int16, device="cpu")
    for part in torch.argsort(sizes, descending=True, stable=True).tolist():
        load, host = loads[0]
        found[part] = host
        heapq.heapreplace(loads, (load + int(sizes[part]), host))
    return found


class HostHistory(HistoryStore):
    """The tables of one host among several, as ``HistoryStore``; of the nodes with a row, those of this host's parts.

    ``num_rows`` and tables are of this host. States are of all hosts: on rank 0, ``None`` on others. All ranks call
    ``routed``, ``fetch``, ``state_dict`` and ``load_state_dict`` together, and none leaves them half done.

    Args:
        nodes: ids of all nodes that get a row, ascending, per layer. host_of: int16 ``[num_nodes]``: the host that has
            the rows of a node. hosts: what ranks exchange.
    """

    def __init__(
        self, num_nodes: int, widths: Sequence[int], nodes: Sequence[Tensor], host_of: Tensor, hosts: Hosts, **further
    ):
        super().__init__(num_nodes, widths, [each[host_of[each.long()] == hosts.host] for each in nodes], **further)
        self.hosts = hosts
        self._hosts_of = [_only(host_of, each) for each in nodes]
        self._digests_of_all: list[str] | None = None
        self._expected: dict[int, Tensor] = {}
        self._fetched: Fetched | None = None

    @staticmethod
    def places_nbytes(rows: HistoryRows) -> int:
        """Bytes of what says which host has a row."""
        return 2 * rows.num_nodes * len(rows.counts)

    @property
    def places(self) -> list[Tensor | None]:
        """Which host has the row of every node, per layer: int16 ``[num_nodes]``, -1 where there is none."""
        return self._hosts_of

    def has_row(self, layer: int, ids: Tensor) -> Tensor:
        """bool ``[m]``: which nodes have a row in a layer's table, on any host."""
        return self._host_of(layer, ids) >= 0

    def _host_of(self, layer: int, ids: Tensor) -> Tensor:
        """int16 ``[m]``: which host has their rows, -1 where there is none."""
        return self._hosts_of[layer][ids.to(torch.int64)]

    # --- pushes ---

    def routed(self, entries: list[Pushed]) -> list[Pushed]:
        """What this rank has to write of the entries of all: of rows of this host, older ones first.

        Entries of this rank come before those of others under the same number, which are of other rows. Layers may
        have more tensors than ids and values, of as many rows.
        """
        hosts, found = self.hosts, []
        given: list[list[Tensor]] = [[] for _ in range(hosts.world)]
        for entry in entries:
            at = [self._host_of(layer, ids) for layer, (ids, *_) in enumerate(entry.layers)]
            for host in range(len(hosts.ranks_of)):
                which = [torch.nonzero(each == host).flatten() for each in at]
                if not any(each.numel() for each in which):
                    continue
                layers = [tuple(t[rows] for t in layer) for layer, rows in zip(entry.layers, which, strict=True)]
                if host == hosts.host:
                    found.append(Pushed(entry.number, layers))
                else:
                    given[self._server(host)] += _tensors(Pushed(entry.number, layers))
        for tensors in hosts.swap(given):
            found += self._entries(tensors)
        return sorted(found, key=lambda entry: entry.number)

    def dealt(self, entries: list[tuple[int, Pushed]]) -> list[Pushed]:
        """Entries that rank 0 has for this rank, in their order, from those of (rank, entry) that it has for all."""
        given: list[list[Tensor]] = [[] for _ in range(self.hosts.world)]
        for rank, entry in entries if self.hosts.rank == 0 else []:
            given[rank] += _tensors(entry)
        return self._entries(self.hosts.swap(given)[0])

    def _entries(self, tensors: list[Tensor]) -> list[Pushed]:
        found, rest = [], iter(tensors)
        for head in rest:
            number, size = head.tolist()
            found.append(Pushed(number, [tuple(next(rest) for _ in range(size)) for _ in self.tables]))
        return found

    def _server(self, host: int) -> int:
        """The rank of another host that this one turns to."""
        ranks = self.hosts.ranks_of[host]
        return ranks[self.hosts.rank % len(ranks)]

    # --- pulls ---

    def expect(self, number: int, ids: Tensor) -> None:
        """What a macro-batch, and any piece of it, reads: nodes each once; what was said first counts."""
        self._expected.setdefault(number, ids)

    def forget_expected(self) -> None:
        """Of macro-batches to come, which are made anew."""
        self._expected.clear()
        self._fetched = None

    def fetch(self, number: int) -> None:
        """Brings the rows of other hosts that macro-batch ``number`` reads."""
        self._fetched = None
        if number not in self._expected:
            raise StageError(f"macro-batch {number} has not said which hidden rows of other hosts it reads.")
        ids = self._expected[number]
        for old in [other for other in list(self._expected) if other <= number]:
            del self._expected[old]
        self._fetched = Fetched(number, [self._fetched_of(layer, ids) for layer in range(len(self.tables))])

    def _fetched_of(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of one layer, as ``Fetched``; those of ``ids`` that have their rows on other hosts."""
        hosts, table = self.hosts, self.tables[layer]
        host = self._host_of(layer, ids)
        ids = ids[(host >= 0) & (host != hosts.host)].sort().values
        host = self._host_of(layer, ids)
        given: list[list[Tensor]] = [[] for _ in range(hosts.world)]
        places = {self._server(each): torch.nonzero(host == each).flatten() for each in host.unique().tolist()}
        for server, rows in places.items():
            given[server] = [ids[rows]]
        asked = [tensors[0] if tensors else ids[:0] for tensors in hosts.swap(given)]
        most = hosts.largest(max(each.numel() for each in asked))
        values = torch.empty(ids.numel(), table.shape[1], dtype=table.dtype, device="cpu")
        stamps = torch.empty(ids.numel(), dtype=torch.int32, device="cpu")
        for now in _blocks(most, table, hosts.world):
            wanted = [each[now] for each in asked]
            got = hosts.swap([self.peek(layer, each) if each.numel() else [] for each in wanted])
            for server, rows in places.items():
                if got[server]:
                    values[rows[now]], stamps[rows[now]] = got[server]
        return ids, values, stamps

    def _pulled(
        self, layer: int, ids: Tensor, now: int, values: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple]:
        usable, age, counts = super()._pulled(layer, ids, now, values, rows)
        far, there = self._far(layer, ids, now)
        if not far.numel():
            return usable, age, counts
        _, fetched, stamps = self._fetched.layers[layer]
        stamp = stamps[there]
        pushed = stamp != NEVER
        age[far] = torch.where(pushed, now - stamp, -1)
        usable[far] = pushed if self.max_age is None else pushed & (age[far] <= self.max_age)
        fresh = usable[far]
        values[far[fresh]] = fetched[there[fresh]]
        ages, missing = age[usable], int((age < 0).sum())
        return usable, age, (
            missing, len(age) - missing - len(ages), int(ages.sum()), int(ages.max()) if len(ages) else 0
        )  # fmt: skip

    def _far(self, layer: int, ids: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """(which ids have their rows on other hosts, where these are among what was fetched for ``now``)."""
        host = self._host_of(layer, ids)
        far = torch.nonzero((host >= 0) & (host != self.hosts.host)).flatten()
        if not far.numel():
            return far, far
        wanted, current = ids[far], self._fetched is not None and self._fetched.number == now
        there = self._fetched.layers[layer][0] if current else ids[:0]
        if not bool(torch.isin(wanted, there).all()):
            raise StageError(f"hidden rows of other hosts that macro-batch {now} reads were not fetched.")
        return far, torch.searchsorted(there, wanted)

    # --- state ---

    def state_dict(self) -> dict[str, Any] | None:
        """As ``HistoryStore.state_dict``, of all hosts, copied: on rank 0; ``None`` on the others."""
        with self.hosts.all_or_none():
            tables, stamps = (
                [self._gathered(layer, own) for layer, own in enumerate(each)] for each in (self.tables, self.stamps)
            )
        return None if self.hosts.rank else self._state(tables, stamps)

    def check_state(self, state: dict[str, Any] | None) -> None:
        """As ``HistoryStore.check_state``, on rank 0; others have none."""
        if self.hosts.rank == 0:
            super().check_state(state)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes over what rank 0 has of all hosts.

        Raises:
            CheckpointError: as ``check_state``; nothing was changed then.
        """
        self.check_state(state)
        first = self.hosts.rank == 0
        with self.hosts.all_or_none():
            for name, tensors in (("tables", self.tables), ("stamps", self.stamps)):
                for layer, own in enumerate(tensors):
                    self._scattered(layer, own, state[name][layer] if first else None)
        self.reset_counts()

    def _gathered(self, layer: int, own: Tensor) -> Tensor | None:
        """Of all hosts, on rank 0: ``own``, of one layer, in its place."""
        hosts, whole, own = self.hosts, None, own[: self.num_rows[layer]]
        if hosts.rank == 0:
            shape, value = (self._all_rows()[layer], *own.shape[1:]), NEVER if own.dim() == 1 else 0
            whole = torch.full(shape, value, dtype=own.dtype, device="cpu")
        for parts in self._turns(layer, own):
            given: list[list[Tensor]] = [[] for _ in range(hosts.world)]
            if hosts.rank and hosts.rank == hosts.ranks_of[hosts.host][0]:
                given[0] = [own[parts.rows]]
            got = hosts.swap(given)
            if whole is not None:
                whole[parts.of(0)] = own[parts.rows]
                for host, (rank, *_) in enumerate(hosts.ranks_of[1:], 1):
                    whole[parts.of(host)] = got[rank][0]
        return whole

    def _scattered(self, layer: int, own: Tensor, whole: Tensor | None) -> None:
        """What rank 0 has of all hosts, into ``own``, of one layer: the first rank of a host writes for all of them."""
        hosts, own = self.hosts, own[: self.num_rows[layer]]
        for parts in self._turns(layer, own):
            given: list[list[Tensor]] = [[] for _ in range(hosts.world)]
            if whole is not None:
                own[parts.rows] = whole[parts.of(0)].to(own.device)
                for host, (rank, *_) in enumerate(hosts.ranks_of[1:], 1):
                    given[rank] = [whole[parts.of(host)].cpu()]
            got = hosts.swap(given)[0]
            if got:
                own[parts.rows] = got[0]

    def _turns(self, layer: int, table: Tensor) -> list["_Turn"]:
        """Rows of every host, some at a time; where they are in a state is known on rank 0."""
        kept, number = self._hosts_of[layer], len(self.hosts.ranks_of)
        kept = kept[kept >= 0]
        most = int(torch.bincount(kept.to(torch.int64), minlength=number).max())
        whole = [torch.nonzero(kept == host).flatten() for host in range(number)] if self.hosts.rank == 0 else []
        return [_Turn(now, whole) for now in _blocks(most, table, number)]

    def _all_rows(self) -> list[int]:
        return [max(1, int((hosts >= 0).sum())) for hosts in self._hosts_of]

    def _digests(self) -> list[str]:
        if self._digests_of_all is None:
            nodes = [torch.nonzero(hosts >= 0).flatten() for hosts in self._hosts_of]
            self._digests_of_all = HistoryRows(self.num_nodes, len(nodes), nodes).digests
        return self._digests_of_all


@dataclass
class _Turn:
    """``rows`` of the tables of every host, and the rows of a state that those of every host are."""

    rows: slice
    whole: list[Tensor]

    def of(self, host: int) -> Tensor:
        return self.whole[host][self.rows]


def _only(host_of: Tensor, nodes: Tensor) -> Tensor:
    """``host_of``, int16 ``[num_nodes]``, with -1 for all other nodes."""
    found, nodes = torch.full(host_of.shape, -1, dtype=torch.int16, device="cpu"), nodes.to(torch.int64)
    found[nodes] = host_of[nodes].to(torch.int16)
    return found


def _tensors(entry: Pushed) -> list[Tensor]:
    head = torch.tensor([entry.number, len(entry.layers[0])], device="cpu")
    return [head, *(tensor for layer in entry.layers for tensor in layer)]


def _blocks(most: int, table: Tensor, pairs: int) -> list[slice]:
    """Of ``most`` rows, so many that ``AT_ONCE`` has those of so many pairs of ranks."""
    row = table[:1].nbytes + 4
    step = max(1, AT_ONCE // (row * pairs))
    return [slice(first, first + step) for first in range(0, most, step)]


def check_whole(state: dict[str, Any]) -> None:
    """Raises ``CheckpointError`` for what another rank than 0 has of a state of several hosts."""
    if state["tables"] is None:
        raise CheckpointError(
            "the history has no tables: it is what another rank than 0 returned of a job on several hosts. Load what "
            "rank 0 returned, or what joestar.Checkpoints wrote."
        )
