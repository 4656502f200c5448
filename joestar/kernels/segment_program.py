"""Programs of ``joestar::segment``: values per edge and their reductions per destination, softmax among them.

A program is an edge program (``edge_program.py``) whose columns are ``H`` heads of ``D`` each, ``W = H D``, and whose
values have one of three sizes: a number per edge, one per head, or one per column. Pointwise steps spread the smaller
operand; ``dot a b`` adds up the products over the columns of each head, ``total a`` the columns, and ``spread a`` gives
every column its head's value. What comes behind ``->`` are the results::

    src dst src | dot 0 1 | mul_scalar 3 0.25 -> softmax 4 2

is attention by scaled products: the sum of the third leaf's rows, weighted by the softmax of value 4 over the in-edges
of each destination, per head; with a score per column it is a softmax per column. ``sum 4`` and ``mean 4`` are the
other reductions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.kernels.edge_program import (
    BINARY,
    LEAVES,
    NUMBERS,
    OPERANDS,
    UNARY,
    WIDEST_NARROW,
    WITH_NUMBER,
    EdgeGradient,
    Step,
    living,
    operands,
    parts_of,
    renumbered,
)

ONE, HEAD, FULL = 0, 1, 2
"""Sizes of values: a number per edge, per head, per column."""

SIZES = {
    **dict.fromkeys(LEAVES, FULL), "src_row": FULL, "scalar": ONE,
    "src_head": HEAD, "dst_head": HEAD, "edge_head": HEAD, "vector_head": HEAD, "bits": HEAD,
}  # fmt: skip
"""Kinds of leaves: those of edge programs; ``src_row`` ``[N, D]``, rows that all heads read, without a gradient; and
such with a number per head: ``src_head`` ``[N, H]``, ``dst_head`` ``[num_dst, H]``, ``edge_head`` ``[E, H]``,
``vector_head`` ``[H]``, and ``bits``, int32 ``[E, ceil(H / 32)]``, whose value is 1 where a head's bit is set, else 0.
"""

ACROSS = ("dot", "total", "spread")
"""Steps between sizes."""

REDUCTIONS = {"softmax": 2, "sum": 1, "mean": 1}
"""Reductions, and how many values each reads."""


@dataclass(frozen=True)
class SegmentProgram:
    """``leaves``: kinds; ``steps``: ``(name, values..., number)``; ``results``: ``(reduction, values...)``.

    Raises:
        ValueError: a kind, a step or a reduction is unknown, or reads values that come later or have another size.
    """

    leaves: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[tuple, ...]

    def __post_init__(self):
        for kind in self.leaves:
            _require(kind in SIZES, f"leaves out of {', '.join(SIZES)}", repr(kind))
        for number, step in enumerate(self.steps, len(self.leaves)):
            _check_step(step, number)
        _require(bool(self.results), "a reduction behind ->", "none")
        values = len(self.leaves) + len(self.steps)
        for name, *read in self.results:
            right = REDUCTIONS.get(name) == len(read) and all(isinstance(v, int) and 0 <= v < values for v in read)
            _require(right, "'softmax score value', 'sum value' or 'mean value'", repr(_text((name, *read))))
        for step, size in zip(self.steps, self.sizes[len(self.leaves) :], strict=True):
            _require(size >= 0, f"columns that {step[0]} adds up", repr(_text(step)))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """``ONE``, ``HEAD`` or ``FULL`` per value; -1 of a step that has no columns to add up."""
        return sizes_of(self.leaves, self.steps)

    def size_of(self, result: tuple) -> int:
        """The size of a result: that of its values, one per head at least."""
        return max(HEAD, *(self.sizes[value] for value in result[1:]))

    def score_size(self, result: tuple) -> int:
        """Whether a softmax has a score per head or per column."""
        return max(HEAD, self.sizes[result[1]])

    @property
    def softmaxes(self) -> list[tuple]:
        """The results that are softmaxes."""
        return [result for result in self.results if result[0] == "softmax"]

    @property
    def has_heads(self) -> bool:
        """Whether anything depends on how columns are split into heads."""
        sizes = {*self.sizes, *map(self.size_of, self.results)}
        return HEAD in sizes or "src_row" in self.leaves or any(step[0] in ACROSS for step in self.steps)

    def __str__(self) -> str:
        lines = (" ".join(self.leaves), *map(_text, self.steps))
        return " | ".join(lines) + " -> " + ", ".join(map(_text, self.results))

    @staticmethod
    def parse(text: str) -> "SegmentProgram":
        """The program of a text; ``str`` gives the text of a program."""
        return _parse(text)


def _require(holds: bool, expected: str, came: str) -> None:
    if not holds:
        raise ValueError(f"segment program: expected {expected}; got {came}")


def _text(step: tuple) -> str:
    return " ".join(repr(part) if isinstance(part, float) else str(part) for part in step)


def _check_step(step: Step, number: int) -> None:
    name, *arguments = step
    known = (*BINARY, *UNARY, *WITH_NUMBER, *ACROSS)
    _require(name in known, f"steps out of {', '.join(known)}", repr(name))
    count = OPERANDS[name]
    right = len(arguments) == count + NUMBERS.get(name, 0)
    _require(right, f"{count} values and {NUMBERS.get(name, 0)} numbers of {name}", repr(_text(step)))
    earlier = all(isinstance(value, int) and 0 <= value < number for value in arguments[:count])
    _require(earlier, f"values before {number}, which the step defines", repr(_text(step)))


def sizes_of(leaves: Sequence[str], steps: Sequence[Step]) -> tuple[int, ...]:
    """The size of every value."""
    sizes = [SIZES[kind] for kind in leaves]
    for step in steps:
        largest = max(sizes[value] for value in operands(step))
        if step[0] in ("dot", "total"):
            largest = HEAD if largest == FULL else -1
        sizes.append(FULL if step[0] == "spread" else largest)
    return tuple(sizes)


@functools.lru_cache(1024)
def _parse(text: str) -> SegmentProgram:
    program, arrow, results = text.partition("->")
    _require(bool(arrow), "-> in front of the reductions", repr(text))
    leaves, *lines = (part.split() for part in program.split("|"))
    try:
        steps = tuple(_step(*line) for line in lines)
        found = tuple((name, *map(int, read)) for name, *read in map(str.split, results.split(",")))
    except (ValueError, TypeError):
        raise ValueError(f"segment program: expected names, values and numbers; got {text!r}") from None
    return SegmentProgram(tuple(leaves), steps, found)


def _step(name: str, *words: str) -> Step:
    count = OPERANDS.get(name, 0)
    return (name, *map(int, words[:count]), *map(float, words[count:]))


# --- tensors --------------------------------------------------------------------------------------------------------


def groups_of(kinds: Sequence[str], tensors: Sequence) -> list[tuple]:
    """The tensors of every leaf; ``ValueError`` unless there are as many as the leaves take."""
    counts = [LEAVES.get(kind, 1) for kind in kinds]
    _require(sum(counts) == len(tensors), f"{sum(counts)} tensors for {' '.join(kinds)!r}", str(len(tensors)))
    given = iter(tensors)
    return [tuple(next(given) for _ in range(count)) for count in counts]


def width_of(program: SegmentProgram, tensors: Sequence, heads: int):
    """W: the columns of the leaves; ``heads`` where none has any."""
    for kind, (*_, last) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        if kind == "src_row":
            return last.shape[1] * heads
        if SIZES[kind] == FULL:
            return last.shape[0] if kind in ("vector", "narrow") else last.shape[0 if kind == "narrow_plain" else 1]
    return heads


def dtype_of(program: SegmentProgram, tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of all leaves but bits."""
    for kind, (first, *_) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        if kind != "bits":
            return first.dtype
    raise ValueError(f"segment program: expected a leaf besides bits; got {str(program)!r}")


