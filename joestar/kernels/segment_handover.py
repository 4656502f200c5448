"""What the pass over destinations leaves for the one over sources, in the gradient of a segment program.

A GPU goes over the edges twice (``gpu_segment_grad``). The second pass would compute again, for every edge, what the
first had in its registers, and read rows of destinations for that alone. Three kinds of values are stored instead:

- numbers per head of an edge, such as coefficients of attention and the gradients of its scores: neither the scores nor
  their dot products are made again;
- where the argument of a ReLU or leaky ReLU lets gradients through, a bit per edge and column: what the argument was
  made of is not read;
- rows of destinations that are a function of others, for which a factor behind such a gradient goes in front of it:
  ``relu'(a) (grad) * g = relu'(a) (grad * g)``. One row is read along an edge in place of two.

Numbers per head that scale the same row become one: ``(grad * alpha) * kept = grad * (alpha * kept)``.

What is handed over is what makes the second pass read least, by an estimate; often nothing.
"""

import functools
import itertools
from dataclasses import dataclass

from joestar.kernels.segment_gradient import SegmentGradient
from joestar.kernels.segment_program import FULL, HEAD, sizes_of
from joestar.kernels.segment_steps import Step, operands

GATES = ("relu_grad", "leaky_relu_grad")
"""Steps that only ask of their argument where it lets a gradient through."""
_OF_DST = ("dst", "dst_head", "degree", "vector", "vector_head")
_HELD = ("src", "src_row", "src_head", "vector", "vector_head")
"""Leaves that the second pass reads once for all edges of a source."""
_KINDS = ("edge_head", "gates", "dst")
"""Kinds of leaves that hand over numbers of heads, gates and rows."""
_SECTOR = 32
"""Bytes that a GPU reads at least, wherever it reads."""
_EXCHANGE = 96
"""What adding up the columns of a head costs, in bytes that could be read in that time: a guess."""


@dataclass(frozen=True)
class Handover:
    """How a gradient is cut in two.

    ``first``: its steps, then those that make ``rows``. ``second``: those that lead from the leaves, and behind them
    what is handed over, to the gradients of sources: ``edge_head`` leaves of ``heads``, ``gates``, and ``dst`` leaves
    of ``rows``. All three name values of ``first``; a gate also the step that reads it.
    """

    first: SegmentGradient
    second: SegmentGradient
    heads: tuple[int, ...] = ()
    gates: tuple[tuple[int, str], ...] = ()
    rows: tuple[int, ...] = ()


@functools.lru_cache(1024)
def handover(line: SegmentGradient, heads: int, width: int, size: int, wide: int) -> Handover:
    """The cut under which the second pass reads least.

    Args:
        line: a gradient; heads, width: of its columns; size, wide: bytes of a number of the leaves, and of one that is
            handed over.
    """
    best = cut(line, (False, False, False))
    least = 0.9 * _bytes(best, heads, width, size, wide)
    for asked in itertools.product((False, True), repeat=3):
        found = cut(line, asked)
        cost = _bytes(found, heads, width, size, wide)
        if cost < least:
            best, least = found, cost
    return best


def cut(line: SegmentGradient, asked: tuple[bool, bool, bool]) -> Handover:
    """The gradient in two; ``asked``: whether numbers of heads, gates and rows are handed over, where there are any.

    Nothing is where only gradients of sources are wanted: there is no first pass then.
    """
    wanted = [(kind.startswith("src"), number) for kind, number in zip(line.leaves, line.results, strict=False)]
    passes = any(number >= 0 and not of_src for of_src, number in wanted)
    return _Cut(line, asked if passes else (False, False, False)).made(
        tuple(number if of_src else -1 for of_src, number in wanted)
    )


