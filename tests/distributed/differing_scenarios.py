"""Ranks that differ, wait for rank 0, or fail."""

import contextlib
import os
import signal
import threading
from importlib import import_module
from unittest import mock

import torch
import torch.nn.functional as F
from captures import cheaper, cheapest, quick, silent
from torch import nn

import joestar
from joestar.distributed import board, words
from joestar.errors import DistributedError
from joestar.runtime import checkpoint
from joestar.runtime.loss_parts import _tried
from joestar.runtime.seeds import shuffled
from tests.distributed.scenarios import SEED, epochs_of, graph_of, ids, model_of, nn_of, state_of, step_of
from tests.runtime.stand_ins import captured_steps


def differing(batch: int, folder: str) -> dict:
    """Both of the next, in the same processes."""
    joestar.distributed.init(timeout=20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(cheapest), silent():
        return one_after_the_other(batch, folder) | differences(batch)


def one_after_the_other(batch: int, folder: str) -> dict:
    """What rank 0 does first, or alone, and is not quick at: downloads, checkpoints; and its errors."""
    first, told = joestar.distributed.is_first(), {}

    def slowly(real):
        def work(*given):
            if first:
                threading.Event().wait(0.2)
            return real(*given)

        return work

    def load(name, *_):
        path = os.path.join(folder, name[4:])
        told[name] = os.path.exists(path)
        if first and name == "pyg:Gone":
            raise joestar.errors.DataError("there is no such dataset")
        open(path, "w").close()
        return name

    with mock.patch.object(import_module("joestar.data.load"), "load_named", slowly(load)):
        told["loaded"] = joestar.load("pyg:Made")
        told["load error"] = _error_of(lambda: joestar.load("pyg:Gone"))
    step, kept = step_of(), joestar.Checkpoints(os.path.join(folder, "kept"))
    with mock.patch.object(checkpoint, "write_checkpoint", slowly(checkpoint.write_checkpoint)):
        if first:
            kept.save(step)  # for itself
        next(step.epoch(ids(100), batch))
        path = kept.save(step)
    told["file"] = path.name if path.exists() else None
    told["again"] = kept.save(step).name
    told["save error"] = _error_of(lambda: kept.save(step, odd=object()))
    return told


def _error_of(work) -> str:
    try:
        work()
    except joestar.errors.JoestarError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differences(batch: int) -> dict:
    """Everything that differs on the last rank is named on all."""
    odd = joestar.distributed.rank() == joestar.distributed.world_size() - 1
    told = {}

    def refused(name, work) -> None:
        told[name] = _error_of(work)

    refused("model", lambda: step_of(model=model_of(num_layers=1 if odd else 2)))
    refused("dropout", lambda: step_of(model=model_of(dropout=0.25 if odd else 0.5)))
    refused("module", lambda: step_of(model=nn_of(nn.ELU() if odd else nn.ReLU())))
    refused("sampler", lambda: step_of(fanout=2 + odd))
    refused("constant", lambda: step_of(loss=_times(2.0 if odd else 1.0)))
    changed = graph_of()
    changed.ndata["x"][150, 3] += odd
    refused("graph", lambda: step_of(changed))
    refused("options", lambda: step_of(accumulate=2 if odd else 1))
    step = step_of(model=_other_start(odd))
    refused("seeds", lambda: next(step.epoch(ids(odd, 100), batch)))
    refused("batch", lambda: next(step.epoch(ids(100), batch + odd)))
    refused("fine", lambda: next(step.epoch(ids(100), batch)))
    with torch.no_grad():
        next(step.model.parameters()).view(-1)[0] += odd * 1e-12
    refused("parameters", lambda: next(step.epoch(ids(100), batch)))
    refused("given seeds", lambda: step(ids(10) + odd))
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0 + odd], dtype=torch.float64)
    refused("class weights", lambda: step_of(loss=nn.CrossEntropyLoss(weight)))
    refused("value", lambda: next(step_of(loss=_of_rank).epoch(ids(100), batch)))
    refused("later", lambda: epochs_of(step_of(_all_kept_in_the_trial(), loss=_of_kept), ids(390), batch))
    refused("calls of few", lambda: _step_of_some_kept()(ids(40)))
    few = _step_of_some_kept(ids(60))
    refused("later calls", lambda: [few(ids(start, start + 40)) for start in (0, 20, 100)])
    refused("nothing", lambda: next(step_of(loss=_with_nothing).epoch(ids(100), batch)))
    refused("own loop", lambda: joestar.compile(model_of(), step.sampler, backend="eager")(ids(4)))
    refused("loss", lambda: next(step_of(loss=_compares).epoch(ids(100), batch)))
    refused("calls", lambda: step.evaluate(ids(50)) if odd else next(step.epoch(ids(100), batch)))
    return told


