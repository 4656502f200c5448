"""Segment programs for the C++ kernel: flat lists of leaves, steps and sinks, of whose sizes it need not think.

A gradient runs twice over the edges at most. The first pass goes by destination; what sources' rows are due is added up
by a second one, by source. Of what the first pass computes the second one is handed values with a number per edge or
per head, and computes those per column again; or it is handed the gradients of sources' rows per edge, where that is
less work and they are allowed to be stored.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.segment_gradient import SegmentGradient, segment_gradient
from joestar.kernels.segment_program import FULL, HEAD, SIZES, SegmentProgram, sizes_of
from joestar.kernels.segment_steps import OPERANDS, Step, operands

_NUMBER_OF = {name: number for number, name in enumerate(_native.segment_steps())}
_SMALLER = ("add", "sub", "mul", "div")
"""Steps whose second operand may be smaller than the first."""
_BY = {"src": 0, "dst": 1, "edge": 2, "vector": 3, "bits": 4, "narrow": 5, "degree": 6}
_SPECIAL = {"scalar": _BY["edge"], "src_row": _BY["src"], "narrow_plain": _BY["narrow"]}
_INTO = {"sum": 0, "mean": 1, "softmax": 2, "edges": 3, "edge_total": 4, "vector": 5, "narrow": 6}


def leaf_by(kind: str) -> int:
    """What a leaf reads of an edge."""
    return _SPECIAL[kind] if kind in _SPECIAL else _BY[kind.removesuffix("_head")]


@dataclass(frozen=True)
class Plan:
    """``leaves``: kinds; ``sinks``: ``(into, value, score)``; ``table``: the same and the steps, as tensors."""

    leaves: tuple[str, ...]
    sinks: tuple[tuple[str, int, int], ...]
    table: tuple[Tensor, Tensor, Tensor]


@dataclass
class _Lines:
    """Steps as they are written: where operands have several sizes, a step that spreads the smaller is put in front."""

    kinds: tuple[str, ...]
    steps: list[tuple[str, int, tuple[int, ...], float]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self.sizes = list(sizes_of(self.kinds, ()))
        self.place = {leaf: leaf for leaf in range(len(self.kinds))}

    def push(self, name: str, size: int, read: tuple[int, ...], number: float = 0.0) -> int:
        self.steps.append((name, size, read, number))
        self.sizes.append(size)
        return len(self.sizes) - 1

    def spread(self, value: int, size: int) -> int:
        """A value of at least this size."""
        return value if self.sizes[value] >= size else self.push("spread", size, (value,))

    def write(self, step: Step, number: int) -> None:
        """The step that defines value ``number`` of the program."""
        name, read = step[0], [self.place[value] for value in operands(step)]
        size = max(self.sizes[value] for value in read)
        if name == "spread":
            self.place[number] = self.spread(read[0], FULL)
        elif name == "total":
            self.place[number] = self.push(name, HEAD, tuple(read))
        elif name == "dot":
            if self.sizes[read[0]] == self.sizes[read[1]]:
                self.place[number] = self.push(name, HEAD, tuple(read))
            else:
                self.place[number] = self.push("total", HEAD, (self.pointwise("mul", size, read),))
        else:
            self.place[number] = self.pointwise(name, size, read, *step[1 + OPERANDS[name] :])

    def pointwise(self, name: str, size: int, read: list[int], number: float = 0.0) -> int:
        if name in ("add", "mul") and self.sizes[read[0]] < size:
            read = read[::-1]
        kept = 1 if name in _SMALLER else len(read)
        read = [self.spread(value, size) if i < kept else value for i, value in enumerate(read)]
        return self.push(name, size, tuple(read), number)

    def sink(self, into: str, value: int, size: int, score: int = -1, score_size: int = 0) -> tuple[str, int, int]:
        """``value`` and ``score`` are numbers of the program."""
        score = score if score < 0 or into == "narrow" else self.spread(self.place[score], score_size)
        return into, self.spread(self.place[value], size), score

    def plan(self, sinks: Sequence[tuple[str, int, int]]) -> Plan:
        leaves = [(leaf_by(kind), sizes_of((kind,), ())[0], kind == "src_row") for kind in self.kinds]
        steps = [(_NUMBER_OF[name], size, *read, *(3 - len(read)) * (0,)) for name, size, read, _ in self.steps]
        numbers = [number for *_, number in self.steps]
        ends = [(_INTO[into], value, score) for into, value, score in sinks]
        return Plan(self.kinds, tuple(sinks), (_int64(leaves, 3), _int64(steps, 5), _float64(numbers), _int64(ends, 3)))


def _int64(rows: Sequence, size: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, size)


def _float64(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


@functools.lru_cache(1024)
def forward_plan(program: SegmentProgram) -> Plan:
    """The plan of a program; a sink per result."""
    lines, sinks = _Lines(program.leaves), []
    for number, step in enumerate(program.steps, len(program.leaves)):
        lines.write(step, number)
    for result in program.results:
        name, *read = result
        scores = (read[0], program.score_size(result)) if name == "softmax" else ()
        sinks.append(lines.sink(name, read[-1], program.size_of(result), *scores))
    return lines.plan(sinks)


@dataclass(frozen=True)
class GradientPlan:
    """How gradients are made: ``own`` by destination, ``by_source`` after it; either may be missing.

    ``leaves`` of ``own``: those of the program, then ``rows_kinds``. Its sinks are the gradients of the leaves in
    ``own_leaves``, then values of the sizes ``stored``, which are leaves of ``by_source`` behind the others.
    ``sources``: the leaves that ``by_source`` has a sink for.
    """

    own: Plan | None
    own_leaves: tuple[int, ...]
    stored: tuple[int, ...]
    by_source: Plan | None
    sources: tuple[int, ...]


_STORED = 5
"""What it costs to store values per column and to read them by source, in steps."""
_FAR = 2
"""What it costs to read a row of a leaf by source."""


@functools.lru_cache(1024)
def gradient_plan(program: SegmentProgram, wanted: tuple[bool, ...], stores: bool = False) -> GradientPlan:
    """The plan of the gradients of the ``wanted`` leaves; ``stores``: whether values as wide as rows may be stored."""
    line = segment_gradient(program, wanted)
    first, sizes = len(line.leaves), sizes_of(line.leaves, line.steps)
    found = [leaf for leaf, result in enumerate(line.results) if result >= 0]
    sources = tuple(leaf for leaf in found if leaf_by(program.leaves[leaf]) == _BY["src"])
    own_leaves = tuple(leaf for leaf in found if leaf not in sources)
    again, stored = _cut(line.steps, first, sizes, [line.results[leaf] for leaf in sources])
    columns = sorted({line.results[leaf] for leaf in sources if sizes[line.results[leaf]] == FULL})
    if stores and _cost(line, again) > _STORED * len(columns):
        again, stored = [], sorted({line.results[leaf] for leaf in sources if line.results[leaf] >= first})

    own = _Lines(line.leaves)
    needed = _before(line.steps, first, [*stored, *(line.results[leaf] for leaf in own_leaves)])
    for number in needed:
        own.write(line.steps[number - first], number)
    sinks = [_gradient_sink(own, program.leaves[leaf], leaf, line.results[leaf]) for leaf in own_leaves]
    sinks += [own.sink("edges", value, 0) for value in stored]

    kinds = (*line.leaves, *(("scalar", "edge_head", "edge")[sizes[value]] for value in stored))
    second = _Lines(kinds)
    second.place.update({value: first + i for i, value in enumerate(stored)})
    for number in again:
        second.write(line.steps[number - first], number)
    ends = [second.sink("sum", line.results[leaf], max(HEAD, SIZES[program.leaves[leaf]])) for leaf in sources]
    return GradientPlan(
        own.plan(sinks) if sinks else None, own_leaves, tuple(sizes[value] for value in stored),
        second.plan(ends) if ends else None, sources,
    )  # fmt: skip


def _gradient_sink(lines: _Lines, kind: str, leaf: int, value: int) -> tuple[str, int, int]:
    """What becomes of the gradient of a leaf's value; of a number per edge it is one per head, to be added up."""
    size = max(HEAD, SIZES[kind])
    if "narrow" in kind:
        return lines.sink("narrow", value, size, leaf)
    return lines.sink({"scalar": "edge_total", "dst": "sum", "edge": "edges"}.get(kind.removesuffix("_head"), "vector"),
                      value, size)  # fmt: skip


