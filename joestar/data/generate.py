"""``joestar generate``: planted graphs of any size, written piece by piece."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from joestar.data.degrees import Degrees
from joestar.data.draws import Counted
from joestar.data.folder_writer import FolderWriter, check_target, full
from joestar.data.planted import (
    Shape,
    centres_of,
    communities_classes,
    features_of,
    labels_of,
    shape_of,
    source_places,
)
from joestar.data.progress import Progress, silent
from joestar.data.sizes import bytes_of
from joestar.data.splits import PARTS
from joestar.errors import ConfigError, DataError
from joestar.graph_api import Graph
from joestar.whole_numbers import is_whole, plain

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PER_EDGE, PER_VALUE, PER_NODE = 160, 40, 120
"""Bytes of what is held at a time of an edge, a feature value and a node that are made."""
AT_MOST = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Edges and feature values of a piece; beyond that a processor's caches, or launches, gain nothing."""
LEAST = 16 << 20
"""Bytes below which pieces would become too small."""
MOST_SEED = 2**64 - 1
"""Numbers are drawn by 64 bits of a seed."""


class Planted:
    """A planted graph of which any piece can be made: the same bits whatever is made before, and on any device.

    Args:
        shuffled: whether ids are in random order; else communities are consecutive.
    """

    def __init__(self, shape: Shape, device: str | torch.device = "cpu", seed: int = 0, shuffled: bool = True):
        self.shape, self.draws = shape, Counted(seed, device)
        self.order = self.draws.permutation("ids", shape.nodes) if shuffled else None
        self.chosen = self.draws.permutation("splits", shape.nodes)
        self.centres = centres_of(shape, self.draws)

    def degrees(self, first: int, count: int) -> torch.Tensor:
        """In-degrees of the nodes from id ``first``, int64."""
        return self.draws.degrees(first, count, self.shape.degree, self.shape.spread)

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Where nodes are in the row of communities."""
        return ids.long() if self.order is None else self.order(ids)

    def sources(self, first: int, degrees: torch.Tensor, position: int) -> torch.Tensor:
        """Sources of the in-edges of the nodes from id ``first``, int64; the first edge has that position."""
        ids = torch.arange(first, first + degrees.numel(), device=self.draws.device)
        places = torch.repeat_interleave(self.places(ids), degrees)
        found = source_places(places, position, self.shape, self.draws)
        return found if self.order is None else self.order.inverse(found)

    def classes(self, first: int, count: int) -> torch.Tensor:
        """Classes of the communities of the nodes from id ``first``."""
        ids = torch.arange(first, first + count, device=self.draws.device)
        return communities_classes(self.places(ids), self.shape)

    def labels(self, first: int, count: int) -> torch.Tensor:
        """Labels of the nodes from id ``first``, int64."""
        return labels_of(self.classes(first, count), first, self.shape, self.draws)

    def features(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Features of the nodes from id ``first``, ``[count, features]``."""
        return features_of(self.classes(first, count), first, self.shape, self.centres, self.draws).to(dtype)

    def split(self, part: str) -> torch.Tensor:
        """Ids of a split, int64."""
        sizes = [getattr(self.shape, other) for other in PARTS]
        begin = sum(sizes[: PARTS.index(part)])
        end = min(begin + sizes[PARTS.index(part)], self.shape.nodes)
        return self.chosen(torch.arange(begin, end, device=self.draws.device))


