"""Several ranks that write to one history, threads standing for them: what a macro-batch sees does not depend on who
is early, whose macro-batch is cut, or when a state was taken."""

import contextlib
import random
import threading

import pytest
import torch

from joestar.errors import CheckpointError, StageError
from joestar.stages import host_history
from joestar.stages.device_history import DeviceHistory
from joestar.stages.exchange import Exchange, seen_by
from joestar.stages.history import HistoryStore
from joestar.stages.host_history import HostHistory, divided
from joestar.stages.partitions import PartitionBatch

NODES, WIDTHS, ROOM, EPOCHS, ROUNDS = 36, (3, 2), (40, 40), 3, 4


def slots_of(nodes, layer):
    """Of those with a row of a layer."""
    return nodes.slots[nodes.layers[layer]]


class Job:
    """Threads that meet by name."""

    def __init__(self, world):
        self.world, self.changed, self.came, self.brought = world, threading.Condition(), {}, {}
        self.failed = None

    def meet(self, where, rank, own=None):
        with self.changed:
            self.came[where] = self.came.get(where, 0) + 1
            self.brought.setdefault(where, {})[rank] = own
            self.changed.notify_all()
            came = self.changed.wait_for(lambda: self.came[where] >= self.world or self.failed, 20)
            assert came and not self.failed, f"rank {rank} waits at {where}: {self.failed}"
            return [self.brought[where][each] for each in range(self.world)]


class Rank:
    """As ``stages.exchange.Ranks``."""

    def __init__(self, job, rank):
        self.job, self.rank, self.world, self.calls = job, rank, job.world, 0

    def meet(self, where, stopped):
        self.job.meet(where, self.rank)

    def any(self, what, own):
        self.calls += 1
        return any(self.job.meet((self.calls, what), self.rank, own))

    def joined(self, what, own):
        return [entry for entries in self.job.meet((self.calls, what), self.rank, own) for entry in entries]


class OnHosts(Rank):
    """As ``stages.host_history.Hosts``, too."""

    def __init__(self, job, rank, ranks_of):
        super().__init__(job, rank)
        self.ranks_of, self.exchanged = ranks_of, 0
        (self.host,) = (host for host, ranks in enumerate(ranks_of) if rank in ranks)

    def joined(self, what, own):
        found = super().joined(what, own)
        return [] if self.rank else found

    def all_or_none(self):
        return contextlib.nullcontext()

    def _exchanged(self, own):
        self.exchanged += 1
        return self.job.meet(("exchanged", self.exchanged), self.rank, own)

    def swap(self, given):
        """Nothing stays within a host, or is one's own memory."""
        assert not any(given[rank] for rank in self.ranks_of[self.host] if self.rank)
        met = self._exchanged(given)
        return [[tensor.clone() for tensor in each[self.rank]] for each in met]

    def largest(self, number):
        return max(self._exchanged(number))


