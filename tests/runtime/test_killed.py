"""A run that is killed anywhere, and resumed, is one that was not, bit for bit: losses and weights."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

import joestar
from joestar.runtime import checkpoint

from .test_checkpoint import IDX, VAL, made

pytestmark = pytest.mark.usefixtures("cheapest_captures")

EPOCHS, EVERY = 3, 3
STEPS = EPOCHS * 8


def run_fit(folder, log, kill_after: int | None, kill_in_write: int | None, parent=None) -> None:
    """In a process of its own: a fit that writes every loss it gets, and its weights; it may kill itself somewhere.

    Args:
        parent: a connection to one that kills this process wherever it is: it is told of every step and of the end,
            and waited for then.
    """
    torch.set_num_threads(1)
    step = made(warm_up=3, deterministic=True)
    own = step._runner.optimizer.optimizer
    taken, writes, take = [0], [0], step._runner.take

    def tell(*told) -> None:
        with open(log, "a") as file:
            file.write(json.dumps(told) + "\n")

    def counted(run):
        loss = take(run)
        tell(run.epoch, run.position, loss.item())
        if parent is not None:
            parent.send(run.position)
        taken[0] += 1
        if taken[0] == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def sync(descriptor):
        writes[0] += 1
        if writes[0] == kill_in_write:
            os.kill(os.getpid(), signal.SIGKILL)

    step._runner.take = counted
    if parent is not None:
        parent.send("begins")
    else:  # writes of a checkpoint are counted, not waited for
        checkpoint.os.fsync = sync
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    saved = joestar.Checkpoints(folder)
    step.fit(IDX, VAL, EPOCHS, 100, scheduler=scheduler, checkpoints=saved, checkpoint_every=EVERY, resume=True)
    if parent is not None:
        parent.send("has ended")
        parent.recv()
    tell(EPOCHS, 0, [value.tolist() for value in step.model.state_dict().values()])


def start_fit(folder, *args) -> multiprocessing.Process:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_fit, args=(folder / "saved", folder / "log", *args))
    process.start()
    return process


def finished(folder) -> dict:
    """Runs the fit to its end: losses by (epoch, step), and the weights; steps that were repeated must agree."""
    process = start_fit(folder, None, None)
    process.join(120)
    assert process.exitcode == 0
    found = {}
    for line in (folder / "log").read_text().splitlines():
        epoch, position, value = json.loads(line)
        assert found.setdefault((epoch, position), value) == value, "a step that was repeated had another loss"
    assert len(found) == STEPS + 1
    return found


def killed(folder, kills: list[tuple[int | None, int | None]]) -> dict:
    """What a run that killed itself so often leaves."""
    for kill in kills:
        process = start_fit(folder, *kill)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    return finished(folder)


def killed_from_outside(folder, kills: list[tuple[int, float]]) -> dict:
    """What a run leaves that was killed so often, each time so many signs of life and seconds after its start.

    Args:
        kills: what is left of a run may have fewer signs: it is killed behind the last one.
    """
    for signs, seconds in kills:
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = start_fit(folder, None, None, theirs)
        theirs.close()
        for _ in range(signs):
            assert ours.poll(120)
            if ours.recv() == "has ended":
                break
        process.join(seconds)  # it never ends by itself
        process.kill()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    return finished(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kills", [[(5, None)], [(10, None), (None, 2)], [(None, 1), (1, None), (13, None)]], ids=str)
def test_killed_and_resumed_is_as_uninterrupted(kills, tmp_path, uninterrupted):
    """SIGKILL between steps and in the middle of writing a checkpoint."""
    assert killed(tmp_path, kills) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random(seed, tmp_path, uninterrupted):
    random = torch.Generator().manual_seed(seed)
    kills = []
    for _ in range(1 + seed % 3):
        number = int(torch.randint(1, 8, (), generator=random))
        kills.append((number, None) if torch.rand((), generator=random) < 0.7 else (None, 1 + number % 2))
    assert killed(tmp_path, kills) == uninterrupted


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_killed_from_outside(seed, tmp_path, uninterrupted):
    """SIGKILL wherever the run is: it chooses no place, and the same seed need not hit the same one again."""
    random, kills = torch.Generator().manual_seed(seed), []
    for _ in range(1 + seed % 3):
        signs = int(torch.randint(1, STEPS // 2, (), generator=random))
        kills.append((signs, float(torch.rand((), generator=random)) * (0.01 if seed % 2 else 0.1)))
    assert killed_from_outside(tmp_path, kills) == uninterrupted
