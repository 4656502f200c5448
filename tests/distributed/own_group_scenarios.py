"""Ranks of a script that has joined its processes by ``torch.distributed`` itself."""

from unittest import mock

import torch
import torch.distributed as dist
from captures import cheaper, cheapest, silent

import joestar
from tests.distributed.odd_scenarios import BATCH, Net, calls_of, compiled, error_of, odd, trained
from tests.distributed.scenarios import ids


def odd_and_own_group(*names: str) -> dict:
    """Scenarios of ``odd``, and that of the same processes joined by the script."""
    found = odd(*names)
    with cheaper(cheapest), silent():
        dist.init_process_group("gloo")
        try:
            return found | {"within": within(), "destroyed": destroyed()}
        finally:
            joestar.distributed.shutdown()


def _sum() -> float:
    """By the script's own group."""
    number = torch.ones(1)
    dist.all_reduce(number)
    return number.item()


def within() -> dict:
    """Training within the script's own group, which is there before, meanwhile and afterwards."""
    calls = {name: mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in ("all_reduce", "broadcast")}
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        group = joestar.distributed.init(timeout=20.0, device="cpu")
    with calls["all_reduce"] as sums, calls["broadcast"] as sent:
        step = compiled(Net())
        found = {"trained": trained(step), "scores": step.evaluate(ids(40), BATCH)}
    own = [call.kwargs["group"] is group.process_group for each in (sums, sent) for call in each.call_args_list]
    found |= {"calls": len(own), "own": all(own), "sums": [_sum()]}
    joestar.distributed.shutdown()
    found["sums"].append(_sum())
    return found | {"waits": [call.kwargs["timeout"].total_seconds() for call in made.call_args_list]}


def destroyed() -> dict:
    """What is called behind ``destroy_process_group``, of a step whose job was not left; the end of that job."""
    joestar.distributed.init(timeout=20.0, device="cpu")
    step = compiled(Net())
    begun = step.epoch(ids(40), BATCH)
    next(begun)
    dist.destroy_process_group()
    works = {"predict": step.predict, "full": lambda idx: step.predict(idx, full=True), "evaluate": step.evaluate}
    found = {name: error_of(lambda work=work: work(ids(10))) for name, work in works.items()}
    return found | calls_of(step) | {"next": error_of(lambda: next(begun))}