def generate(
    shape: str | Shape,
    folder: str | os.PathLike,
    *,
    scale: float = 1.0,
    dtype: str = "fp32",
    seed: int = 0,
    shuffled: bool = True,
    memory: str | int = "4GiB",
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Writes a planted graph as a folder for ``joestar.load``, in bounded memory.

    The files depend on shape, scale, dtype, seed and ``shuffled`` only: not on memory, device or number of threads.

    Args:
        shape: a name (``joestar.data.planted.SHAPES``) or a ``Shape``. scale: of the numbers of nodes and splits.
        dtype: of the features, ``"fp32"``, ``"fp16"`` or ``"bf16"``. seed: 0 to 2^64 - 1.
        shuffled: random ids; else those of a community are consecutive.
        memory: how much may be used beside what Python and PyTorch take, ``"4GiB"`` or bytes; of the device likewise.
        overwrite: replace a converted folder in which nothing else lies. progress: see ``joestar.data.progress``.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown shape, dtype, seed or device. DataError: the folder exists, or cannot be written.
    """
    name, shape = shape_of(shape, scale)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    if not is_whole(plain(seed)) or not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"seed must be a whole number from 0 to {MOST_SEED:,}; got {seed!r}.")
    limit, device = _limit(memory), _device(device)
    target = check_target(Path(folder), overwrite)
    facts = {"shape": name, "seed": plain(seed), "ids": "shuffled" if shuffled else "planted", "dtype": dtype}
    writer = None
    try:
        writer = FolderWriter(target, overwrite=overwrite, tag="generate")
        graph = Planted(shape, device, seed, shuffled)
        most = AT_MOST["cuda" if device.type == "cuda" else "cpu"]
        degrees = _write_structure(graph, writer, min(most, limit // PER_EDGE), progress)
        _write_nodes(graph, writer, DTYPES[dtype], limit, most, progress)
        for part in PARTS:
            if getattr(shape, part):
                writer.write(f"{part}_idx", graph.split(part).cpu().numpy())
        progress("checksums", 0, 0)
        return writer.finish(
            name=f"planted {name}, ids {facts['ids']}", num_classes=shape.classes, multilabel=False, class_names=None,
            **degrees, directed=True, source={"generated": facts},
        )  # fmt: skip
    except OSError as error:
        raise full(target, error) from error
    finally:
        if writer is not None:
            writer.discard()


def in_memory(graph: Planted, dtype: torch.dtype = torch.float32) -> Graph:
    """The graph that ``generate`` writes, as tensors on its device."""
    shape = graph.shape
    degrees = graph.degrees(0, shape.nodes)
    indptr = torch.zeros(shape.nodes + 1, dtype=torch.int64, device=degrees.device)
    torch.cumsum(degrees, 0, out=indptr[1:])
    ndata = {"x": graph.features(0, shape.nodes, dtype), "y": graph.labels(0, shape.nodes)}
    made = Graph.from_csc(indptr, graph.sources(0, degrees, 0).to(torch.int32), ndata, validate=False)
    for part in PARTS:
        if getattr(shape, part):
            setattr(made, f"{part}_idx", graph.split(part))
    made.num_classes = shape.classes
    return made


def _write_structure(graph: Planted, writer: FolderWriter, edges: int, progress: Progress) -> dict[str, Any]:
    """Rows of the structure, so many at a time that they have about ``edges`` edges; degrees and self-loops."""
    shape, found, loops = graph.shape, Degrees(), 0
    indptr, indices = writer.open("indptr", "int64"), writer.open("indices", "int32")
    indptr.append(np.zeros(1, np.int64))
    step = max(1, int(edges / shape.degree))
    for first in range(0, shape.nodes, step):
        count = min(step, shape.nodes - first)
        degrees = graph.degrees(first, count)
        rows = torch.repeat_interleave(torch.arange(first, first + count, device=degrees.device), degrees)
        sources = graph.sources(first, degrees, indices.rows)
        loops += int((sources == rows).sum())
        indptr.append((torch.cumsum(degrees, 0) + indices.rows).cpu().numpy())
        found.add(degrees.cpu().numpy())
        indices.append(sources.to(torch.int32).cpu().numpy())
        progress("edges of nodes", first + count, shape.nodes)
    writer.keep("indptr", indptr)
    writer.keep("indices", indices)
    return {"in_degree": found.facts(), "self_loops": loops}


def _write_nodes(
    graph: Planted, writer: FolderWriter, dtype: torch.dtype, limit: int, most: int, progress: Progress
) -> None:
    shape = graph.shape
    x = writer.open("ndata.x", str(dtype).removeprefix("torch."), (shape.features,))
    y = writer.open("ndata.y", "int64")
    step = max(1, min(most // shape.features, limit // (PER_VALUE * shape.features + PER_NODE)))
    for first in range(0, shape.nodes, step):
        count = min(step, shape.nodes - first)
        made = graph.features(first, count, dtype).cpu()
        x.append((made.view(torch.int16) if dtype == torch.bfloat16 else made).numpy())
        y.append(graph.labels(first, count).cpu().numpy())
        progress("features of nodes", first + count, shape.nodes)
    writer.keep("ndata.x", x)
    writer.keep("ndata.y", y)


def _limit(memory: str | int) -> int:
    limit = bytes_of(memory)
    if limit < LEAST:
        raise DataError(f"memory={memory!r} is too little to work in: give at least {LEAST >> 20}MiB.")
    return limit


def _device(device: str | torch.device) -> torch.device:
    try:
        made = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device must be cpu or cuda; got {device!r}.") from None
    if made.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda; got {device!r}.")
    if made.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: PyTorch finds no GPU. Use cpu, which gives the same graph.")
    return made
