"""Killed and resumed on a GPU: with ``deterministic=True`` the losses are those of a run that was not killed."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

import joestar

from .test_step_graph import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

EPOCHS, BATCH = 2, 200


def run_fit(folder, log, model: str, backend: str, kill_after: int | None) -> None:
    """In a process of its own: notes every loss, and kills itself after so many steps; bounds are tight."""
    step = make(model=model, backend=backend, deterministic=True, slack=0.0, warm_up=2)
    take, taken = step._runner.take, []

    def noted(run):
        loss = take(run)
        taken.append(loss)
        with open(log, "a") as file:
            file.write(json.dumps([run.epoch, run.position, loss.item().hex()]) + "\n")
        if len(taken) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    step._runner.take = noted
    saved = joestar.Checkpoints(folder)
    step.fit(step.graph.train_idx, None, EPOCHS, BATCH, checkpoints=saved, checkpoint_every=4, resume=True)


def losses(folder, model: str, backend: str, kills: list[int]) -> dict:
    """Losses, in hexadecimal, by epoch and step; steps that were repeated must agree."""
    context, log = multiprocessing.get_context("spawn"), folder / "log"
    for kill in [*kills, None]:
        process = context.Process(target=run_fit, args=(folder / "saved", log, model, backend, kill))
        process.start()
        process.join(300)
        assert process.exitcode == (0 if kill is None else -signal.SIGKILL)
    found = {}
    for line in log.read_text().splitlines():
        epoch, position, loss = json.loads(line)
        assert found.setdefault((epoch, position), loss) == loss, f"{epoch}, {position} had another loss"
    assert len(found) == EPOCHS * 15
    return found


@pytest.mark.parametrize(
    ("model", "backend", "kills"),
    [("GraphSAGE", "eager", [6, 13, 1]), ("GAT", "eager", [20]), ("GCN", "inductor", [9])],
)
def test_killed_and_resumed_is_as_uninterrupted(model, backend, kills, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert losses(killed, model, backend, kills) == losses(whole, model, backend, [])
