"""Outputs without training: the callable form and ``predict``."""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.facts import weights_of
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
    if not torch.is_grad_enabled():  # programs of training mode compute with gradients
        tensors = [tensor.detach() for tensor in tensors]
    return executor.program.assembled(tensors) if whole else tensors


def _tensors(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int, step: int) -> list[Tensor]:
    program, key = executor.program, step_key(seed, epoch, step, executor.device)
    program.trace(seeds, key)
    program.check_lookups(seeds)
    if executor.execution == "padded":
        batch = max(batch, seeds.numel())
        if program.run is None or batch > program.batch or executor.resumed is not None:
            executor.prepare(population(executor, seeds, batch, seed, epoch), batch, seed, epoch)
            program = executor.program
        if seeds.numel() <= program.batch:
            outputs, counts, fits = executor.forward(filled(seeds, program.batch), seeds.numel(), key)
            if fits:
                executor.note(counts)
                pairs = zip(outputs, program.rows, strict=True)
                return [rows[: seeds.numel()] if per_seed else rows for rows, per_seed in pairs]
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


def predict(executor: Executor, seeds: Tensor, batch: int, seed: int, group: Group | None = None):
    """What the model returns for every seed in order, without gradients; samples under epoch -1.

    Args:
        group: ranks that divide the batches, or ``None``.
    """
    batch = min(batch, executor.program.graph.num_nodes)
    if group is not None:
        return _predict_together(executor, seeds, batch, seed, group)
    if executor.execution == "padded":
        executor.prepare(seeds, batch, seed, -1)  # bounds from batches of all of them
    results = Rows(seeds.numel(), executor.device)
    for step, start in enumerate(range(0, seeds.numel(), batch)):
        results.put(start, logits(executor, seeds[start : start + batch], batch, seed, -1, step, whole=False))
    return executor.program.assembled(results.tensors)


def _predict_together(executor: Executor, seeds: Tensor, batch: int, seed: int, group: Group):
    """Batches in turn to the ranks: each is what it is in one process, as draws are keyed by its number."""
    agree_on(group, executor.program.model, seeds, batch, seed)
    with group.board.at("step.predict or step.evaluate", long=True):
        if executor.execution == "padded":
            executor.prepare(seeds, batch, seed, -1)
        results = Rows(seeds.numel(), executor.device, torch.zeros)
        starts = list(enumerate(range(0, seeds.numel(), batch)))
        for step, start in starts[group.rank :: group.world]:
            results.put(start, logits(executor, seeds[start : start + batch], batch, seed, -1, step, whole=False))
        if not results.tensors:  # of fewer batches than ranks, this one has none: only shapes are wanted
            results.make(logits(executor, seeds[:batch], batch, seed, -1, 0, whole=False))
        group.exchange("the end of step.predict or step.evaluate")
    return executor.program.assembled(group.join_rows(results.tensors))


def agree_on(group: Group, model: torch.nn.Module, seeds: Tensor, batch: int, seed: int, full: bool = False) -> None:
    """Raises ``DistributedError`` on all ranks unless they predict the same, with the same parameters and buffers."""
    given = {"batch_size": str(batch), "seed": str(seed), "full": str(full)}
    group.agree("step.predict or step.evaluate", weights_of(model, seeds) | given)


class Rows:
    """Outputs of batches, put together on ``device``: as many rows as there are seeds.

    Args:
        empty: makes a tensor, ``torch.empty`` or ``torch.zeros``.
    """

    def __init__(self, number: int, device: torch.device, empty: Callable[..., Tensor] = torch.empty):
        self.number, self.device, self.empty = number, device, empty
        self.tensors: list[Tensor] = []

    def put(self, start: int, outputs: list[Tensor]) -> None:
        """The rows from ``start`` on."""
        if not self.tensors:
            self.make(outputs)
        for result, rows in zip(self.tensors, outputs, strict=True):
            result[start : start + rows.shape[0]] = rows.detach()

    def make(self, outputs: list[Tensor]) -> None:
        """Room for rows like these."""
        self.tensors = [
            self.empty((self.number, *rows.shape[1:]), dtype=rows.dtype, device=self.device) for rows in outputs
        ]
