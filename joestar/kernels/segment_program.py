"""Programs of ``joestar::segment``: values per edge and their reductions per destination, softmax among them.

A program computes values out of leaves, step by step (``segment_steps.py``), each for one edge and column; its text is
an argument of the op. Values are numbered: first the leaves, then the steps. Columns are ``H`` heads of ``D`` each,
``W = H D``, and values have one of three sizes: a number per edge, one per head, or one per column. Pointwise steps
spread the smaller operand; ``dot a b`` adds up the products over the columns of each head, ``total a`` the columns, and
``spread a`` gives every column its head's value. What comes behind ``->`` are the results::

    src dst src | dot 0 1 | mul_scalar 3 0.25 -> softmax 4 2

is attention by scaled products: the sum of the third leaf's rows, weighted by the softmax of value 4 over the in-edges
of each destination, per head; with a score per column it is a softmax per column. ``sum 4`` and ``mean 4`` are the
other reductions; ``edges 4`` is no reduction: the value of every edge is stored.

Leaves may be columns of one matrix, side by side: ``src dst dst+`` reads rows of destinations ``[num_dst, 2 W]``, the
first W columns as one leaf and the next W as another. Their gradient is one matrix as well.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joestar.kernels.segment_steps import ACROSS, BINARY, NUMBERS, OPERANDS, UNARY, WITH_NUMBER, Step, operands

LEAVES = {"src": 1, "dst": 1, "edge": 1, "scalar": 1, "vector": 1, "narrow": 3, "narrow_plain": 2}
"""Kinds of leaves, and how many tensors each takes.

``src`` ``[N, W]`` and ``dst`` ``[num_dst, W]``: rows of an edge's ends; ``edge`` ``[E, W]``; ``scalar`` ``[E]`` or
``[E, 1]``; ``vector`` ``[W]``; ``narrow``: features ``f`` ``[E, K]`` with a weight ``[W, K]`` and a bias ``[W]``, whose
value is ``f @ weight.T + bias``; ``narrow_plain``: without a bias.
"""

WIDEST_NARROW = 16
"""Most columns of the features of a narrow leaf."""

ONE, HEAD, FULL = 0, 1, 2
"""Sizes of values: a number per edge, per head, per column."""

SIZES = {
    **dict.fromkeys(LEAVES, FULL), "src_row": FULL, "scalar": ONE,
    "src_head": HEAD, "dst_head": HEAD, "edge_head": HEAD, "vector_head": HEAD, "bits": HEAD,
}  # fmt: skip
"""Sizes of these and of more kinds, of a tensor each: ``src_row`` ``[N, D]``, rows that all heads read, without a
gradient; and such with a number per head: ``src_head`` ``[N, H]``, ``dst_head`` ``[num_dst, H]``, ``edge_head``
``[E, H]``, ``vector_head`` ``[H]``, and ``bits``, int32 ``[E, words]``, ``words = ceil(H / 32)``, whose value is 1
where a head's bit is set, else 0: that of head ``h`` is bit ``h // words`` of word ``h % words``.
"""

BESIDE = ("src", "dst")
"""Kinds of leaves that may share a matrix with the one before: columns behind its own."""

REDUCTIONS = {"softmax": 2, "sum": 1, "mean": 1, "edges": 1}
"""Reductions, and how many values each reads."""

_OF_GRADIENTS = {**SIZES, "degree": ONE, "gates": FULL}
"""With what only gradients read: ``degree``, the edges' offsets, whose value is how many edges a destination has;
``gates``, uint8 ``[E, H ceil(D / 8)]``, whose value is 1 where a column's bit is set, else 0."""


