"""Calls of single ops over a set of edges, and over the same one padded, with hostile numbers in all padded slots."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .samples import values
from .structures import from_rows, random_rows

FILLERS = (0.0, 1e30, -1e30, 89.0)
"""What padded slots hold; ``exp`` of 89 is infinite in float32, and so is the square of 1e30."""

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Sums over more rows may be cut elsewhere."""

ROWS, NODES = random_rows(0, 9, 13, 5), 13
TRUE = {"dst": len(ROWS), "src": NODES, "edge": sum(map(len, ROWS)), "few": 2}
PADDED = {"dst": 4, "src": 5, "edge": 6, "few": 3}
"""Slots of each set: destinations, which are the first sources; sources; edges; some of one of these."""


class World:
    """A graph of ``NODES`` nodes, and edges between some; ``padded``: with slots behind the valid ones of every set.

    Attributes:
        indptr, indices: the edges, by local ids; ends: their rows, the number of rows behind the last; picked: their
            sources as nodes of the graph. graph: (offsets, sources). dsts, srcs: nodes. room: bound of what ops make.
    """

    def __init__(self, padded: bool):
        self.padded = padded
        self.num_dst, self.num_src, self.edges, self.few = (TRUE[name] + PADDED[name] * padded for name in TRUE)
        self.count, self.src_count = torch.tensor(TRUE["dst"]), torch.tensor(TRUE["src"])
        true = from_rows("edges", ROWS, NODES)
        self.indptr = self.behind("dst", true.indptr, TRUE["edge"])
        self.indices = self.behind("edge", true.indices, torch.tensor([0, 17, 12, 13, 3, 9]))
        self.ends = self.behind("edge", torch.arange(TRUE["dst"]).repeat_interleave(true.indptr.diff()), self.num_dst)
        names = torch.arange(NODES).flip(0)
        self.picked = self.behind("edge", names[true.indices], torch.tensor([0, 12, 4, 4, 3, 9]))
        self.dsts, self.srcs = self.behind("dst", names[: TRUE["dst"]], 12), self.behind("src", names, 12)
        graph = from_rows("graph", random_rows(1, NODES, NODES, 6), NODES)
        self.graph = graph.indptr, graph.indices
        self.room = 90 if padded else -1

    def behind(self, name: str, x: Tensor, filler: float | Tensor) -> Tensor:
        """``x`` of a set's true slots, and what its padded ones hold."""
        more = x.new_empty((PADDED[name] * self.padded, *x.shape[1:]))
        return torch.cat([x, more.copy_(filler) if more.numel() else more])


EXACT, WIDER = World(False), World(True)


@dataclass(frozen=True)
class Operand:
    """Values of a set's slots, or of a shape that all share; ``words`` if they are bits."""

    name: str | None
    shape: tuple[int, ...]
    grad: bool = True
    words: bool = False

    def leaf(self, world: World, position: int, dtype: torch.dtype, filler: int) -> Tensor:
        """Its values; padded slots hold one of ``FILLERS``, or after the last of these all of them in turn."""
        shape = self.shape if self.name is None else (TRUE[self.name], *self.shape)
        if self.words:
            random = torch.Generator().manual_seed(position)
            x = torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)
            return world.behind(self.name, x, -1)
        x = values(shape, dtype, position)
        if self.name is not None:
            count = PADDED[self.name] * x[0].numel()
            every = torch.tensor(FILLERS, dtype=dtype)[(torch.arange(count) + position) % len(FILLERS)]
            filled = every if filler == len(FILLERS) else torch.full((count,), FILLERS[filler], dtype=dtype)
            x = world.behind(self.name, x, filled.view(-1, *self.shape))
        return x.requires_grad_(self.grad)


def dst(*shape: int, **options) -> Operand:
    """Rows of destinations."""
    return Operand("dst", shape, **options)


def src(*shape: int, **options) -> Operand:
    """Rows of sources."""
    return Operand("src", shape, **options)


def edge(*shape: int, **options) -> Operand:
    """Rows of edges."""
    return Operand("edge", shape, **options)


def bits(name: str, words: int = 1) -> Operand:
    """What dropout keeps."""
    return Operand(name, (words,), False, True)


def shared(*shape: int, **options) -> Operand:
    """A parameter, or features of the whole graph."""
    return Operand(None, shape, **options)


class Call:
    """``run(world, *operands)`` calls an op. ``kept``: results that are kept for the gradient, and hold anything."""

    def __init__(self, run: Callable, *operands: Operand, kept: tuple[int, ...] = ()):
        self.run, self.operands, self.kept = run, operands, kept

    def results(self, world: World, dtype: torch.dtype, filler: int, like: list | None = None) -> tuple[list, list]:
        """(results, gradients of operands) of a loss that leaves out what is behind results ``like`` these."""
        given = [each.leaf(world, position, dtype, filler) for position, each in enumerate(self.operands)]
        made = self.run(world, *given)
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        smooth, grads = [], []
        for seed, (y, valid) in enumerate(zip(made, like or made, strict=True)):
            if y.requires_grad:
                grad = torch.zeros_like(y)
                part(grad, valid).copy_(values(tuple(valid.shape), dtype, 20 + seed))
                smooth.append(y)
                grads.append(grad)
        asked = [x for x in given if x.requires_grad]
        return made, list(torch.autograd.grad(smooth, asked, grads)) if asked else []


def part(x: Tensor, like: Tensor) -> Tensor:
    """The valid part of a padded tensor: valid slots come first, along every dimension."""
    return x[tuple(map(slice, like.shape))]


def beyond(x: Tensor, like: Tensor) -> Tensor:
    """What is padding of it, flat."""
    inside = torch.zeros(x.shape, dtype=torch.bool)
    part(inside, like).fill_(True)
    return x.detach()[~inside]


def differences(call: Call, dtype: torch.dtype, zero: bool = False) -> list[str]:
    """What padding changes of results and gradients, as sentences; ``zero``: padded slots of results must be 0."""
    found = []
    good, expected = call.results(EXACT, dtype, 0)
    for filler in range(len(FILLERS) + 1):
        ours, grads = call.results(WIDER, dtype, filler, good)
        for what, pairs in (("result", zip(ours, good, strict=True)), ("gradient", zip(grads, expected, strict=True))):
            for position, (x, y) in enumerate(pairs):
                where = f"{dtype}, filler {filler}, {what} {position}"
                if what == "result" and position in call.kept:
                    continue
                rest = beyond(x, y)
                if not torch.allclose(part(x, y).double(), y.double(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype]):
                    found.append(f"{where}: off by {(part(x, y) - y).abs().max()}")
                if not rest.isfinite().all():
                    found.append(f"{where}: its padding is not finite")
                if (zero or what == "gradient") and rest.any():
                    found.append(f"{where}: its padding is not 0")
    return found
