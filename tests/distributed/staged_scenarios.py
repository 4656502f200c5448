"""What ranks do in the tests of steps over macro-batches. ``alone`` are their counterparts over the whole graph."""

import contextlib
import functools
import os
import threading
from unittest import mock

import numpy as np
import torch

import joestar
from joestar.staged.planning import Planner
from joestar.staged.shared import shared_copy
from joestar.stages import LargeBatch
from joestar.stages.feed import Feed
from joestar.stages.plan import Plan, Speeds
from tests.distributed import scenarios
from tests.distributed.scenarios import cheaper, cheapest, epochs_of, quick, silent, state_of, telling
from tests.runtime.staged_plans import Whole

STEPS = 2
"""Of a macro-batch, the first of an epoch left out."""


def host_graph():
    """The graph of all tests, in host memory."""
    return scenarios.planted_graph(nodes=400, dtype=torch.float64, degree=5)


def is_last() -> bool:
    """Whether this is the last rank."""
    return joestar.distributed.rank() == joestar.distributed.world_size() - 1


def staged_of(batch: int, cold: int = 400, whole: bool = True, graph=None, **options):
    """A step over macro-batches of a plan that is given, which keep every neighbour or sample."""
    graph, number = host_graph() if graph is None else graph, STEPS * batch
    hot = torch.arange(0, 400, 10)
    plan = Plan(1 << 30, False, number, 4, 40, cold, graph.num_edges, hot_ids=hot, batch=batch, seconds={"bus": 1.0})
    stage = (Whole if whole else LargeBatch)(number)
    with mock.patch.multiple(Planner, plan=lambda self: plan, _measured=lambda self: Speeds()):
        return scenarios.step_of(graph, memory=1 << 30, first_stage=stage, batch_size=batch, **options)


def nodes_of(step, *numbers: int) -> torch.Tensor:
    """Nodes, where the step wants them."""
    return torch.arange(*numbers, device=step.whole.device)


def all_of(names: list[str], batch: int, folder: str) -> dict:
    """Several scenarios in the same processes, one after the other."""
    joestar.distributed.init(timeout=20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(cheapest), silent():
        return {name: globals()[name](batch, *[folder] * (name in IN_FOLDER)) for name in names}


IN_FOLDER = ("goes_on", "fitted", "shared", "from_file")


# --- training ---


def plain_run(batch: int, step=None) -> dict:
    """Epochs with clipping and a schedule, calls of the step, scores and outputs between two steps."""
    step = staged_of(batch, clip_grad_norm=0.5) if step is None else step
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 2, 0.5)
    nodes, losses, results = nodes_of(step, 400), [], {}
    for number in range(2):
        for position, loss in enumerate(step.epoch(nodes[:173], batch)):
            losses.append(loss.item())
            schedule.step()
            if number == 1 and position == 1:
                results["within"] = step.evaluate(nodes[100:290], 25)
    for start in (0, 50):
        losses.append(step(nodes[start : start + 41]).item())
    outputs = step.predict(nodes[170:260], 20)
    results |= {"outputs": outputs.tolist(), "few": step.predict(nodes[:5], 20).tolist()}
    results |= {"one": step.predict(nodes[:1], 20).tolist(), "large": step.predict(nodes[:130], 57).tolist()}
    return results | {"losses": losses, "state": state_of(step), "score": step.evaluate(nodes[60:290], 40)}


def few_seeds(batch: int, step=None) -> dict:
    """Last global batches that leave ranks without a seed; an epoch with fewer seeds than ranks; drop_last."""
    step = staged_of(batch, model=scenarios.model_of(dropout=0.4)) if step is None else step
    nodes = nodes_of(step, 400)
    results = {"one over": epochs_of(step, nodes[:81], batch), "one seed": epochs_of(step, nodes[:1], batch)}
    results["dropped"] = epochs_of(step, nodes[:173], batch, drop_last=True)
    results["call"] = step(nodes[:1]).item()
    seen = [seeds.tolist() for _, seeds in step.epoch(nodes[:81], batch, with_seeds=True)]
    return results | {"state": state_of(step), "seeds": seen}