def check_segment(program: SegmentProgram, tensors: Sequence, heads: int, num_dst: int, num_edges: int) -> int:
    """W; ``ValueError`` unless shapes and dtypes are those that the kinds of leaves ask for."""
    dtype = dtype_of(program, tensors)
    num_src = None
    for kind, (first, *others) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        own = torch.int32 if kind == "bits" else dtype
        _require(own == torch.int32 or own.is_floating_point, "leaves of a floating-point dtype", str(own))
        for tensor in (first, *others):
            _require(tensor.dtype == own, f"{'bits' if kind == 'bits' else 'leaves'} of {own}", str(tensor.dtype))
        dims = {"vector": (1,), "vector_head": (1,), "scalar": (1, 2)}.get(kind, (2,))
        _require(first.dim() in dims, f"a tensor of {dims[-1]} dimensions for {kind!r}", str(list(first.shape)))
        if kind.startswith("src"):
            num_src = first.shape[0] if num_src is None else num_src
    width = width_of(program, tensors, heads)
    _require(heads >= 1 and width % heads == 0, f"columns in {heads} heads", str(width))
    shapes = {
        "src": (num_src, width), "dst": (num_dst, width), "edge": (num_edges, width), "vector": (width,),
        "src_head": (num_src, heads), "dst_head": (num_dst, heads), "edge_head": (num_edges, heads),
        "vector_head": (heads,), "bits": (num_edges, -(-heads // 32)), "src_row": (num_src, width // heads),
    }  # fmt: skip
    for kind, (first, *others) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        shape, came = tuple(first.shape), ", ".join(str(list(tensor.shape)) for tensor in (first, *others))
        if kind == "scalar":
            _require(shape in ((num_edges,), (num_edges, 1)), f"a scalar of each of {num_edges} edges", came)
        elif others:
            weights = [(width, shape[1]), (width,)][: len(others)]
            right = shape[0] == num_edges and [tuple(tensor.shape) for tensor in others] == weights
            _require(right, f"features [{num_edges}, K], a weight [{width}, K] and, if narrow, a bias [{width}]", came)
            _require(1 <= shape[1] <= WIDEST_NARROW, f"features of 1 to {WIDEST_NARROW} columns", came)
        else:
            _require(shape == shapes[kind], f"{kind} {list(shapes[kind])}", came)
    return width


def check_segment_wanted(program: SegmentProgram, tensors: Sequence, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Per leaf whether any of its tensors wants a gradient; ``ValueError`` where it has none."""
    _require(len(wanted) == len(tensors), f"wanted of {len(tensors)} tensors", str(len(wanted)))
    asked = groups_of(program.leaves, wanted)
    for kind, (first, *_) in zip(program.leaves, asked, strict=True):
        _require(not (first and "narrow" in kind), "no gradient of narrow features", "one; make them an edge leaf")
        _require(not (first and kind in ("bits", "src_row")), f"no gradient of {kind}", "one")
    return tuple(any(group) for group in asked)


# --- the gradient ---------------------------------------------------------------------------------------------------


def rows_kinds(program: SegmentProgram) -> tuple[str, ...]:
    """Kinds of what a gradient reads per destination besides the leaves, see ``grad_rows``."""
    kinds = []
    for result in program.results:
        kinds.append("dst" if program.size_of(result) == FULL else "dst_head")
        if result[0] == "softmax":
            kinds += 3 * ["dst" if program.score_size(result) == FULL else "dst_head"]
    return tuple(kinds)


def grad_rows(
    program: SegmentProgram, heads: int, width: int, indptr: Tensor, outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """What a gradient reads per destination, in the outputs' dtype that is wide.

    Per result its gradient, over the degree for a mean; for a softmax also the largest score, the inverse of the sum of
    exponentials, and the sum of gradient times result over what one score weighs.
    """
    saved = iter(outputs[len(program.results) :])
    degree = (indptr[1:] - indptr[:-1]).clamp(min=1).unsqueeze(1)
    found = []
    for result, y, grad in zip(program.results, outputs, grads, strict=False):
        wide = torch.promote_types(y.dtype, torch.float32)
        grad = grad.to(wide)
        if result[0] == "mean":
            grad = grad / degree
        found.append(grad)
        if result[0] == "softmax":
            top, total = next(saved), next(saved)
            product = grad * y.to(wide)
            if program.score_size(result) < program.size_of(result):
                product = product.view(-1, heads, width // heads).sum(-1)
            found += [top, 1 / torch.where(total > 0, total, 1), product]
    return [rows.contiguous() for rows in found]


@functools.lru_cache(1024)
def segment_gradient(program: SegmentProgram, wanted: tuple[bool, ...]) -> EdgeGradient:
    """How the gradients of the ``wanted`` leaves follow from the leaves and ``grad_rows``.

    Its leaves are those of the program, then ``rows_kinds``. The gradient of a scalar is one per head, to be added up.
    """
    rows, first = rows_kinds(program), len(program.leaves)
    kinds = (*program.leaves, *rows)
    steps = [renumbered(step, lambda value: value + len(rows) * (value >= first)) for step in program.steps]
    needed = {leaf for leaf in range(first) if wanted[leaf]}
    for number, step in enumerate(steps, len(kinds)):
        if needed.intersection(operands(step)):
            needed.add(number)
    backward = _Backward(kinds, steps, needed)
    row = first
    for name, *read in program.results:
        at = [value + len(rows) * (value >= first) for value in read]
        if name == "softmax":
            backward.softmax(*at, row)
        else:
            backward.add(at[0], row)
        row += 4 if name == "softmax" else 1
    for number in range(len(kinds) + len(program.steps) - 1, len(kinds) - 1, -1):
        if number in backward.found and number in needed:
            backward.through(number)
    found = backward.found
    results = tuple(found.get(leaf, -1) if wanted[leaf] else -1 for leaf in range(first))
    return living(kinds, backward.steps, results)


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
