"""Logits without training: the callable form and ``predict``."""

import torch
from torch import Tensor

from joestar.profile.sizes import step_key
from joestar.runtime.executor import Executor
from joestar.runtime.seeds import filled, spread_nodes


def logits(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int, step: int) -> Tensor:
    """One row per seed ``[n, C]``, padded if it fits; the flag is read once, after sampling; else the exact result."""
    program, key = executor.program, step_key(seed, epoch, step, executor.device)
    if executor.execution == "padded":
        batch = max(batch, seeds.numel())
        if program.run is None or batch > program.batch or executor.resumed is not None:
            executor.prepare(population(executor, seeds, batch, seed, epoch), batch, seed, epoch)
            program = executor.program
        if seeds.numel() <= program.batch:
            rows, counts, fits = executor.forward(filled(seeds, program.batch), seeds.numel(), key)
            if fits:
                executor.note(counts)
                return rows[: seeds.numel()]
            executor.counters.fallbacks += 1
            result = executor.exact(seeds, key)[0]
            executor.after_overflow()
            return result
    return executor.exact(seeds, key)[0]


def population(executor: Executor, seeds: Tensor, batch: int, seed: int, epoch: int) -> Tensor:
    """What to choose bounds from while later batches are unknown: these seeds, then nodes from all over the graph."""
    return torch.cat([seeds, spread_nodes(4 * batch, executor.program.graph, seed, epoch)])


def predict(executor: Executor, seeds: Tensor, batch: int, seed: int) -> Tensor:
    """Logits of every seed in order, ``[len(seeds), C]``, without gradients; samples under epoch -1."""
    result, batch = None, min(batch, executor.program.graph.num_nodes)
    if executor.execution == "padded":
        executor.prepare(seeds, batch, seed, -1)  # bounds from batches of all of them
    for step, start in enumerate(range(0, seeds.numel(), batch)):
        part = seeds[start : start + batch]
        rows = logits(executor, part, batch, seed, -1, step).detach()
        if result is None:
            result = rows.new_empty((seeds.numel(), *rows.shape[1:]))
        result[start : start + part.numel()] = rows
    return result