def macro_of(seed, part, number, base, index, rank):
    """Parts of three nodes each; the macro-batch of a rank reads what is in the others'."""
    draw = random.Random(f"{seed} {number} {rank}")
    inner = torch.tensor([node for node in range(NODES) if part[node // 3] == (index, rank)], dtype=torch.int64)
    others = [node for node in range(NODES) if part[node // 3] != (index, rank)]
    halo = torch.tensor(sorted(draw.sample(others, 14)), dtype=torch.int64)
    flags = torch.arange(len(inner) + 14) < len(inner)
    empty = torch.zeros(0, dtype=torch.int32)
    return PartitionBatch(
        empty, torch.cat([inner, halo]), torch.zeros(1).long(), empty, halo=~flags, inner=flags, number=number,
        sees=seen_by(base, index),
    )  # fmt: skip


def parts_of(seed, epoch, world):
    """(round, rank) of every part: each in one."""
    places = [(index, rank) for index in range(ROUNDS) for rank in range(world)]
    draw = random.Random(f"{seed} {epoch}")
    return [draw.choice(places) for _ in range(NODES // 3)]


def value_of(number, layer, node, times):
    made = torch.Generator().manual_seed(((number * 3 + layer) * NODES + node) * 4 + times)
    return torch.randn(WIDTHS[layer], generator=made)


def work(job, store, ranks, seed, results):
    """What a process does: its steps push, the next macro-batch is loaded by another thread, sometimes late."""
    rank, world = ranks.rank, ranks.world
    draw, common = random.Random(f"{seed} of {rank}"), random.Random(seed)
    exchange = Exchange(store, DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"), ranks)
    slots, turn, late = torch.arange(NODES, dtype=torch.int32), 0, None

    def load(macro):
        nonlocal turn
        exchange.expect(macro)
        rows = exchange.prepare(macro, slots[: len(macro.ids)], turn % 2)
        turn += 1
        return rows, lambda: exchange.load(rows)

    def begin(seed, part, base, index):
        """The next macro-batch is loaded by another thread: its rows, and the thread."""
        if index == ROUNDS:
            return None
        rows, now = load(macro_of(seed, part, base + index, base, index, rank))
        thread = threading.Thread(target=now)
        thread.start()
        return rows, thread

    def check(rows, macro):
        tables = exchange.device.tables
        for layer in range(len(WIDTHS)):
            place = tables.places[layer].long()
            for slot, node in zip(slots_of(rows.pulls, layer).tolist(), rows.pull_ids[layer].tolist(), strict=True):
                usable = bool(tables.usable[layer][place[slot]])
                value = tables.pulled[layer][place[slot]].clone() if usable else None
                results[macro.number, rank, layer, node] = value

    def push(rows, number, times):
        outputs = []
        for layer in range(len(WIDTHS)):
            values = [value_of(number, layer, node, times) for node in rows.push_ids[layer].tolist()]
            values = torch.stack(values) if values else torch.zeros(0, WIDTHS[layer])
            outputs += [-exchange.device.tables.places[layer][slots_of(rows.pushes, layer).long()], values]
        exchange.device.push(outputs, torch.tensor(True))

    for epoch in range(EPOCHS):
        part, base = parts_of(seed, epoch, world), exchange.number_epoch(epoch)
        exchange.begin(0)
        loading = None
        for index in range(ROUNDS):
            macro = macro_of(seed, part, base + index, base, index, rank)
            if loading is None:
                rows, now = load(macro)
                now()
            else:
                rows, late = loading
                late.join(20)
            exchange.show(rows, 1)
            check(rows, macro)
            push(rows, macro.number, 0)
            cut, taken, restored = draw.random() < 0.3, common.random() < 0.4, common.random() < 0.5
            loading = None
            again = taken and (restored or exchange.apart is not None)
            if draw.random() < 0.7 and not (cut or again):
                loading = begin(seed, part, base, index + 1)
            if taken:  # all ranks take a state at once; some go on from it
                state = exchange.state_dict(cut)
                if restored:
                    state = copied(state, job, base + index, rank)
                    exchange.clear()
                    exchange.load_state_dict(state)
                    exchange.number_epoch(epoch)
                if again:
                    exchange.begin(index)
                    rows, now = load(macro)
                    now()
                    exchange.show(rows, 1)
                    check(rows, macro)
                    cut = False
            if cut:  # another piece of the same macro-batch, while other ranks may be ahead
                rows, now = load(macro)
                now()
                exchange.show(rows, 1)
                check(rows, macro)
            push(rows, macro.number, 1)
            job.meet(("step", base + index), rank)  # the sum of the last step
            loading = loading or begin(seed, part, base, index + 1)


def copied(state, job, number, rank):
    """Tables of a state are not copied: all have done so before one forgets them."""
    tables = state["tables"]
    if tables is None:  # of several hosts, on another rank than the first
        job.meet(("copied", number), rank)
        return state
    kept = {name: [each.clone() for each in tables[name]] for name in ("tables", "stamps")}
    job.meet(("copied", number), rank)
    return state | {"tables": tables | kept}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.fuzz) for n in range(2, 12))])
@pytest.mark.parametrize("world", [2, 3])
def test_what_ranks_see_does_not_depend_on_when_things_happen(seed, world):
    job, results = Job(world), {}
    store = [HistoryStore(NODES, WIDTHS, shared=True) for _ in range(world)]
    pull = store[-1].pull

    def slowly(*given):
        threading.Event().wait(1e-3)  # others may go ahead meanwhile
        return pull(*given)

    store[-1].pull = slowly
    for other in store[1:]:  # the tables of all are those of the first
        other.tables, other.stamps = store[0].tables, store[0].stamps

    carried_out(job, lambda rank: work(job, store[rank], Rank(job, rank), seed, results))
    as_expected(job, seed, results)


LAYOUTS = [[[0], [1]], [[0, 2], [1, 3]], [[0], [1, 2]]]
"""Ranks of every host."""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks_of", LAYOUTS, ids=str)
@pytest.mark.each("ranks_of")
def test_hosts_with_tables_of_their_own_see_the_same(seed, ranks_of, monkeypatch):
    """Whose rows are exchanged a few at a time, and whose states have the tables of all."""
    monkeypatch.setattr(host_history, "AT_ONCE", 64)
    job, results = Job(sum(map(len, ranks_of))), {}
    ranks = [OnHosts(job, rank, ranks_of) for rank in range(job.world)]
    store = [hosted(each) for each in ranks]
    for own in ranks_of:
        for rank in own[1:]:
            store[rank].tables, store[rank].stamps = store[own[0]].tables, store[own[0]].stamps
    carried_out(job, lambda rank: work(job, store[rank], ranks[rank], seed, results))
    as_expected(job, seed, results)
    assert all(0 < rows < len(kept) for rows, kept in zip(store[0].num_rows, KEPT, strict=True))


KEPT = [torch.tensor([node for node in range(NODES) if node % 36 not in some]) for some in ((7,), (0, 7, 20, 21))]
"""All but a few nodes have a row, in each layer; parts are of three nodes."""


def hosted(ranks):
    """Tables of a rank's host."""
    host_of = divided(torch.bincount(KEPT[0] // 3), len(ranks.ranks_of))[torch.arange(NODES) // 3]
    return HostHistory(NODES, WIDTHS, KEPT, host_of, ranks, shared=True)


def as_expected(job, seed, results):
    """Every rank has seen, in every macro-batch, what was pushed up to the number that it sees."""
    world, seen = job.world, 0
    assert set(job.came.values()) == {world}
    hosts = any(where[0] == "exchanged" for where in job.came)
    kept = [nodes.tolist() if hosts else range(NODES) for nodes in KEPT]
    for epoch in range(EPOCHS):
        part, base = parts_of(seed, epoch, world), epoch * ROUNDS
        for index in range(ROUNDS):
            for rank in range(world):
                macro = macro_of(seed, part, base + index, base, index, rank)
                for layer in range(len(WIDTHS)):
                    for node in macro.halo_ids.tolist():
                        if node not in kept[layer]:
                            assert (base + index, rank, layer, node) not in results
                            continue
                        wanted = expected(seed, world, node, layer, macro.sees)
                        found = results[base + index, rank, layer, node]
                        assert (found is None) == (wanted is None), (base + index, rank, node)
                        assert found is None or torch.equal(found, wanted), (base + index, rank, node)
                        seen += found is not None
    assert seen > 100


def expected(seed, world, node, layer, upto):
    """The row that the latest macro-batch up to this number has pushed."""
    for number in range(upto, -1, -1):
        index, _ = parts_of(seed, number // ROUNDS, world)[node // 3]
        if index == number % ROUNDS:
            return value_of(number, layer, node, 1)
    return None


def test_hosts_hold_about_as_much():
    rows = torch.tensor([5, 90, 0, 40, 30, 30, 10, 5])
    for hosts, most in ((1, 210), (2, 105), (3, 90), (9, 90)):
        found = divided(rows, hosts)
        loads = torch.zeros(hosts, dtype=torch.int64).index_add_(0, found.long(), rows)
        assert int(loads.max()) == most and int(loads.sum()) == 210 and torch.equal(found, divided(rows, hosts))


def test_rows_of_other_hosts_that_were_not_fetched_are_an_error_not_missing():
    class Others(OnHosts):
        def _exchanged(self, own):
            return [own, [[]] * 2] if isinstance(own, list) else [own]

    store = hosted(Others(Job(2), 0, [[0], [1]]))
    store.expect(3, KEPT[0][:2])
    with pytest.raises(StageError, match="macro-batch 4 has not said which hidden rows"):
        store.fetch(4)
    far = KEPT[0][store._host_of(0, KEPT[0]) == 1]
    for _ in range(2):
        with pytest.raises(StageError, match="of other hosts that macro-batch 3 reads were not fetched"):
            store.pull(0, far[-1:], 3)
        store.expect(3, far[:0])
        store.fetch(3)


def test_only_the_state_of_rank_0_has_tables():
    exchange = Exchange(HistoryStore(NODES, WIDTHS), DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"))
    state = exchange.state_dict() | {"tables": None}
    with pytest.raises(CheckpointError, match="what another rank than 0 returned of a job on several hosts"):
        exchange.check_state(state)


def test_rows_of_a_state_that_one_rank_has_taken_over_are_older_than_what_another_has_pushed_since():
    """The first macro-batch of an epoch reads what two have pushed: here the one before a resume with more ranks, whose
    rows rank 0 writes for all, and one behind it, which rank 1 had; of the same node."""
    job, node, arrived = Job(2), torch.tensor([5]), threading.Event()
    stores = [HistoryStore(NODES, WIDTHS, shared=True) for _ in range(2)]
    stores[1].tables, stores[1].stamps = stores[0].tables, stores[0].stamps
    waiting = [{"number": 1, "rank": 0, "layers": [[node, torch.full((1, width), 1.0)] for width in WIDTHS]}]
    state = {"tables": stores[0].state_dict(), "latest": 1, "epoch": 0, "base": 0, "waiting": waiting, "undo": []}

    class Early(Rank):
        """Rank 0 writes when this one has come to the next meeting."""

        def meet(self, where, stopped):
            super().meet(where, stopped)
            if where.endswith("3/read"):
                self.meet = lambda *given: (arrived.set(), Rank.meet(self, *given))

    push = stores[0].push

    def late(layer, ids, values, number, **further):
        assert number != 1 or arrived.wait(20)
        return push(layer, ids, values, number, **further)

    stores[0].push = late

    def macro(number, base, index):
        empty = torch.zeros(0, dtype=torch.int32)
        return PartitionBatch(
            empty, node, torch.zeros(1).long(), empty, halo=torch.tensor([False]), inner=torch.tensor([True]),
            number=number, sees=seen_by(base, index),
        )  # fmt: skip

    def trained(rank):
        made = Early if rank else Rank
        exchange = Exchange(
            stores[rank], DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"), made(job, rank)
        )
        exchange.load_state_dict(state)
        for epoch, index in ((0, 2), (1, 0)):
            base = exchange.number_epoch(epoch)
            exchange.begin(index)
            rows = exchange.prepare(macro(base + index, base, index), torch.tensor([0], dtype=torch.int32), epoch)
            exchange.load(rows)
            exchange.show(rows, 1)
            if rank and not epoch:
                outputs = [
                    each
                    for layer, width in enumerate(WIDTHS)
                    for each in (
                        -exchange.device.tables.places[layer][slots_of(rows.pushes, layer).long()],
                        torch.full((1, width), 2.0),
                    )
                ]
                exchange.device.push(outputs, torch.tensor(True))

    carried_out(job, trained)
    for layer in range(len(WIDTHS)):
        values, stamps = stores[0].peek(layer, node)
        assert stamps.tolist() == [2] and (values == 2.0).all()
    assert set(job.came.values()) == {2}


def carried_out(job, work):
    """On a thread per rank."""

    def run(rank):
        try:
            work(rank)
        except BaseException as error:
            with job.changed:
                job.failed = job.failed or error
                job.changed.notify_all()
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(job.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert job.failed is None


def test_an_epoch_s_macro_batch_is_begun_at_a_meeting_of_the_steps():
    """Which others, at another call, hear of at once: not at one of those that loading threads wait at."""
    calls = []

    class Others:
        rank, world = 0, 2

        def meet(self, where, stopped):
            raise AssertionError(f"waits at {where}, where nobody is told of it")

        def any(self, what, own):
            calls.append(what)
            return own

    store = HistoryStore(NODES, WIDTHS, shared=True)
    Exchange(store, DeviceHistory(NODES, WIDTHS, ROOM, ROOM, torch.float32, "cpu"), Others()).begin(2)
    assert calls == ["macro-batch 2 of an epoch over partitions"]
