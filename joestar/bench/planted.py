"""Planted-partition graphs at the shape of public datasets, made on the device in seconds.

A node's in-degree is log-normal. A share of its in-edges comes from its own community, the rest from anywhere, with
popular nodes picked more often. Features are noise around the centre of the community's class. What matters for speed
are the numbers of distinct nodes that a sampled batch meets; ``docs/benchmarks.md`` compares them.

Ids are shuffled, so that neighbours' rows lie anywhere in memory. Without (``shuffled=False``) a community has
consecutive ids: caches then find rows that a graph whose ids say nothing would not give them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph

CHUNK = 1 << 26
"""Edges or feature values made at a time."""


@dataclass(frozen=True)
class Shape:
    """What a planted graph looks like.

    Attributes:
        nodes, degree: number of nodes, mean in-degree. spread: sigma of the log-normal in-degrees.
        community, inside: nodes per community, share of in-edges from it. skew: 1 is uniform; larger: hubs.
        features, classes: width of features, number of classes. train: number of training nodes.
    """

    nodes: int
    degree: float
    spread: float
    community: int
    inside: float
    skew: float
    features: int
    classes: int
    train: int


SHAPES = {
    "small": Shape(200_000, 50.0, 0.88, 128, 0.78, 1.5, 100, 47, 20_000),
    "tiny": Shape(2_000, 10.0, 0.88, 64, 0.78, 1.5, 16, 5, 500),
    "products": Shape(2_449_029, 50.5, 0.88, 128, 0.78, 1.5, 100, 47, 196_615),
    "papers": Shape(111_059_956, 29.1, 1.03, 8192, 0.8, 1.5, 128, 172, 1_207_179),
}


def planted(
    shape: str | Shape, device: str | torch.device = "cpu", dtype=torch.float32, seed: int = 0, shuffled: bool = True
) -> Graph:
    """The graph of a shape, or of the name of one, with ``ndata["x"]``, ``ndata["y"]`` and ``train_idx``.

    Args:
        dtype: of the features. shuffled: whether ids are in random order; else communities are consecutive.

    Raises:
        ConfigError: an unknown name.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"unknown shape {shape!r}: choose one of {', '.join(SHAPES)}.")
        name, shape = shape, SHAPES[shape]
    else:
        name = "planted"
    random = torch.Generator(device).manual_seed(seed)
    place, id_at = _shuffle(shape.nodes, seed, device) if shuffled else (None, None)
    indptr = _offsets(shape, random)
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
    for first in range(0, indices.numel(), CHUNK):
        part = indices[first : first + CHUNK]
        position = torch.arange(first, first + part.numel(), device=device)
        dst = torch.searchsorted(indptr, position, right=True) - 1
        del position
        part.copy_(_mapped(_sources(_mapped(dst, place), shape, random), id_at))
    labels = _mapped(torch.arange(shape.nodes, device=device), place) // shape.community % shape.classes
    graph = Graph.from_csc(indptr, indices, validate=False)
    graph.ndata["x"], graph.ndata["y"] = _features(labels, shape, random, dtype), labels
    graph.train_idx = torch.randperm(shape.nodes, generator=random, device=device)[: shape.train].to(torch.int32)
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


def _offsets(shape: Shape, random: torch.Generator) -> Tensor:
    noise = torch.randn(shape.nodes, generator=random, device=random.device, dtype=torch.float32)
    degrees = (shape.degree * torch.exp(shape.spread * noise - shape.spread**2 / 2) + 0.5).long().clamp(min=1)
    indptr = torch.zeros(shape.nodes + 1, dtype=torch.int64, device=random.device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    return indptr


def _sources(dst: Tensor, shape: Shape, random: torch.Generator) -> Tensor:
    def uniform() -> Tensor:
        return torch.rand(dst.numel(), generator=random, device=dst.device, dtype=torch.float32)

    near = dst // shape.community * shape.community + (uniform() * shape.community).long()
    fine = torch.rand(dst.numel(), generator=random, device=dst.device, dtype=torch.float64)  # float32 has 2^24 values
    rank = (fine.pow_(shape.skew) * shape.nodes).long()
    far = (rank * 1_000_003 + 7) % shape.nodes  # popular nodes are spread over all communities
    return torch.where(uniform() < shape.inside, near, far).clamp(max=shape.nodes - 1)


def _features(labels: Tensor, shape: Shape, random: torch.Generator, dtype: torch.dtype) -> Tensor:
    centres = torch.randn(shape.classes, shape.features, generator=random, device=labels.device, dtype=torch.float32)
    x = torch.empty(shape.nodes, shape.features, dtype=dtype, device=labels.device)
    rows = max(1, CHUNK // shape.features)
    for first in range(0, shape.nodes, rows):
        part = x[first : first + rows]
        noise = torch.randn(part.shape, generator=random, device=x.device, dtype=torch.float32)
        part.copy_(noise.mul_(2).add_(centres[labels[first : first + rows]]))
    return x
