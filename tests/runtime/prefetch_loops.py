"""Loops of a user, run with ``prefetch=True`` and without: what is left must be the same, bit for bit."""

import contextlib
import copy
from unittest import mock

import torch

from joestar.runtime.prefetch import Ahead
from joestar.store import FeatureStore
from tests.runtime.common import make_step, planted_graph

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)


def graph_of(store: bool = False):
    """The small graph; features in float32 outside of the device, some of them hot."""
    if not store:
        return planted_graph(dtype=torch.float64)
    graph = planted_graph()
    graph.ndata["x"] = FeatureStore(graph.ndata["x"].clone(), "cpu", hot=torch.arange(0, 1200, 9))
    return graph


def everything(step) -> list[torch.Tensor]:
    """Parameters, buffers, gradients, moments, sums of groups, averages."""
    state = step._runner.optimizer.optimizer.state
    parameters = list(step.model.parameters())
    moments = [value for p in parameters for value in state.get(p, {}).values() if isinstance(value, torch.Tensor)]
    found = [*step.model.state_dict().values(), *moments, *step._runner.update.sums, *(step.ema or {}).values()]
    return [value.detach().clone() for value in found + [p.grad for p in parameters if p.grad is not None]]


def identical(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


def both(loop, monkeypatch, *, early=False, store=False, least=2, **options):
    """Carries out ``loop(step) -> numbers`` with and without; all that is left must be the same."""
    monkeypatch.setattr(Ahead, "__init__", _starting(Ahead.__init__, early))
    found = {}
    for ahead in (False, True):
        step = make_step(graph=graph_of(store), prefetch=ahead, **copy.deepcopy(options))
        found[ahead] = [*loop(step), *everything(step)], step.counters
    identical(found[True][0], found[False][0])
    plain, ours = found[False][1], found[True][1]
    assert plain.prefetched == 0 and ours.prefetched >= least
    for name in ("steps", "exact_steps", "overflows", "fallbacks", "recompiles", "warm_up_batches"):
        assert getattr(ours, name) == getattr(plain, name), name
    return ours


def _starting(init, early):
    def start(self, *given):
        init(self, *given)
        self.early = early

    return start


# --- what happens between two steps ---


def plainly(step):
    return [loss.item() for _ in range(2) for loss in step.epoch(IDX, 100)]


def evaluating(step):
    found = []
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position % 3 == 1:
            found += [step.evaluate(VAL, 50)["accuracy"], *step.predict(VAL[:7]).flatten().tolist()]
    return found


def other_steps(step):
    found, second = [], step.epoch(VAL, 64, shuffle=False)
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position in (1, 2, 6):
            found.append(next(second).item())
        if position == 4:
            found.append(step(torch.arange(300, 340)).item())
    return found


def leaving(step):
    found = []
    for stop in (3, 1):
        for position, loss in enumerate(step.epoch(IDX, 100)):
            found.append(loss.item())
            if position == stop:
                break
    step.restart(3)
    return found + [loss.item() for loss in step.epoch(IDX.flip(0), 90, drop_last=True)]


def writing(step):
    """Features, labels and seeds are written in place, some where no step reads them."""
    found, idx, x = [], IDX.clone(), step.graph.ndata["x"]
    for position, loss in enumerate(step.epoch(idx, 100, shuffle=False)):
        found.append(loss.item())
        if position in (1, 2):
            x.mul_(0.5)
        if position == 3:
            step.graph.ndata["y"][:400] = 0
        if position == 5:
            idx.fill_(7)
            found.append(step.evaluate(VAL, 50)["accuracy"])
    return found


def loading(step):
    """A checkpoint in the middle of an epoch: back to it, and on in a step that is new."""
    found = []
    for position, loss in enumerate(step.epoch(IDX, 100)):
        found.append(loss.item())
        if position == 2:
            state = copy.deepcopy(step.state_dict())
        if position == 4:
            break
    step.load_state_dict(state)
    found += [loss.item() for loss in step.epoch(IDX, 100)]
    other = make_step(graph=step.graph, prefetch=step._options.prefetch)
    other.load_state_dict(copy.deepcopy(state))
    return found + [loss.item() for loss in other.epoch(IDX, 100)] + everything(other)


def scheduling(step):
    found, schedule = [], torch.optim.lr_scheduler.StepLR(step.optimizer, 3, 0.5)
    for loss in step.epoch(IDX, 100):
        found.append(loss.item())
        schedule.step()
    return found


def failing(step):
    """An error in the optimizer: the step has not happened, and is taken again."""
    found, real, calls = [], step._runner.update.apply, []

    def apply(*given):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError
        real(*given)

    epoch = step.epoch(IDX, 100)
    with mock.patch.object(step._runner.update, "apply", apply):
        while len(epoch):
            with contextlib.suppress(ZeroDivisionError):
                found.append(next(epoch).item())
    return found


LOOPS = (plainly, evaluating, other_steps, leaving, writing, loading, scheduling, failing)
