"""The gradient of a segment program, as a program: steps that are derived from its own."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.kernels.segment_program import FULL, SegmentProgram, groups_of, require, sizes_of
from joestar.kernels.segment_steps import Step, operands, parts_of, renumbered


@dataclass(frozen=True)
class SegmentGradient:
    """Steps that lead from a program's leaves and what ``grad_rows`` gives to the gradients of leaves.

    ``leaves``: those of the program, then ``rows_kinds``. ``steps`` are numbered behind these. ``results``: per leaf of
    the program the number of its gradient, -1 where it is not wanted or 0 everywhere.
    """

    leaves: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @property
    def read(self) -> frozenset[int]:
        """Numbers of the values that a step reads or that are results."""
        return frozenset(self.results) | {value for step in self.steps for value in operands(step)}


def check_segment_wanted(program: SegmentProgram, tensors: Sequence, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Per leaf whether any of its tensors wants a gradient; ``ValueError`` where it has none."""
    require(len(wanted) == len(tensors), f"wanted of {len(tensors)} tensors", str(len(wanted)))
    asked = groups_of(program.leaves, wanted)
    for kind, (first, *_) in zip(program.leaves, asked, strict=True):
        require(not (first and "narrow" in kind), "no gradient of narrow features", "one; make them an edge leaf")
        require(not (first and kind in ("bits", "src_row")), f"no gradient of {kind}", "one")
    return tuple(any(group) for group in asked)


def rows_kinds(program: SegmentProgram) -> list[list[str]]:
    """Per result, kinds of what a gradient reads besides the leaves, see ``grad_rows``."""
    kinds = []
    for result in program.results:
        end = "edge" if result[0] == "edges" else "dst"
        own = [end if program.size_of(result) == FULL else f"{end}_head"]
        if result[0] == "softmax":
            own += 3 * ["dst" if program.score_size(result) == FULL else "dst_head"]
        kinds.append([*own, "degree"] if result[0] == "mean" else own)
    return kinds