def _bytes(found: Handover, heads: int, width: int, size: int, wide: int) -> float:
    """What the second pass costs per edge, in bytes; with what the first writes for it."""
    lines, own = found.second, len(found.first.leaves)
    handed = len(found.heads) * max(_SECTOR, heads * wide) + len(found.gates) * max(_SECTOR, width // 8)
    handed += len(found.rows) * width * wide
    written = len(found.heads) * heads * wide + len(found.gates) * width // 8 + len(found.rows) * width * wide // 4
    read = 0
    for leaf, kind in enumerate(lines.leaves[:own]):
        if leaf in lines.read and kind not in _HELD:
            full = width * size if kind in ("dst", "edge") else heads * size if kind.endswith("_head") else 0
            read += max(_SECTOR, full)
    return read + handed + written + _EXCHANGE * sum(step[0] in ("dot", "total") for step in lines.steps)


class _Cut:
    """A gradient that is being cut; ``asked``: whether numbers of heads, gates and rows are handed over."""

    def __init__(self, line: SegmentGradient, asked: tuple[bool, bool, bool]):
        self.line, self.base, self.steps = line, len(line.leaves), list(line.steps)
        self.asked = asked
        self.handed: tuple[list, list, list] = ([], [], [])
        self.second: list[Step] = []
        self.places: dict = {}

    def made(self, sources: tuple[int, ...]) -> Handover:
        """The cut whose second pass gives ``sources``, per leaf the number of its gradient or -1."""
        sources = tuple(self.moved(value) if value >= 0 else -1 for value in sources)
        sizes = self.sizes()
        found = tuple(self.cut(value, sizes) if value >= 0 else -1 for value in sources)
        kinds = [kind for kind, own in zip(_KINDS, self.handed, strict=True) for _ in own]
        offsets = {"leaf": self.base, "step": self.base + len(kinds)}
        before = dict(
            zip(("edge_head", "gates", "dst"), itertools.accumulate([0, *map(len, self.handed)]), strict=False)
        )

        def number(place) -> int:
            if isinstance(place, int):
                return place
            kind, at = place
            return offsets["step"] + at if kind == "step" else offsets["leaf"] + before[kind] + at

        steps = tuple((name, *map(number, read), *numbers) for name, read, numbers in self.second)
        second = SegmentGradient((*self.line.leaves, *kinds), steps, tuple(map(number, found)))
        first = SegmentGradient(self.line.leaves, tuple(self.steps), self.line.results)
        return Handover(first, second, *map(tuple, self.handed))

    def sizes(self) -> tuple[int, ...]:
        return sizes_of(self.line.leaves, self.steps)

    def step(self, value: int) -> Step | None:
        return self.steps[value - self.base] if value >= self.base else None

    def of_dst(self, value: int) -> bool:
        """Whether a value is the same for all edges of a destination."""
        step = self.step(value)
        return self.line.leaves[value] in _OF_DST if step is None else all(map(self.of_dst, operands(step)))

    def moved(self, value: int) -> int:
        """The same value with factors of destinations in front of gates, and with numbers of heads as one."""
        if (value, "moved") not in self.places:
            self.places[value, "moved"] = self._moved(value)
        return self.places[value, "moved"]

    def _moved(self, value: int) -> int:
        step = self.step(value)
        if step is None or self.of_dst(value):
            return value
        read = tuple(map(self.moved, operands(step)))
        for product, factor in (read, read[::-1]) if step[0] == "mul" else ():
            inner = self.step(product) or ("none",)
            if self.asked[2] and inner[0] in GATES and self.of_dst(inner[1]) and self.of_dst(factor):
                return self._pushed(inner[0], self._pushed("mul", inner[1], factor), *inner[2:])
            if self.asked[0] and inner[0] == "mul" and self.sizes()[factor] == HEAD:
                for row, own in (inner[1:], inner[:0:-1]):
                    if self.sizes()[row] == FULL and self.sizes()[own] == HEAD:
                        return self._pushed("mul", row, self._pushed("mul", own, factor))
        return value if read == operands(step) else self._pushed(step[0], *read, *step[1 + len(read) :])

    def _pushed(self, *step) -> int:
        if step not in self.steps:
            self.steps.append(step)
        return self.base + self.steps.index(step)

    def cut(self, value: int, sizes: tuple[int, ...]):
        """Where the second pass has a value: the number of a leaf, or (kind, place) of what is handed or a step."""
        if value not in self.places:
            self.places[value] = self._cut(value, sizes)
        return self.places[value]

    def _cut(self, value: int, sizes: tuple[int, ...]):
        step = self.step(value)
        if step is None:
            return value
        if self.of_dst(value):
            if self.asked[2] and sizes[value] == FULL:
                return self._handed(2, value)
        elif self.asked[0] and sizes[value] == HEAD:
            return self._handed(0, value)
        read = operands(step)
        gate = self.asked[1] and step[0] in GATES and sizes[read[1]] == FULL and self.step(read[1]) is not None
        places = (
            [self.cut(read[0], sizes), self._handed(1, (read[1], step[0]))]
            if gate
            else [self.cut(one, sizes) for one in read]
        )
        self.second.append((step[0], tuple(places), step[1 + len(read) :]))
        return "step", len(self.second) - 1

    def _handed(self, which: int, value) -> tuple[str, int]:
        own = self.handed[which]
        if value not in own:
            own.append(value)
        return _KINDS[which], own.index(value)