def losses_of(batch: int, staged: bool = True) -> dict:
    """Losses that are no plain mean over the seeds of a share."""
    results, labels = {}, host_graph().ndata["y"]
    ignored = torch.where(torch.arange(labels.numel()) % 5 < 2, -100, labels)
    targets = torch.nn.functional.one_hot(labels, scenarios.CLASSES).double()
    unknown = torch.where(torch.arange(targets.numel()).view_as(targets) % 3 == 0, torch.nan, targets)
    weight = torch.tensor([1.0, 5.0, 0.2, 3.0], dtype=torch.float64, device=scenarios.device())
    table = torch.full((1200,), torch.nan, dtype=torch.float64, device=scenarios.device())
    table[::3] = torch.arange(400, device=table.device) % 7 + 1.0  # of ids, not of positions
    cases = {
        "weighted": (ignored, torch.nn.CrossEntropyLoss(weight=weight)),
        "unknown": (unknown, torch.nn.functional.binary_cross_entropy_with_logits),
        "of seeds": (labels, lambda out, y, seeds: (out.square().mean(1) * table[seeds]).mean()),
    }
    for name, (y, loss) in cases.items():
        with mock.patch.object(scenarios, "planted_graph", _labelled(y)):
            make = staged_of if staged else lambda batch, **more: scenarios.step_of(**more)
            step = make(batch, loss=loss, accumulate=2)
        results[name] = {"losses": epochs_of(step, nodes_of(step, 173), batch, 1), "state": state_of(step)}
    return results


def _labelled(y):
    real = scenarios.planted_graph

    def made(**options):
        graph = real(**options)
        graph.ndata["y"], graph.ids = y, torch.arange(1197, -1, -3, dtype=graph.indices.dtype)
        return graph

    return made


def cut(batch: int) -> dict:
    """Macro-batches that have no room on the last rank only."""
    step = staged_of(batch, cold=275 if is_last() else 400)
    losses = epochs_of(step, torch.arange(173), batch)
    counted = {"cut": step.traffic.cut, "alone": step.traffic.alone, "told": str(step.report())}
    counted["long"] = joestar.distributed.current().board.long
    return {"losses": losses, "state": state_of(step), **counted}


def remade(batch: int) -> dict:
    """Scores, another epoch and a single step in the middle of macro-batches, which are then made again."""
    step, began, begin = staged_of(batch), [], Feed._begin

    def noted(feed, position):
        began.append(joestar.distributed.current().board.long)
        begin(feed, position)

    between = {
        1: lambda: step.evaluate(torch.arange(40), 20),
        3: lambda: next(step.epoch(torch.arange(90), batch)),
        5: lambda: step(torch.arange(30)),
    }
    with mock.patch.object(Feed, "_begin", noted):
        for position, _ in enumerate(step.epoch(torch.arange(16 * batch), batch)):
            between.get(position, int)()
    return {"again": step.traffic.again, "long": began}


def overflows(batch: int) -> dict:
    """A step is too large for the last rank only, then bounds are widened; the other one runs exact sizes."""
    results = {}
    for name in ("overflowing", "exact"):
        options = {"execution": "exact"} if name == "exact" else {"patience": 1}
        step = staged_of(batch, model=scenarios.model_of(norm="batch_norm", dropout=0.3), **options)
        with scenarios.too_large(step, {2, 5} if name == "overflowing" else set()):
            losses = epochs_of(step, torch.arange(173), batch)
        results[name] = {"losses": losses, "state": state_of(step), "overflows": step.counters.overflows}
    return results


def tight(batch: int) -> dict:
    """Bounds that batches exceed on a GPU, too, where steps are recorded once."""
    return scenarios.tight(batch, functools.partial(staged_of, batch), torch.arange(173))


def sampled(batch: int) -> dict:
    """Macro-batches of one's own sampler, twice: each rank draws those of its own seeds."""
    step = staged_of(batch, whole=False)
    return {"losses": epochs_of(step, torch.arange(173), batch), "state": state_of(step)}


def one_hop(batch: int) -> dict:
    """A sampler of one hop: a node's picks do not depend on who else reaches it."""
    graph, number = host_graph(), STEPS * batch
    plan = Plan(1 << 30, False, number, 4, 40, 400, graph.num_edges, hot_ids=torch.arange(0, 400, 10), batch=batch)
    model = scenarios.model_of(num_layers=1)
    with mock.patch.multiple(Planner, plan=lambda self: plan, _measured=lambda self: Speeds()):
        step = joestar.compile(
            model, joestar.NeighborSampler(graph, [3], seed=7), torch.nn.functional.cross_entropy,
            torch.optim.Adam(model.parameters(), 0.01), backend="eager", memory=1 << 30, batch_size=batch,
        )  # fmt: skip
    return {"losses": epochs_of(step, torch.arange(173), batch), "state": state_of(step)}


def planned(batch: int) -> dict:
    """Plans of their own, the last rank's bus is a hundred times slower; and a graph that fits."""
    graph = scenarios.planted_graph(nodes=4000, dtype=torch.float64, degree=5)
    graph.train_idx = torch.arange(173)
    speeds = Speeds(2e6, 1e12, 1e-4) if is_last() else Speeds(2e8, 1e12, 1e-4)
    with mock.patch.object(Planner, "_measured", return_value=speeds):
        step = scenarios.step_of(graph, memory="260KiB", batch_size=batch)
        fits = scenarios.step_of(host_graph(), memory="1GiB", batch_size=batch, clip_grad_norm=0.5)
    losses = epochs_of(step, torch.arange(173), batch, 1)
    moved = plain_run(batch, fits)
    report = str(step.report())
    return {
        "number": step.plan.num_seeds, "text": str(step.plan), "hot": step.plan.hot, "losses": losses, "report": report,
        "fits": fits.plan.fits, "moved": moved,
    }  # fmt: skip