def grad_rows(
    program: SegmentProgram, heads: int, width: int, indptr: Tensor, outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """What a gradient reads besides the leaves: elementwise work of a softmax, which backends fuse.

    Per result its gradient; for a mean also the offsets of the edges; for a softmax, of float32 at least, the largest
    score, the inverse of the sum of exponentials, and the sum of gradient times result over what one score weighs.
    """
    saved = iter(outputs[len(program.results) :])
    found = []
    for result, y, grad in zip(program.results, outputs, grads, strict=False):
        found += [grad, indptr] if result[0] == "mean" else [grad]
        if result[0] == "softmax":
            wide = torch.promote_types(y.dtype, torch.float32)
            top, total = next(saved), next(saved)
            product = grad.to(wide) * y.to(wide)
            if program.score_size(result) < program.size_of(result):
                product = product.view(-1, heads, width // heads).sum(-1)
            found += [top, 1 / torch.where(total > 0, total, 1), product]
    return [rows.contiguous() for rows in found]


def degrees(indptr: Tensor) -> Tensor:
    """What means are divided by, ``[num_dst, 1]``."""
    return (indptr[1:] - indptr[:-1]).clamp(min=1).unsqueeze(1)


def check_rows(
    program: SegmentProgram, rows: Sequence[Tensor], num_dst: int, num_edges: int, width: int, heads: int
) -> None:
    """``ValueError`` unless ``rows`` are of the shapes that ``grad_rows`` gives."""
    known = {
        "dst": [num_dst, width], "dst_head": [num_dst, heads], "edge": [num_edges, width],
        "edge_head": [num_edges, heads], "degree": [num_dst + 1],
    }  # fmt: skip
    shapes = [known[kind] for kinds in rows_kinds(program) for kind in kinds]
    came = [list(row.shape) for row in rows]
    require(came == shapes, f"rows {shapes} for a gradient", str(came))


@functools.lru_cache(1024)
def segment_gradient(program: SegmentProgram, wanted: tuple[bool, ...]) -> SegmentGradient:
    """How the gradients of the ``wanted`` leaves follow from the leaves and ``grad_rows``.

    The gradient of a scalar is one per head, to be added up.
    """
    of_results, first = rows_kinds(program), len(program.leaves)
    rows = sum(map(len, of_results))
    kinds = (*program.leaves, *itertools.chain(*of_results))
    steps = [renumbered(step, lambda value: value + rows * (value >= first)) for step in program.steps]
    needed = {leaf for leaf in range(first) if wanted[leaf]}
    for number, step in enumerate(steps, len(kinds)):
        if needed.intersection(operands(step)):
            needed.add(number)
    backward = _Backward(kinds, steps, needed)
    row = first
    for (name, *read), own in zip(program.results, of_results, strict=True):
        at = [value + rows * (value >= first) for value in read]
        if name == "softmax":
            backward.softmax(*at, row)
        elif at[0] in needed:
            backward.add(at[0], backward.push("div", row, row + 1) if name == "mean" else row)
        row += len(own)
    for number in range(len(kinds) + len(program.steps) - 1, len(kinds) - 1, -1):
        if number in backward.found and number in needed:
            backward.through(number)
    found = backward.found
    results = tuple(found.get(leaf, -1) if wanted[leaf] else -1 for leaf in range(first))
    return _living(kinds, backward.steps, results)


class _Backward:
    """Steps that are being written from the results to the leaves; ``found``: value -> its gradient so far."""

    def __init__(self, kinds: tuple[str, ...], steps: list[Step], needed: set[int]):
        self.kinds, self.steps, self.needed = kinds, list(steps), needed
        self.found: dict[int, int] = {}

    def push(self, *step) -> int:
        self.steps.append(step)
        return len(self.kinds) + len(self.steps) - 1

    def sizes(self) -> tuple[int, ...]:
        return sizes_of(self.kinds, self.steps)

    def add(self, value: int, part: int) -> None:
        """Adds a part to the gradient of a value, of the value's size: of a number per edge, one per head."""
        if value not in self.needed:
            return
        sizes = self.sizes()
        if sizes[part] == FULL and sizes[value] < FULL:
            part = self.push("total", part)
        elif sizes[part] < FULL and sizes[value] == FULL:
            part = self.push("spread", part)
        self.found[value] = self.push("add", self.found[value], part) if value in self.found else part

    def softmax(self, score: int, value: int, row: int) -> None:
        """``row`` to ``row + 3`` are what ``grad_rows`` gives for the result."""
        grad, top, inverse, delta = range(row, row + 4)
        alpha = self.push("mul", self.push("exp", self.push("sub", score, top)), inverse)
        self.add(value, self.push("mul", grad, alpha))
        if score in self.needed:
            sizes = self.sizes()
            across = sizes[top] < max(sizes[grad], sizes[value])
            passed = self.push("dot" if across else "mul", grad, value)
            self.add(score, self.push("mul", self.push("sub", passed, delta), alpha))

    def through(self, number: int) -> None:
        """Hands the gradient of a step to what it reads."""
        step, grad = self.steps[number - len(self.kinds)], self.found[number]
        for value, part in self._parts(step, number, grad):
            self.add(value, part())

    def _parts(self, step: Step, number: int, grad: int) -> list[tuple[int, Callable[[], int]]]:
        name, *read = step
        if name == "dot":
            a, b = read
            return [(a, lambda: self.push("mul", grad, b)), (b, lambda: self.push("mul", grad, a))]
        if name in ("total", "spread"):
            return [(read[0], lambda: grad)]
        parts = parts_of(step, number, grad, self.push, self.needed.__contains__)
        return [(value, lambda part=part: part) for value, part in parts]


def _living(leaves: tuple[str, ...], steps: list[Step], results: tuple[int, ...]) -> SegmentGradient:
    """Without the steps that no result depends on."""
    alive = set(results)
    for number in range(len(leaves) + len(steps) - 1, len(leaves) - 1, -1):
        if number in alive:
            alive.update(operands(steps[number - len(leaves)]))
    kept = [number for number in range(len(leaves), len(leaves) + len(steps)) if number in alive]
    place = {-1: -1, **{leaf: leaf for leaf in range(len(leaves))}}
    place.update({number: len(leaves) + i for i, number in enumerate(kept)})
    left = tuple(renumbered(steps[number - len(leaves)], place.__getitem__) for number in kept)
    return SegmentGradient(leaves, left, tuple(place[result] for result in results))
