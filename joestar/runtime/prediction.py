"""Outputs without training: the callable form and ``predict``."""

import torch
from torch import Tensor

from joestar.profile.sizes import step_key
from joestar.runtime.executor import Executor
from joestar.runtime.seeds import filled, spread_nodes

PREDICTED = 1024
"""Seeds per batch of predictions, unless another number is given: never that of an earlier call."""


def logits(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int, step: int, whole: bool = True):
    """What the model returns for these seeds, one row each; padded if it fits, else exact.

    The flag is read once, after sampling.

    Args:
        whole: in the model's own structure; else the list of its tensors.
    """
    tensors = _tensors(executor, seeds, batch, seed, epoch, step)
    return executor.program.assembled(tensors) if whole else tensors


def _tensors(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int, step: int) -> list[Tensor]:
    program, key = executor.program, step_key(seed, epoch, step, executor.device)
    if executor.execution == "padded":
        batch = max(batch, seeds.numel())
        if program.run is None or batch > program.batch or executor.resumed is not None:
            executor.prepare(population(executor, seeds, batch, seed, epoch), batch, seed, epoch)
            program = executor.program
        if seeds.numel() <= program.batch:
            outputs, counts, fits = executor.forward(filled(seeds, program.batch), seeds.numel(), key)
            if fits:
                executor.note(counts)
                return [rows[: seeds.numel()] for rows in outputs]
            executor.counters.fallbacks += 1
            result = _exact(executor, seeds, key)
            executor.after_overflow()
            return result
    return _exact(executor, seeds, key)


def _exact(executor: Executor, seeds: Tensor, key: Tensor) -> list[Tensor]:
    executor.counters.exact_steps += executor.program.kind == "logits"
    return executor.exact(seeds, key)


def population(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int) -> Tensor:
    """What to choose bounds from while later batches are unknown: these seeds, then nodes from all over the graph."""
    return torch.cat([seeds, spread_nodes(4 * batch, executor.program.graph, seed, epoch)])


def predict(executor: Executor, seeds: Tensor, batch: int, seed: int):
    """What the model returns for every seed in order, without gradients; samples under epoch -1."""
    batch = min(batch, executor.program.graph.num_nodes)
    if executor.execution == "padded":
        executor.prepare(seeds, batch, seed, -1)  # bounds from batches of all of them
    results = Rows(seeds.numel(), executor.device)
    for step, start in enumerate(range(0, seeds.numel(), batch)):
        results.put(start, logits(executor, seeds[start : start + batch], batch, seed, -1, step, whole=False))
    return executor.program.assembled(results.tensors)


class Rows:
    """Outputs of batches, put together on ``device``: as many rows as there are seeds."""

    def __init__(self, number: int, device: torch.device):
        self.number, self.device = number, device
        self.tensors: list[Tensor] = []

    def put(self, start: int, outputs: list[Tensor]) -> None:
        """The rows from ``start`` on."""
        if not self.tensors:
            self.tensors = [
                torch.empty((self.number, *rows.shape[1:]), dtype=rows.dtype, device=self.device) for rows in outputs
            ]
        for result, rows in zip(self.tensors, outputs, strict=True):
            result[start : start + rows.shape[0]] = rows.detach()
