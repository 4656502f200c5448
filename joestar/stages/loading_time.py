"""What a macro-batch takes on its way into an arena, however few rows it brings: measured before a plan is made."""

import statistics
import time

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.kernels import has_native
from joestar.locks import synchronize
from joestar.stages.arena import Arena
from joestar.stages.large_batch import LargeBatch, drawn
from joestar.stages.macro import nodes_of

SEEDS = 16
"""Of the macro-batches that are loaded: few, so that their size does not matter."""
FIRST, REPEATS = 3, 7
"""Loads before the clock runs (kernels are compiled, memory is allocated), and loads that are timed."""


def seconds_per_load(graph: Graph, sampler, seeds: Tensor, device: torch.device, own_book: bool, reuse: bool) -> float:
    """Seconds between two macro-batches that bring next to nothing: of launches, of waiting for the book of slots, and
    of looking through all nodes for those that are needed, where the device keeps the book.

    Of small ones of the graph itself, without its features; a few milliseconds in all.

    Args:
        graph: on the CPU. seeds: some of its ids. own_book, reuse: as of the ``Arena``.
    """
    if not has_native():
        return 0.0
    stage, few = LargeBatch(SEEDS), seeds[:SEEDS]
    macros = [drawn(stage, own_book, graph, sampler, few, (0, 0, index)) for index in range(3)]
    arena = _small(graph, device, macros, own_book, reuse)
    times = [_one_load(arena, macros[index % 3]) for index in range(FIRST + REPEATS)]
    return statistics.median(times[FIRST:])


def _small(graph: Graph, device: torch.device, macros: list, own_book: bool, reuse: bool) -> Arena:
    """An arena with room for two of these: some rows have always gone."""
    counts = sorted(nodes_of(macro, graph.num_nodes, device).numel() for macro in macros)
    edges, none = max(macro.num_edges for macro in macros), graph.indices[:0]
    return Arena(graph, device, none, sum(counts[-2:]), max(1, edges), {}, reuse, own_book)


def _one_load(arena: Arena, macro) -> float:
    """Seconds until a macro-batch is there."""
    made = arena.prepare(macro)
    _settle(arena.device)
    start = time.perf_counter()
    loaded = arena.load(made)
    _settle(arena.device)
    seconds = time.perf_counter() - start
    arena.show(loaded)
    return seconds


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)
