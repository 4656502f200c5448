"""Size recorder: how large sampled sets get, found by sampling structure only (thesis 5.3.2, figure 5.9).

Nothing but the graph's structure is read: parameters, optimizer, buffers and random generators stay bit-identical.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.graph_api import Graph, SamplingContext, check_blocks
from joestar.locks import TRACING

ROUND = 16
"""Bounds are multiples of this."""


@dataclass
class SizeProfile:
    """Sizes of every set over some batches.

    Attributes:
        labels: what each size is the size of, in program order (``slice``, ``sample``, ``compact``).
        batches: one list of sizes per batch.
    """

    labels: list[str]
    batches: list[list[int]]


def measure(sampler, graph: Graph, seeds: Tensor, key: Tensor) -> tuple[list[int], list[str]]:
    """Samples one batch, structure only: (size of every set, its label).

    Not while another thread traces: ``torch.compiler.is_compiling()`` is true in all threads then.
    """
    context = SamplingContext(key)
    with TRACING:
        blocks = sampler.sample(graph.with_context(context), seeds)
    check_blocks(blocks, type(sampler).__name__, seeds)
    return context.recorded, context.labels


def record(sampler, graph: Graph, batches: Iterable[tuple[Tensor, Tensor]]) -> SizeProfile:
    """Profiles the given batches of (seeds, key)."""
    profile = SizeProfile([], [])
    for seeds, key in batches:
        sizes, labels = measure(sampler, graph, seeds, key)
        profile.labels = labels
        profile.batches.append(sizes)
    return profile


def choose_bounds(profile: SizeProfile, batch: int, num_nodes: int, slack: float) -> list[int]:
    """Bounds that a batch exceeds rarely: the largest of maximum and mean + 4 sigma, plus ``slack`` (a fraction)."""
    sizes = []
    for position in range(len(profile.labels)):
        column = [sizes[position] for sizes in profile.batches]
        spread = statistics.pstdev(column) if len(column) > 1 else 0.0
        sizes.append(max(max(column), statistics.fmean(column) + 4 * spread) * (1 + slack))
    return _nested(sizes, profile.labels, batch, num_nodes)


def widen(
    bounds: list[int], demand: list[int], labels: list[str], batch: int, num_nodes: int, slack: float, growth: float
) -> list[int]:
    """Bounds that also hold ``demand``, what an overflowing batch really needed, times ``growth`` and 1 + ``slack``."""
    wanted = [max(bound, need * (1 + slack) * growth) for bound, need in zip(bounds, demand, strict=True)]
    sizes = [
        want if need > bound or growth > 1 else bound for want, need, bound in zip(wanted, demand, bounds, strict=True)
    ]
    return _nested(sizes, labels, batch, num_nodes)


def _nested(sizes: list[float], labels: list[str], batch: int, num_nodes: int) -> list[int]:
    """Bounds of these sizes: a set of nodes is never larger than the graph and the batch together, and never smaller
    than the set before it, whose nodes come first in it (the batch's, for the first)."""
    bounds, smallest = [], batch
    for size, label in zip(sizes, labels, strict=True):
        if label == "compact":
            size = smallest = max(min(size, num_nodes + batch), smallest)
        bounds.append(rounded(size))
    return bounds


def rounded(size: float) -> int:
    """``size`` rounded up to a multiple of ``ROUND``, at least one multiple."""
    return max(ROUND, -(-int(size + 0.999999) // ROUND) * ROUND)


def step_key(seed: int, epoch: int, step: int, device) -> Tensor:
    """The random key of a step: int64 ``[3]``."""
    return torch.tensor([seed, epoch, step], dtype=torch.int64, device=device)
