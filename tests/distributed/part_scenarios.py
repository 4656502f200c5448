"""What ranks do in the tests of steps over partitions; in one process, the same alone."""

import contextlib
import copy
import os
import signal
import threading
from unittest import mock

import torch
import torch.nn.functional as F

import joestar
from joestar.distributed import all_to_all
from joestar.partitioning.partitioning import Partitioning, fingerprint_of
from joestar.staged.partition_planning import PartitionPlanner
from joestar.staged.planning import Planner
from joestar.stages.plan import Speeds
from tests.distributed.scenarios import SEED, cheaper, cheapest, device, model_of, state_of, telling
from tests.runtime.common import CLASSES, FEATURES

NODES = 90
NORMED = {"norm": "batch_norm", "num_layers": 3}
CASES = {
    "two rounds": (6, 2, {}, {}),
    "a rank without a group": (5, 1, {}, {}),
    "aged": (8, 2, {"max_age": 2}, {}),
    "overflows": (6, 2, {}, {"slack": 0, "warm_up": 1, "patience": 1}),
    "exact": (6, 2, {"ahead": 2}, {"execution": "exact"}),
    "weighted": (
        6,
        2,
        {},
        {"loss": torch.nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.5, 2.0]).double())},
    ),
    "normed, summed": (6, 2, {}, {"net": NORMED, "accumulate": 3}),
    "normed": (5, 1, {}, {"net": NORMED}),
    "normed, overflows": (6, 2, {}, {"net": NORMED, "slack": 0, "warm_up": 1, "patience": 1, "accumulate": 2}),
    "normed, exact": (6, 2, {"max_age": 1}, {"net": NORMED, "execution": "exact"}),
    "summed": (5, 1, {}, {"accumulate": 4}),
    "cut short": (5, 1, {}, {"drop_last": True}),
    "normed, cut short": (6, 2, {}, {"net": NORMED, "accumulate": 3, "drop_last": True}),
}
"""Parts, parts of a group, what else Partitions and compile are given; ``net``: the model, ``drop_last``: epochs."""


