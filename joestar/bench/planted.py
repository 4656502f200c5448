"""Planted graphs in memory, made on the device in seconds; ``joestar.data.planted`` says what they look like.

What matters for speed are the numbers of distinct nodes that a sampled batch meets; ``docs/benchmarks.md`` compares
them.

Ids are shuffled, so that neighbours' rows lie anywhere in memory. Without (``shuffled=False``) a community has
consecutive ids: caches then find rows that a graph whose ids say nothing would not give them.
"""

import dataclasses
import itertools

import torch
from torch import Tensor

from joestar.data.draws import Sequence
from joestar.data.planted import (
    SHAPES,
    Draws,
    Shape,
    centres_of,
    communities_classes,
    features_of,
    labels_of,
    shape_of,
    source_places,
)
from joestar.graph_api import Graph

__all__ = ["SHAPES", "Shape", "planted"]

CHUNK = 1 << 26
"""Edges or feature values made at a time."""


def planted(
    shape: str | Shape, device: str | torch.device = "cpu", dtype=torch.float32, seed: int = 0, shuffled: bool = True,
    scale: float = 1.0, features: int | None = None,
) -> Graph:  # fmt: skip
    """The graph of a shape, or of the name of one, with ``ndata["x"]``, ``ndata["y"]`` and ``train_idx``.

    Its numbers come in order from ``torch.Generator``s, as those of the benchmarks always did: it is another graph than
    ``joestar generate`` writes, of the same distribution.

    Args:
        dtype: of the features. shuffled: whether ids are in random order; else communities are consecutive.
        scale: as many nodes times. features: columns of ``ndata["x"]``; ``None`` for the shape's.

    Raises:
        ConfigError: an unknown name, or a scale that leaves too few nodes.
    """
    name, shape = shape_of(shape, scale)
    shape = shape if features is None else dataclasses.replace(shape, features=features)
    draws = Sequence(seed, device)
    place, id_at = _shuffle(shape.nodes, seed, device) if shuffled else (None, None)
    indptr = torch.zeros(shape.nodes + 1, dtype=torch.int64, device=device)
    torch.cumsum(draws.degrees(0, shape.nodes, shape.degree, shape.spread), 0, out=indptr[1:])
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
    for first in range(0, indices.numel(), CHUNK):
        part = indices[first : first + CHUNK]
        position = torch.arange(first, first + part.numel(), device=device)
        dst = torch.searchsorted(indptr, position, right=True) - 1
        del position
        part.copy_(_mapped(source_places(_mapped(dst, place), first, shape, draws), id_at))
    classes = communities_classes(_mapped(torch.arange(shape.nodes, device=device), place), shape)
    graph = Graph.from_csc(indptr, indices, validate=False)
    graph.ndata["x"] = _features(classes, shape, draws, dtype)
    order = torch.randperm(shape.nodes, generator=draws.random, device=device).to(torch.int32)
    ends = (0, shape.train, shape.train + shape.val, shape.train + shape.val + shape.test)
    graph.train_idx, graph.val_idx, graph.test_idx = (
        order[begin:end].clone() if end > begin else None for begin, end in itertools.pairwise(ends)
    )
    graph.ndata["y"] = labels_of(classes, 0, shape, Sequence(seed + 2, device))
    graph.name, graph.num_classes = f"planted {name}, ids {'shuffled' if shuffled else 'planted'}", shape.classes
    return graph


def _shuffle(nodes: int, seed: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """A random order of ids, int32 ``[nodes]`` each: (the node's place in the communities, the id at a place).

    From a generator of its own: everything else is drawn as without.
    """
    random = torch.Generator(device).manual_seed(seed + 1)
    place = torch.randperm(nodes, generator=random, device=device, dtype=torch.int32)
    id_at = torch.empty_like(place)
    for first in range(0, nodes, CHUNK):
        part = place[first : first + CHUNK]
        id_at[part] = torch.arange(first, first + part.numel(), dtype=torch.int32, device=device)
    return place, id_at


def _mapped(ids: Tensor, table: Tensor | None) -> Tensor:
    return ids if table is None else table[ids].long()


def _features(classes: Tensor, shape: Shape, draws: Draws, dtype: torch.dtype) -> Tensor:
    centres = centres_of(shape, draws)
    x = torch.empty(shape.nodes, shape.features, dtype=dtype, device=classes.device)
    rows = max(1, CHUNK // shape.features)
    for first in range(0, shape.nodes, rows):
        part = x[first : first + rows]
        part.copy_(features_of(classes[first : first + rows], first, shape, centres, draws))
    return x