@dataclass(frozen=True)
class SegmentProgram:
    """``leaves``: kinds; ``steps``: ``(name, values..., number)``; ``results``: ``(reduction, values...)``.

    ``beside``: the leaves, by number, that are the next columns of the matrix of the leaf before, ``+`` in the text.

    Raises:
        ValueError: a kind, a step or a reduction is unknown, or reads values that come later or have another size; or a
            leaf is beside one of another kind.
    """

    leaves: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[tuple, ...]
    beside: tuple[int, ...] = ()

    def __post_init__(self):
        for kind in self.leaves:
            require(kind in SIZES, f"leaves out of {', '.join(SIZES)}", repr(kind))
        for leaf in self.beside:
            kind = self.leaves[leaf]
            right = kind in BESIDE and leaf > 0 and self.leaves[leaf - 1] == kind
            require(right, f"{' or '.join(BESIDE)} in front of the same with +", f"{kind}+ as leaf {leaf}")
        for number, step in enumerate(self.steps, len(self.leaves)):
            _check_step(step, number)
        require(bool(self.results), "a reduction behind ->", "none")
        values = len(self.leaves) + len(self.steps)
        for name, *read in self.results:
            right = REDUCTIONS.get(name) == len(read) and all(isinstance(v, int) and 0 <= v < values for v in read)
            require(
                right, "'softmax score value', 'sum value', 'mean value' or 'edges value'", repr(_text((name, *read)))
            )
        for step, size in zip(self.steps, self.sizes[len(self.leaves) :], strict=True):
            require(size >= 0, f"columns that {step[0]} adds up", repr(_text(step)))

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
        sizes = {*self.sizes, *map(self.size_of, self.results), *map(self.score_size, self.softmaxes)}
        return HEAD in sizes or "src_row" in self.leaves or any(step[0] in ACROSS for step in self.steps)

    def __str__(self) -> str:
        kinds = (kind + "+" * (leaf in self.beside) for leaf, kind in enumerate(self.leaves))
        lines = (" ".join(kinds), *map(_text, self.steps))
        return " | ".join(lines) + " -> " + ", ".join(map(_text, self.results))

    @property
    def apart(self) -> "SegmentProgram":
        """The same with a matrix for every leaf."""
        return replace(self, beside=())

    @staticmethod
    def parse(text: str) -> "SegmentProgram":
        """The program of a text; ``str`` gives the text of a program."""
        return _parse(text)


def require(holds: bool, expected: str, came: str) -> None:
    if not holds:
        raise ValueError(f"segment program: expected {expected}; got {came}")


def _text(step: tuple) -> str:
    return " ".join(repr(part) if isinstance(part, float) else str(part) for part in step)


def _check_step(step: Step, number: int) -> None:
    name, *arguments = step
    known = (*BINARY, *UNARY, *WITH_NUMBER, *ACROSS)
    require(name in known, f"steps out of {', '.join(known)}", repr(name))
    count = OPERANDS[name]
    right = len(arguments) == count + NUMBERS.get(name, 0)
    require(right, f"{count} values and {NUMBERS.get(name, 0)} numbers of {name}", repr(_text(step)))
    earlier = all(isinstance(value, int) and 0 <= value < number for value in arguments[:count])
    require(earlier, f"values before {number}, which the step defines", repr(_text(step)))


def sizes_of(leaves: Sequence[str], steps: Sequence[Step]) -> tuple[int, ...]:
    """The size of every value."""
    sizes = [_OF_GRADIENTS[kind] for kind in leaves]
    for step in steps:
        largest = max(sizes[value] for value in operands(step))
        if step[0] in ("dot", "total"):
            largest = HEAD if largest == FULL else -1
        sizes.append(FULL if step[0] == "spread" else largest)
    return tuple(sizes)


@functools.lru_cache(1024)
def _parse(text: str) -> SegmentProgram:
    program, arrow, results = text.partition("->")
    require(bool(arrow), "-> in front of the reductions", repr(text))
    leaves, *lines = (part.split() for part in program.split("|"))
    try:
        steps = tuple(_step(*line) for line in lines)
        found = tuple((name, *map(int, read)) for name, *read in map(str.split, results.split(",")))
    except (ValueError, TypeError):
        raise ValueError(f"segment program: expected names, values and numbers; got {text!r}") from None
    beside = tuple(leaf for leaf, kind in enumerate(leaves) if kind.endswith("+"))
    return SegmentProgram(tuple(kind.removesuffix("+") for kind in leaves), steps, found, beside)


def _step(name: str, *words: str) -> Step:
    count = OPERANDS.get(name, 0)
    return (name, *map(int, words[:count]), *map(float, words[count:]))


# --- tensors --------------------------------------------------------------------------------------------------------


def groups_of(kinds: Sequence[str], tensors: Sequence) -> list[tuple]:
    """The tensors of every leaf; ``ValueError`` unless there are as many as the leaves take."""
    counts = [LEAVES.get(kind, 1) for kind in kinds]
    require(sum(counts) == len(tensors), f"{sum(counts)} tensors for {' '.join(kinds)!r}", str(len(tensors)))
    given = iter(tensors)
    return [tuple(next(given) for _ in range(count)) for count in counts]


def repeated(program: SegmentProgram, entries: Sequence) -> list:
    """What is given per tensor, per tensor of a program whose leaves are ``apart``."""
    given = _leaves_read(program)
    require(len(given) == len(entries), f"{len(given)} tensors for {str(program)!r}", str(len(entries)))
    return [entry for entry, count in zip(entries, given, strict=True) for _ in range(count)]