def fitted(batch: int, folder: str, step=None) -> dict:
    """``fit`` with validation and checkpoints, then the run that it is a part of goes on with other ranks."""
    step = staged_of(batch) if step is None else step
    history = step.fit(
        nodes_of(step, 173), nodes_of(step, 180, 290), epochs=2, batch_size=batch,
        checkpoints=joestar.Checkpoints(os.path.join(folder, "fit")), checkpoint_every=2,
    )  # fmt: skip
    return {
        "losses": [record.loss for record in history.records], "val": [record.val for record in history.records],
        "state": state_of(step),
    }  # fmt: skip


def goes_on(batch: int, folder: str) -> dict:
    """In the middle of an epoch, from a file that another number of ranks wrote, and to one."""
    step = staged_of(batch)
    step.first_stage.num_seeds = 7  # another plan: macro-batches are as large as they were
    step.load_state_dict(joestar.Checkpoints(os.path.join(folder, "before")).latest()["step"])
    losses = epochs_of(step, torch.arange(173), batch, 1)
    epoch = step.epoch(torch.arange(173), batch)
    losses += [next(epoch).item(), next(epoch).item()]
    joestar.Checkpoints(os.path.join(folder, "after")).save(step)
    return {"losses": losses, "number": step.first_stage.num_seeds}


# --- memory of the host ---


def shared(batch: int, folder: str) -> dict:
    """Rows of a file, copied once for both ranks: what one writes, the other reads."""
    group, path = joestar.distributed.current(), os.path.join(folder, "rows.npy")
    if group.rank == 0:
        np.save(path, np.arange(30.0).reshape(10, 3))
    group.exchange("the file")
    mapped, own = torch.from_numpy(np.load(path, mmap_mode="c")), torch.ones(4)
    whole = shared_copy(mapped, group)
    found = {"same": torch.equal(whole, mapped), "own": shared_copy(own, group) is None}
    group.exchange("compared")
    whole[group.rank, 0] = -1.0 - group.rank
    group.exchange("written")
    found["written"] = whole[:, 0].tolist()
    with mock.patch("os.open", side_effect=OSError) if is_last() else contextlib.nullcontext():
        found["apart"] = shared_copy(mapped, group) is None
    return found


def from_file(batch: int, folder: str) -> dict:
    """Features mapped from a file: GPUs read them from one copy for all ranks of the host."""
    group, path, graph = joestar.distributed.current(), os.path.join(folder, "x.npy"), host_graph()
    if group.rank == 0:
        np.save(path, graph.ndata["x"].numpy())
    group.exchange("the file")
    graph.ndata["x"] = torch.from_numpy(np.load(path, mmap_mode="c"))
    step = staged_of(batch, graph=graph)
    with open("/proc/self/maps") as maps:
        places = [line.split()[0].split("-") for line in maps if "memfd:joestar" in line]
    shared = sum(int(end, 16) - int(start, 16) >= graph.ndata["x"].nbytes for start, end in places)
    return {"losses": epochs_of(step, torch.arange(173), batch), "state": state_of(step), "shared": shared}


# --- what differs, and what fails ---


def refused(batch: int) -> dict:
    """What is refused on all ranks, in the same words."""
    told = {}

    tried = telling(told)

    graph = host_graph()
    tried("memory", lambda: scenarios.step_of(graph, memory="1GiB" if is_last() else "2GiB"))
    changed = host_graph()
    changed.ndata["x"][150, 3] += is_last()
    with mock.patch.object(Planner, "_measured", return_value=Speeds()):
        tried("graph", lambda: scenarios.step_of(changed, memory="60KiB", batch_size=batch))
        tried("too small", lambda: scenarios.step_of(graph, memory="20KiB", batch_size=batch))
    return told


def one_fails(how: str) -> None:
    """The last rank's pipeline does not make its third macro-batch."""
    joestar.distributed.init(20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(quick):
        step = staged_of(10)
        real = step.first_stage.sample

        def sample(graph, sampler, seeds, key):
            if is_last() and key[2] == 2:
                if how == "interrupted":
                    import _thread

                    _thread.interrupt_main()
                    threading.Event().wait(0.3)
                else:
                    raise MemoryError("made up by the first stage")
            return real(graph, sampler, seeds, key)

        step.first_stage.sample = sample
        for _ in step.epoch(torch.arange(300), 10):
            pass
    raise AssertionError("the epoch was finished")