def all_of(names: list[str], *args) -> dict:
    """Several scenarios in the same processes, one after the other."""
    joestar.distributed.init(timeout=20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(cheapest):
        return {name: globals()[name](*args) for name in names}


def graph_of(nodes: int = NODES):
    """In host memory, float64, half of its nodes to train on, one of them twice."""
    made = torch.Generator().manual_seed(4)
    graph = joestar.Graph.from_edge_index(torch.randint(0, nodes, (2, 4 * nodes), generator=made), nodes)
    labels = torch.randint(0, CLASSES, (nodes,), generator=made)
    graph.ndata["y"] = labels
    graph.ndata["x"] = torch.randn(nodes, FEATURES, generator=made, dtype=torch.float64) + F.one_hot(labels, FEATURES)
    graph.train_idx = torch.cat([torch.randperm(nodes, generator=made)[: nodes // 2], torch.tensor([3, 3])])
    return graph


def parts_of(graph, number: int) -> Partitioning:
    """Parts of unlike sizes."""
    made = torch.Generator().manual_seed(number)
    return partitioned(graph, (torch.rand(graph.num_nodes, generator=made) ** 1.5 * number).to(torch.int32))


def partitioned(graph, part) -> Partitioning:
    """These parts."""
    return Partitioning(part, int(part.max()) + 1, 0, fingerprint_of(graph))


def step_of(graph, parts, group, stage=None, fanouts=(-1, -1), model=None, **options):
    """A step over partitions."""
    model = model_of() if model is None else model
    sampler = joestar.NeighborSampler(graph, list(fanouts), seed=SEED)
    loss = options.pop("loss", F.cross_entropy)
    loss = copy.deepcopy(loss).to(device()) if isinstance(loss, torch.nn.Module) else loss
    memory = "64MiB" if device() == "cpu" else "2GiB"  # of which libraries take some
    given = {"backend": "eager", "warm_up": 3, "memory": memory, "batch_size": 5} | options
    first = joestar.Partitions(parts, group, **(stage or {}))
    with mock.patch.object(Planner, "_measured", return_value=Speeds()):
        return joestar.compile(
            model, sampler, loss, torch.optim.SGD(model.parameters(), 0.2), first_stage=first, **given
        )


def case_of(name: str, **further):
    """The step of a case, and what it trains on."""
    parts, group, stage, options = CASES[name]
    graph = graph_of()
    options = {key: value for key, value in options.items() if key not in ("net", "drop_last")}
    net = net_of(name)
    fanouts = (-1,) * len(net.convs)
    return step_of(
        graph, parts_of(graph, parts), group, stage, **({"model": net, "fanouts": fanouts} | options | further)
    ), graph


def net_of(name: str):
    """The model of a case."""
    return model_of(**CASES[name][-1].get("net", {}))


def history_of(step) -> dict | None:
    """Tables and stamps, once all that was pushed is there; of several hosts on rank 0."""
    step.exchange.begin(0)
    for where, upto in (("rewound", step.exchange.latest - 1), ("older", step.exchange.latest)):
        step.exchange._meet(where, lambda: False)
        step.exchange._route(upto)
        with step.exchange._lock:
            step.exchange._apply(upto)
    step.exchange._meet("compared", lambda: False)
    found = step.exchange.store.state_dict()
    return found and {name: [each.tolist() for each in found[name]] for name in ("tables", "stamps")}


def on_hosts(names: str):
    """Steps that are compiled within are those of ranks on these hosts; ``""``: of whichever they are on."""
    hosts = [f"host-{name}" for name in names]
    return mock.patch.object(joestar.distributed.current(), "hosts", hosts) if hosts else contextlib.nullcontext()


OFTEN = ("two rounds", "a rank without a group", "weighted", "normed, summed")
"""In ``make test``."""


def trained_more(batch: int, folder: str) -> dict:
    """``trained``, of the other cases."""
    return trained(batch, folder, [name for name in CASES if name not in OFTEN])


def trained(batch: int, folder: str, names=OFTEN) -> dict:
    """Two epochs of every case: losses, seeds of the steps, weights, hidden rows, what was pulled."""
    results = {}
    for name in names:
        step, graph = case_of(name)
        losses, seeds = [], []
        for _ in range(2):
            short = CASES[name][-1].get("drop_last", False)
            for loss, own in step.epoch(graph.train_idx, batch, with_seeds=True, drop_last=short):
                losses.append(loss.item())
                seeds.append(own.tolist())
        records = step.report().feeding.history
        results[name] = {
            "losses": losses, "seeds": seeds, "state": state_of(step), "history": history_of(step),
            "overflows": step.counters.overflows, "pulled": [row.pulled for row in records],
            "missing": [row.missing for row in records], "too old": [row.too_old for row in records],
            "said": str(step.plan), "macro": step.first_stage.num_seeds,
            "score": step.evaluate(graph.train_idx[:20], batch), "rows": step.predict(torch.arange(70), 4).tolist(),
        }  # fmt: skip
    return results


def _dropping():
    return model_of(dropout=0.4)


def undisturbed(batch: int, folder: str) -> dict:
    """Three epochs of samples and masks."""
    step, graph = case_of("two rounds", fanouts=(3, 2), model=_dropping())
    losses = [loss.item() for _ in range(3) for loss in step.epoch(graph.train_idx, batch)]
    return {"losses": losses, "state": state_of(step), "history": history_of(step)}


def disturbed(batch: int, folder: str) -> dict:
    """The same, with scores, states, single steps of nothing, and a checkpoint that is loaded again, in between."""
    step, graph = case_of("two rounds", fanouts=(3, 2), model=_dropping())
    losses, taken = [], 0
    for number in range(3):
        for loss in step.epoch(graph.train_idx, batch):
            losses.append(loss.item())
            taken += 1
            if taken % 4 == 1:
                step.evaluate(graph.train_idx[:20], 10)
            if taken % 3 == 2:
                step.state_dict()
            if taken == 9:
                joestar.Checkpoints(os.path.join(folder, "again")).save(step)
        if number == 1:
            step.predict(torch.arange(9))
    again, _ = case_of("two rounds", fanouts=(3, 2), model=_dropping())
    again.load_state_dict(joestar.Checkpoints(os.path.join(folder, "again")).latest()["step"])
    rest = [loss.item() for _ in range(3 - again.epochs_done) for loss in again.epoch(graph.train_idx, batch)]
    return {
        "losses": losses, "state": state_of(step), "history": history_of(step), "again": step.traffic.again,
        "rest": rest, "rest state": state_of(again), "rest history": history_of(again),
    }  # fmt: skip


def apart(batch: int, folder: str) -> dict:
    """``disturbed``, of ranks that are each on a host of their own."""
    with on_hosts("abcdefgh"[: joestar.distributed.world_size()]):
        return disturbed(batch, os.path.join(folder, "apart"))


def cut_apart(batch: int, folder: str) -> dict:
    """``cut``, of ranks that are each on a host of their own."""
    with on_hosts("abcdefgh"[: joestar.distributed.world_size()]):
        return cut(batch, folder)


def _small_parts(hosts: str):
    """Rounds of four ranks, on these hosts."""
    graph = graph_of()
    with on_hosts(hosts):
        return step_of(graph, parts_of(graph, 14), 1, {"max_age": 3}, fanouts=(3, 2), model=_dropping()), graph


def layouts(batch: int, folder: str, layouts=("aaaa", "aabb", "abbb")) -> dict:
    """The same run of four ranks on one host and on two: each goes on with what another one has begun, from a file and
    from a state in memory."""
    results = {}
    for hosts in layouts:
        step, graph = _small_parts(hosts)
        losses, kept = [], joestar.Checkpoints(os.path.join(folder, hosts))
        for number in range(3):
            for taken, loss in enumerate(step.epoch(graph.train_idx, 2)):
                losses.append(loss.item())
                if (number, taken) == (1, 3):
                    kept.save(step)
        results[hosts] = {
            "losses": losses, "state": state_of(step), "history": history_of(step), "rows": step.exchange.store.num_rows
        }  # fmt: skip
    for hosts, before in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
        step, graph = _small_parts(hosts)
        step.load_state_dict(joestar.Checkpoints(os.path.join(folder, before)).latest()["step"])
        epoch = step.epoch(graph.train_idx, 2)
        losses = [next(epoch).item()]
        step.load_state_dict(copy.deepcopy(step.state_dict()))
        losses += [loss.item() for _ in range(2) for loss in step.epoch(graph.train_idx, 2)]
        results[f"{before} to {hosts}"] = {
            "losses": losses, "state": state_of(step), "history": history_of(step),
        }  # fmt: skip
    return results


def given_for(source: int, rank: int) -> list[torch.Tensor]:
    """What a rank has for another one, or for itself."""
    made = torch.Generator().manual_seed(10 * source + rank)
    values = torch.randn(source + 1, rank + 2, generator=made)
    found = [values.bfloat16(), torch.arange(90 * rank), torch.tensor(source), torch.zeros(0, 3), values.t() < 0]
    return found[source:] if rank else []


def swapped(batch: int, folder: str) -> dict:
    """Tensors between ranks, a few bytes at a time; twice."""
    group = joestar.distributed.current()
    exchange = all_to_all.AllToAll(group, "tensors of a test")
    with mock.patch.object(all_to_all, "PIECE", 64):
        for _ in range(2):
            with exchange.all_or_none():
                got = exchange([given_for(group.rank, rank) for rank in range(group.world)])
    return {"got": [[str(t) for t in each] for each in got], "largest": exchange.largest(group.rank)}


def components(batch: int, folder: str) -> dict:
    """Parts without edges between them, samples and masks: no hidden row is needed."""
    graph, parts = separate()
    step = step_of(graph, parts, 1, fanouts=(3, 2), model=_dropping(), batch_size=batch)
    losses = [loss.item() for _ in range(2) for loss in step.epoch(graph.train_idx, batch)]
    pulled = [row.pulled for row in step.report().feeding.history]
    return {"losses": losses, "state": state_of(step), "pulled": pulled}


def unlike(batch: int, folder: str) -> dict:
    """Two parts, of which one rank's has most of the seeds: macro-batches of predictions, and what comes of them."""
    graph = graph_of()
    step = step_of(graph, partitioned(graph, (torch.arange(NODES) >= NODES - 20).to(torch.int32)), 1, batch_size=2)
    rows = step.predict(torch.arange(70), 4)
    return {"macro": step.first_stage.num_seeds, "rows": rows.tolist(), "score": step.evaluate(graph.train_idx[:20], 4)}


def separate():
    """Four components of 30 nodes, 20 of each to train on, and the parts that they are."""
    torch.manual_seed(1)
    edges = torch.cat([torch.randint(0, 30, (2, 120)) + 30 * number for number in range(4)], 1)
    graph = joestar.Graph.from_edge_index(edges, 120)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(120, FEATURES, dtype=torch.float64), torch.randint(0, 4, (120,))
    graph.train_idx = torch.cat([torch.arange(20) + 30 * number for number in range(4)])
    return graph, partitioned(graph, (torch.arange(120) // 30).to(torch.int32))


def cut(batch: int, folder: str) -> dict:
    """Macro-batches on a ring, of which the last rank's have no room at once, and are cut; states are taken between."""
    results = {}
    nodes = torch.arange(NODES)
    ring = joestar.Graph.from_edge_index(
        torch.stack([nodes.repeat(2), torch.cat([nodes + 1, nodes + 4]) % NODES]), NODES
    )
    like = graph_of()
    ring.ndata["x"], ring.ndata["y"], ring.train_idx = like.ndata["x"], like.ndata["y"], like.train_idx
    last = joestar.distributed.rank() == joestar.distributed.world_size() - 1
    plan = PartitionPlanner.plan

    def tight(self):
        found = plan(self)
        found.plan.hot, found.plan.hot_ids, found.plan.cold = 4, found.plan.hot_ids[:4], 24 if last else 90
        return found

    for name in ("whole", "cut"):
        with mock.patch.object(PartitionPlanner, "plan", tight if name == "cut" else plan):
            parts = partitioned(ring, (nodes // 15).to(torch.int32))
            step = step_of(ring, parts, 3, {"ahead": 2}, fanouts=(-1, -1))
        losses = []
        for _ in range(2):
            for loss in step.epoch(ring.train_idx, 3):
                losses.append(loss.item())
                if name == "cut":
                    step.state_dict()
        results[name] = {"losses": losses, "state": state_of(step), "history": history_of(step)}
        results[f"times {name}"] = step.traffic.cut
    return results


def begun(batch: int, folder: str) -> dict:
    """An epoch, and a part of the next one; a checkpoint of it."""
    step, graph = case_of("two rounds")
    losses = [loss.item() for loss in step.epoch(graph.train_idx, batch)]
    epoch = step.epoch(graph.train_idx, batch)
    losses += [next(epoch).item() for _ in range(2)]
    joestar.Checkpoints(os.path.join(folder, f"begun-{joestar.distributed.world_size()}")).save(step)
    return {"losses": losses}


def goes_on(batch: int, folder: str) -> dict:
    """In the middle of an epoch that one process has begun: what is left of it, and one more."""
    step, graph = case_of("two rounds")
    step.load_state_dict(joestar.Checkpoints(os.path.join(folder, "begun-1")).latest()["step"])
    losses, seeds = [], []
    for _ in range(2):
        for loss, own in step.epoch(graph.train_idx, batch, with_seeds=True):
            losses.append(loss.item())
            seeds.append(own.tolist())
    return {"losses": losses, "seeds": seeds, "state": state_of(step), "history": history_of(step)}


def fitted(batch: int, folder: str) -> dict:
    """``fit`` with a schedule per step, validation and checkpoints, then resumed for one more epoch."""
    step, graph = case_of("two rounds")
    most = step._most_steps(graph.train_idx, batch * joestar.distributed.world_size(), False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=3 * most, cycle_momentum=False)
    kept = joestar.Checkpoints(os.path.join(folder, "fit"))
    given = {"batch_size": batch, "checkpoints": kept, "checkpoint_every": 2}
    history = step.fit(graph.train_idx, graph.train_idx[:20], epochs=2, scheduler=schedule, **given)
    found = {"val": [record.val for record in history.records], "most": most, "steps": step.counters.steps}
    other, _ = case_of("two rounds")
    schedule = torch.optim.lr_scheduler.OneCycleLR(other.optimizer, 0.1, total_steps=3 * most, cycle_momentum=False)
    history = other.fit(graph.train_idx, graph.train_idx[:20], epochs=3, resume=True, scheduler=schedule, **given)
    return found | {"all": [record.val for record in history.records], "state": state_of(other)}


def refused(batch: int, folder: str) -> dict:
    """What cannot be is said on all ranks."""
    told, group = {}, joestar.distributed.current()

    tried = telling(told)

    unlike = partitioned(graph_of(), (torch.arange(NODES) + group.rank) % 6)
    tried("parts", lambda: step_of(graph_of(), unlike, 2))
    synced = model_of(norm="batch_norm")
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(synced)
    tried("synced", lambda: case_of("two rounds", model=synced))
    tried("memory", lambda: case_of("two rounds", memory="2KiB"))
    few = graph_of()
    few.train_idx = few.train_idx[:2]
    there = step_of(few, parts_of(few, 6), 2)
    tried("no row", lambda: there.epoch(torch.arange(NODES), batch))
    list(there.epoch(few.train_idx, batch))
    step, graph = case_of("two rounds")
    epoch = step.epoch(graph.train_idx, batch)
    next(epoch)
    step.evaluate(torch.arange(9))  # the macro-batch is loaded once more for the next step
    tried("first saves", lambda: step.state_dict() if group.rank == 0 else next(epoch))
    tried("first restarts", lambda: step.restart() if group.rank == 0 else step.evaluate(torch.arange(9)))
    tried("alone", lambda: step.state_dict() if group.rank == 0 else step.evaluate(torch.arange(9)))
    return told


def one_fails(how: str, hosts: str = "") -> None:
    """The last rank does not come to its third macro-batch, or to a step in the middle of one; or is stopped while it
    reads rows for other hosts."""
    joestar.distributed.init(20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    last = joestar.distributed.rank() == joestar.distributed.world_size() - 1
    with cheaper(cheapest), on_hosts(hosts):
        step, graph = case_of("two rounds")
        pull, peek = step.exchange.store.pull, step.exchange.store.peek

        def failing(layer, ids, now, rows=None):
            if last and now == 2 and how == "raises":
                raise MemoryError("made up by the table")
            return pull(layer, ids, now, rows)

        def serving(layer, ids):
            if last and threading.current_thread() is not threading.main_thread() and how.endswith("serves"):
                if how.startswith("is killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError("made up by the table")
            return peek(layer, ids)

        step.exchange.store.pull, step.exchange.store.peek = failing, serving
        for _ in range(3):
            for number, _ in enumerate(step.epoch(graph.train_idx, 5)):
                if last and number == 3 and how == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the epochs were finished")
