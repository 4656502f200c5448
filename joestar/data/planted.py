"""Planted-partition graphs at the shape of public datasets: what they look like, and how their parts are drawn.

A node's in-degree is log-normal. A share of its in-edges comes from its own community, the rest from anywhere, with
popular nodes picked more often. A community has a class. A node's features are a weak hint at it under noise, so that
features alone tell the label of 40 % of the nodes, and averages over neighbours tell the class. A share of the labels
is drawn at random, so that no model is right on more than 85 to 90 %.

``generate`` writes them to disk piece by piece, ``joestar.bench.planted`` makes them in memory: of the same parts.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from joestar.data.draws import Counted, Sequence
from joestar.errors import ConfigError

MIXED, HINT = 0.15, 0.45
"""``Shape.mixed`` and ``Shape.hint``, where most neighbours are of the same community."""
Draws = Counted | Sequence


@dataclass(frozen=True)
class Shape:
    """What a planted graph looks like.

    Attributes:
        nodes, degree: number of nodes, mean in-degree. spread: sigma of the log-normal in-degrees.
        community, inside: nodes per community, share of in-edges from it. skew: 1 is uniform; larger: hubs.
        near_skew: the same within a community.
        features, classes: width of features, number of classes. train, val, test: number of nodes of the splits.
        mixed: share of the nodes whose label is drawn at random.
        hint: share of the nodes whose community's class is the one that their features are nearest to.
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
    val: int = 0
    test: int = 0
    near_skew: float = 1.0
    head: float = 0.0
    mixed: float = MIXED
    hint: float = HINT


SHAPES = {
    "tiny": Shape(2_000, 15.0, 0.88, 64, 0.78, 1.5, 16, 5, 500, 500, 1_000),
    "mini": Shape(50_000, 20.0, 0.88, 128, 0.78, 1.5, 64, 16, 10_000, 5_000, 10_000),
    "small": Shape(200_000, 50.0, 0.88, 128, 0.78, 1.5, 100, 47, 20_000, 4_000, 20_000),
    "products": Shape(2_449_029, 50.5, 0.88, 128, 0.78, 1.5, 100, 47, 196_615, 39_323, 2_213_091),
    "papers": Shape(111_059_956, 29.1, 1.03, 8192, 0.8, 1.5, 128, 172, 1_207_179, 125_265, 214_338),
    "papers100M": Shape(
        111_059_956, 29.1, 0.89, 8192, 0.375, 13.0, 128, 172, 1_207_179, 125_265, 214_338, 4.0, 0.4, 0.10, 0.48
    ),
    "mag240m-c": Shape(121_751_666, 21.3, 1.03, 8192, 0.8, 1.5, 768, 153, 1_112_392, 138_949, 146_818),
}
"""The last four have the sizes of ogbn-products, ogbn-papers100M (1,615,685,872 citations, both ways) and of the
citations among MAG240M's papers (1,297,748,926, both ways). "papers" has papers100M's numbers of nodes one and two hops
around a batch, for steps whose last hop is never made distinct; "papers100M" was fitted, in a copy of a
fiftieth of the size, to how many distinct nodes and edges macro-batches of 1/48 to 1/12 of an epoch need (within 12 %),
to the share of them that the nodes of the highest out-degree are (one point), which decides what crosses a bus, and to
the nodes one and two hops around a seed (4 %). Few neighbours are of the same community there, so labels are mixed less
and features hint more."""
ALIASES = {"mag240m": "mag240m-c"}