def _cut(steps: Sequence[Step], first: int, sizes: Sequence[int], results: list[int]) -> tuple[list[int], list[int]]:
    """(steps per column that lead to ``results``, values per edge or head that these read and that steps compute)."""

    def is_stored(value: int) -> bool:
        return value >= first and sizes[value] < FULL

    again = _before(steps, first, [value for value in results if not is_stored(value)], is_stored)
    read = {value for number in again for value in operands(steps[number - first])} | set(results)
    return again, sorted(filter(is_stored, read))


def _cost(line: SegmentGradient, again: list[int]) -> int:
    """Of computing values per column by source, in steps."""
    first = len(line.leaves)
    read = {value for number in again for value in operands(line.steps[number - first]) if value < first}
    far = [leaf for leaf in read if SIZES.get(line.leaves[leaf]) == FULL and line.leaves[leaf] not in ("src", "vector")]
    return len(again) + _FAR * len(far)


def _before(
    steps: Sequence[Step], first: int, values: Sequence[int], stop: Callable[[int], bool] = lambda value: False
) -> list[int]:
    """Numbers of the steps that ``values`` depend on, in order, without those that ``stop`` and what only they need."""
    needed = set(values)
    for number in range(first + len(steps) - 1, first - 1, -1):
        if number in needed:
            needed.update(value for value in operands(steps[number - first]) if not stop(value))
    return sorted(number for number in needed if number >= first)