def tensors_apart(program: SegmentProgram, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of the leaves when these are ``apart``: views of the columns of a matrix that several share.

    An empty ``[0]``, of a gradient that is not wanted, stays so.
    """
    found, given = [], _leaves_read(program)
    require(len(given) == len(tensors), f"{len(given)} tensors for {str(program)!r}", str(len(tensors)))
    for tensor, count in zip(tensors, given, strict=True):
        if count == 1 or tuple(tensor.shape) == (0,):
            found += [tensor] * count
            continue
        right = tensor.dim() == 2 and tensor.shape[1] % count == 0
        require(right, f"rows of {count} times as many columns as a leaf has", str(list(tensor.shape)))
        found += tensor.split(tensor.shape[1] // count, 1) if tensor.shape[1] else [tensor] * count
    return found


def tensors_together(program: SegmentProgram, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The way back from ``tensors_apart``: matrices that several leaves share are put together; empty ones stay so."""
    given, found = iter(tensors), []
    for count in _leaves_read(program):
        parts = [next(given) for _ in range(count)]
        found.append(torch.cat(parts, 1) if count > 1 and parts[0].dim() == 2 else parts[0])
    return found


def _leaves_read(program: SegmentProgram) -> list[int]:
    """Per tensor, how many leaves read it."""
    counts: list[int] = []
    for leaf, kind in enumerate(program.leaves):
        if leaf in program.beside:
            counts[-1] += 1
        else:
            counts += [1] * LEAVES.get(kind, 1)
    return counts


def width_of(program: SegmentProgram, tensors: Sequence, heads: int):
    """W: the columns of the leaves; ``heads`` where none has any."""
    for kind, (*_, last) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        if kind == "src_row":
            return last.shape[1] * heads
        if SIZES[kind] == FULL:
            return last.shape[0] if kind in ("vector", "narrow") else last.shape[0 if kind == "narrow_plain" else 1]
    return heads


WIDEST_ACTIVATED = 256
"""Most columns of rows that ``segment_bias_relu`` activates: one tile holds them, whose words of bits are whole."""


def activates(program: SegmentProgram, width: int) -> bool:
    """Whether ``segment_bias_relu`` activates the rows of a program: one sum or mean without heads.

    Not a softmax, whose gradient reads the rows as they were before.
    """
    alone = len(program.results) == 1 and program.results[0][0] in ("sum", "mean")
    return alone and not program.has_heads and width <= WIDEST_ACTIVATED


def check_activated(program: SegmentProgram, width: int) -> None:
    """Raises ``ValueError`` unless ``activates``."""
    expected = f"one sum or mean of at most {WIDEST_ACTIVATED} columns, without heads, to be activated"
    require(activates(program, width), expected, f"{str(program)!r} of {width}")


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
        require(own == torch.int32 or own.is_floating_point, "leaves of a floating-point dtype", str(own))
        for tensor in (first, *others):
            require(tensor.dtype == own, f"{'bits' if kind == 'bits' else 'leaves'} of {own}", str(tensor.dtype))
        dims = {"vector": (1,), "vector_head": (1,), "scalar": (1, 2)}.get(kind, (2,))
        require(first.dim() in dims, f"a tensor of {dims[-1]} dimensions for {kind!r}", str(list(first.shape)))
        if kind.startswith("src"):
            num_src = first.shape[0] if num_src is None else num_src
    width = width_of(program, tensors, heads)
    require(heads >= 1 and width % heads == 0, f"columns in {heads} heads", str(width))
    shapes = {
        "src": (num_src, width), "dst": (num_dst, width), "edge": (num_edges, width), "vector": (width,),
        "src_head": (num_src, heads), "dst_head": (num_dst, heads), "edge_head": (num_edges, heads),
        "vector_head": (heads,), "bits": (num_edges, -(-heads // 32)), "src_row": (num_src, width // heads),
    }  # fmt: skip
    for kind, (first, *others) in zip(program.leaves, groups_of(program.leaves, tensors), strict=True):
        shape, came = tuple(first.shape), ", ".join(str(list(tensor.shape)) for tensor in (first, *others))
        if kind == "scalar":
            require(shape in ((num_edges,), (num_edges, 1)), f"a scalar of each of {num_edges} edges", came)
        elif others:
            weights = [(width, shape[1]), (width,)][: len(others)]
            right = shape[0] == num_edges and [tuple(tensor.shape) for tensor in others] == weights
            require(right, f"features [{num_edges}, K], a weight [{width}, K] and, if narrow, a bias [{width}]", came)
            require(1 <= shape[1] <= WIDEST_NARROW, f"features of 1 to {WIDEST_NARROW} columns", came)
        else:
            require(shape == shapes[kind], f"{kind} {list(shapes[kind])}", came)
    return width