def shape_of(shape: str | Shape, scale: float = 1.0) -> tuple[str, Shape]:
    """(name, shape) of a name, ``scale`` times as many nodes.

    Raises:
        ConfigError: an unknown name, or a scale that leaves no community or no training node.
    """
    if isinstance(shape, str):
        if shape not in SHAPES and shape not in ALIASES:
            raise ConfigError(f"unknown shape {shape!r}: choose one of {', '.join((*SHAPES, *ALIASES))}.")
        name, shape = shape, SHAPES[ALIASES.get(shape, shape)]
    else:
        name = "planted"
    if scale == 1:
        return name, shape
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale must be a finite number above 0; got {scale}.")
    sizes = {key: round(getattr(shape, key) * scale) for key in ("nodes", "train", "val", "test")}
    if sizes["nodes"] < shape.community or not sizes["train"]:
        raise ConfigError(
            f"scale {scale} leaves {sizes['nodes']} nodes and {sizes['train']} training nodes of the shape {name!r}: a "
            f"community has {shape.community} nodes."
        )
    if sizes["nodes"] >= 1 << 31:
        raise ConfigError(
            f"scale {scale} gives {float(sizes['nodes']):,.4g} nodes; ids are int32, at most {(1 << 31) - 1:,}."
        )
    return f"{name} x {scale:g}", dataclasses.replace(shape, **sizes)


def source_places(places: Tensor, first: int, shape: Shape, draws: Draws) -> Tensor:
    """Places of the sources of the edges from position ``first``, int64, given those of their destinations."""
    count = places.numel()
    community = places // shape.community * shape.community
    local = draws.uniform("near", first, count)
    near = (
        community + ((local if shape.near_skew == 1 else draws.power(local, shape.near_skew)) * shape.community).long()
    )
    fine = draws.uniform("far", first, count, torch.float64)  # float32 has 2^24 values
    if shape.head:
        lowest = shape.head**shape.skew
        fine = draws.power(fine.mul_(1 - shape.head).add_(shape.head), shape.skew).sub_(lowest).div_(1 - lowest)
    else:
        fine = draws.power(fine, shape.skew)
    rank = (fine * shape.nodes).long()
    far = (rank * 1_000_003 + 7) % shape.nodes  # popular nodes are spread over all communities
    inside = draws.uniform("inside", first, count) < shape.inside
    return torch.where(inside, near, far).clamp_(max=shape.nodes - 1)


def communities_classes(places: Tensor, shape: Shape) -> Tensor:
    """The class of the community at every place."""
    return places // shape.community % shape.classes


def classes_there(shape: Shape) -> int:
    """How many classes have a community: fewer than ``shape.classes`` in copies of large shapes at a small scale."""
    return min(shape.classes, -(-shape.nodes // shape.community))


def labels_of(classes: Tensor, first: int, shape: Shape, draws: Draws) -> Tensor:
    """Labels of the nodes from id ``first``, int64: the class of the community, but for a share."""
    mixed = draws.uniform("mixed", first, classes.numel()) < shape.mixed
    other = (draws.uniform("other", first, classes.numel()) * shape.classes).long().clamp_(max=shape.classes - 1)
    return torch.where(mixed, other, classes)


def centres_of(shape: Shape, draws: Draws) -> Tensor:
    """What features hint at, float32 ``[classes, features]``; made on the CPU, as sums differ between processors.

    As far from each other as the classes that are there need: that many others are what a node may be mistaken for.
    """
    drawn = draws.normal("centre", 0, shape.classes * shape.features).view(shape.classes, shape.features)
    host = drawn.cpu().numpy().astype(np.float64)
    host *= signal(classes_there(shape), shape.hint) / np.linalg.norm(host, axis=1, keepdims=True)
    return torch.from_numpy(host.astype(np.float32)).to(draws.device)


def features_of(classes: Tensor, first: int, shape: Shape, centres: Tensor, draws: Draws) -> Tensor:
    """Features of the nodes from id ``first``, float32 ``[n, features]``."""
    noise = draws.normal("noise", first * shape.features, classes.numel() * shape.features)
    return noise.view(-1, shape.features).add_(centres[classes])


@functools.cache
def signal(classes: int, hint: float = HINT) -> float:
    """Length of the centres at which a share ``hint`` of the nodes is nearest to its own; noise has deviation 1."""
    from scipy.special import ndtr  # slow to import

    z = np.linspace(-8, 8, 4001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        right = float((density * ndtr(z + middle) ** (classes - 1)).sum())
        low, high = (low, middle) if right > max(hint, 1 / classes) else (middle, high)
    return round(high, 4)