def _other_start(odd: bool) -> nn.Module:
    model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + odd)
    return model


def _times(factor: float):
    return lambda out, y: factor * F.cross_entropy(out, y)


def _of_rank(out, y):
    return F.cross_entropy(out, y) * (1 + joestar.distributed.rank())


def _of_kept(out, y, kept):
    """A mean over some of the seeds."""
    return (F.cross_entropy(out, y, reduction="none") * kept).sum() / kept.sum()


def _all_kept_in_the_trial():
    """A graph of which the trial before the first step sees none of the nodes that are left out."""
    graph = graph_of()
    order = shuffled(ids(390).to(graph.indices.dtype), SEED, 0)
    kept = torch.zeros(graph.num_nodes, dtype=torch.float64, device=graph.device)
    kept[_tried(order, graph.ndata["y"], None)] = 1
    graph.ndata["kept"] = kept
    return graph


def _step_of_some_kept(train_idx=None):
    """Calls for nodes from 100 on have seeds that are left out."""
    graph = graph_of()
    nodes = ids(graph.num_nodes)
    graph.ndata["kept"] = 1.0 - ((nodes >= 100) & (nodes % 3 == 0)).double()
    graph.train_idx = train_idx
    return step_of(graph, loss=_of_kept)


def _with_nothing(out, y):
    return F.cross_entropy(out, y), {"odd": (y < 0).sum()}


def _compares(out, y):
    return F.cross_entropy(out, y) + out.mean(0).pow(2).sum()


def with_words(name: str, *words: str) -> str:
    """Every rank has a value of its own in its environment."""
    os.environ[name] = words[int(os.environ["RANK"])]
    return _error_of(lambda: joestar.distributed.init(timeout=20.0, device="cpu"))


def freezes_within(batch: int) -> list[str]:
    """Between epochs what one freezes is taken over; within one it is an error: (of flags, of parameters)."""
    joestar.distributed.init(timeout=20.0, device="cpu")
    with cheaper(quick):
        step = step_of(model=model_of(norm="batch_norm"))
        norm = next(module for module in step.model.modules() if isinstance(module, nn.BatchNorm1d))
        changes = [norm.eval, lambda: next(step.model.parameters()).requires_grad_(False)]
        found = []
        for change in changes:
            losses = step.epoch(ids(173), batch)
            next(losses)
            change()
            found.append(_error_of(lambda losses=losses: next(losses)))
            step.model.train()
        list(step.epoch(ids(173), batch))
    return found


def no_devices() -> None:
    """GPUs are wanted, and there are none."""
    joestar.distributed.init(device="cuda")


def one_fails(how: str, timeout: float, failing: int = 1, joined: bool = False) -> None:
    """A rank does not make its third step; ``joined``: in a script that has joined its processes by itself."""
    if joined:
        torch.distributed.init_process_group("gloo")
    joestar.distributed.init(timeout, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(quick):
        step = step_of()
        for number, _ in enumerate(step.epoch(ids(250), 20)):
            if number == 2 and joestar.distributed.rank() == failing:
                _fail(how)
    raise AssertionError("the epoch was finished")


def _fail(how: str) -> None:
    if how == "raises":
        raise ValueError("made up by the last rank")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def interrupted_and_goes_on(captured: bool, word: int) -> dict:
    """Rank 1 is interrupted where ranks hear of their third step whether it fits, and both scripts take what comes."""
    group = joestar.distributed.init(20.0, device="cpu")
    owner, name = (words.HostWords, "all") if captured else (type(group), "add_up")
    real, heard = getattr(owner, name), [0]

    def all_of(*given):
        heard[0] += group.rank == 1
        if heard[0] == word:
            raise KeyboardInterrupt
        return real(*given)

    said = []
    with cheaper(cheapest), captured_steps() if captured else contextlib.nullcontext():
        step = step_of()
        list(step.epoch(ids(60), 20))
        with mock.patch.object(owner, name, all_of):
            epoch = step.epoch(ids(250), 20)
            while epoch.running and len(said) < 40:
                try:
                    next(epoch)
                except (KeyboardInterrupt, DistributedError) as error:
                    said.append(f"{type(error).__name__}: {error}")
                    if isinstance(error, DistributedError):
                        break
    return {"said": said, "position": epoch.position, "state": state_of(step), "steps": epoch.steps}


def killed_at_once() -> None:
    """The last rank, as soon as it has met the others; before it says for the second time where it is."""
    last = os.environ["RANK"] == "1"
    with mock.patch.multiple(board, PERIOD=600.0 if last else 0.05, SILENCE=1.0):
        group = joestar.distributed.init(5.0, device="cpu")
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        group.exchange("a meeting")
    raise AssertionError("it came to the meeting")
