"""Programs of edge-map: what a message is computed from, and how, as a line of text (thesis 5.3.2, edge-map fusion).

A program computes a value ``[E, W]`` out of leaves, one column and one edge at a time; heads are flattened. Its text is
an argument of ``joestar::edge_map``: ``"src narrow | add 0 1 | relu 2"`` is the rows of sources plus a product of the
edges' features, then ReLU. Values are numbered: first the leaves, then the steps; the last one is the result.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

LEAVES = {"src": 1, "dst": 1, "edge": 1, "scalar": 1, "vector": 1, "narrow": 3, "narrow_plain": 2}
"""Kinds of leaves, and how many tensors each takes.

``src`` ``[N, W]`` and ``dst`` ``[num_dst, W]``: rows of an edge's ends; ``edge`` ``[E, W]``; ``scalar`` ``[E]`` or
``[E, 1]``; ``vector`` ``[W]``; ``narrow``: features ``f`` ``[E, K]`` with a weight ``[W, K]`` and a bias ``[W]``, whose
value is ``f @ weight.T + bias``; ``narrow_plain``: without a bias.
"""

WIDEST_NARROW = 16
"""Most columns of the features of a narrow leaf."""

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
UNARY = ("neg", "relu", "sigmoid", "tanh", "exp", "abs", "silu")
WITH_NUMBER = ("leaky_relu", "elu", "add_scalar", "mul_scalar")
"""Steps of one value and one number: a slope, an alpha, or what is added or multiplied."""

OPERANDS = {
    **dict.fromkeys(BINARY, 2), **dict.fromkeys((*UNARY, *WITH_NUMBER), 1),
    "relu_grad": 2, "leaky_relu_grad": 2, "elu_grad": 2, "sigmoid_grad": 2, "tanh_grad": 2, "abs_grad": 2,
    "silu_grad": 2, "larger_grad": 3, "dot": 2, "total": 1, "spread": 1,
}  # fmt: skip
"""Values that a step reads. Those that end in ``_grad``, of gradients only, read the gradient of a step's result first;
then its argument, or its result for ``sigmoid`` and ``tanh``. ``larger_grad``: where the second is larger than the
third, half where they are equal. ``dot``, ``total`` and ``spread`` are steps of segment programs."""

NUMBERS = dict.fromkeys((*WITH_NUMBER, "leaky_relu_grad", "elu_grad"), 1)
"""Numbers that follow the values of a step."""

MEANING = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "neg": torch.neg,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "elu": torch.nn.functional.elu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "abs": torch.abs,
    "silu": torch.nn.functional.silu,
    "add_scalar": torch.add,
    "mul_scalar": torch.mul,
}
"""What the steps of a program compute, as torch functions; those of gradients are the kernels' own."""

Step = tuple


@dataclass(frozen=True)
class EdgeProgram:
    """``leaves``: kinds, in the order of their tensors; ``steps``: ``(name, values..., number)``, as in the text.

    Raises:
        ValueError: a kind, a step or its arguments are unknown, or a step reads a value that comes after it.
    """

    leaves: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def __post_init__(self):
        _require(bool(self.leaves), "at least one leaf", "none")
        for kind in self.leaves:
            _require(kind in LEAVES, f"leaves out of {', '.join(LEAVES)}", repr(kind))
        for number, (name, *arguments) in enumerate(self.steps, len(self.leaves)):
            known = name in (*BINARY, *UNARY, *WITH_NUMBER)
            _require(known, f"steps out of {', '.join((*BINARY, *UNARY, *WITH_NUMBER))}", repr(name))
            count, came = OPERANDS[name], f"{name} {' '.join(map(str, arguments))}"
            right = len(arguments) == count + NUMBERS.get(name, 0)
            _require(right, f"{count} values and {NUMBERS.get(name, 0)} numbers of {name}", repr(came))
            earlier = all(isinstance(value, int) and 0 <= value < number for value in arguments[:count])
            _require(earlier, f"values before {number}, which the step defines", repr(came))

    @property
    def result(self) -> int:
        """Number of the value that is the program's."""
        return len(self.leaves) + len(self.steps) - 1

    def __str__(self) -> str:
        return " | ".join((" ".join(self.leaves), *(" ".join(map(_word, step)) for step in self.steps)))

    @staticmethod
    def parse(text: str) -> "EdgeProgram":
        """The program of a text; ``str`` gives the text of a program."""
        return _parse(text)


@dataclass(frozen=True)
class EdgeGradient:
    """Steps that lead from a program's leaves and the gradient of its value to the gradients of leaves.

    ``leaves``: those of the program, then ``"grad"``. ``steps`` are numbered behind these. ``results``: per leaf of the
    program the number of its gradient, -1 where it is not wanted or 0 everywhere.
    """

    leaves: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @property
    def read(self) -> frozenset[int]:
        """Numbers of the values that a step reads or that are results."""
        return frozenset(self.results) | {value for step in self.steps for value in operands(step)}


def _require(holds: bool, expected: str, came: str) -> None:
    if not holds:
        raise ValueError(f"edge program: expected {expected}; got {came}")


def _word(part: object) -> str:
    return repr(part) if isinstance(part, float) else str(part)


@functools.lru_cache(1024)
def _parse(text: str) -> EdgeProgram:
    leaves, *lines = (part.split() for part in text.split("|"))
    steps = []
    for line in lines:
        _require(bool(line), "a step after every |", repr(text))
        name, *words = line
        count = OPERANDS.get(name, 0)
        try:
            steps.append((name, *map(int, words[:count]), *map(float, words[count:])))
        except ValueError:
            raise ValueError(f"edge program: expected numbers after {name!r}; got {' '.join(line)!r}") from None
    return EdgeProgram(tuple(leaves), tuple(steps))


def operands(step: Step) -> tuple[int, ...]:
    """Numbers of the values that a step reads."""
    return step[1 : 1 + OPERANDS[step[0]]]


def heads_of(reduce: str) -> int:
    """H of the reduction ``"heads:H"``, 0 for ``"sum"`` and ``"mean"``; ``ValueError`` for anything else."""
    if reduce in ("sum", "mean"):
        return 0
    name, _, number = reduce.partition(":")
    _require(name == "heads" and number.isdigit() and int(number) > 0, "'sum', 'mean' or 'heads:H'", repr(reduce))
    return int(number)


def grouped(program: EdgeProgram, tensors: Sequence) -> list[tuple]:
    """The tensors of every leaf; ``ValueError`` unless there are as many as the leaves take."""
    counts = [LEAVES[kind] for kind in program.leaves]
    _require(sum(counts) == len(tensors), f"{sum(counts)} tensors for {' '.join(program.leaves)!r}", str(len(tensors)))
    given = iter(tensors)
    return [tuple(next(given) for _ in range(count)) for count in counts]


def width_of(program: EdgeProgram, tensors: Sequence):
    """W: the columns of the leaves; ``ValueError`` if no leaf has any."""
    for kind, (*_, last) in zip(program.leaves, grouped(program, tensors), strict=True):
        if kind != "scalar":
            return last.shape[0] if kind in ("vector", "narrow") else last.shape[0 if kind == "narrow_plain" else 1]
    raise ValueError(f"edge program: expected a leaf with columns besides scalars; got {str(program)!r}")


def check_leaves(program: EdgeProgram, tensors: Sequence, num_dst: int, num_edges: int, reduce: str) -> int:
    """W; ``ValueError`` unless shapes and dtypes are those that the kinds of leaves ask for."""
    for tensor in tensors:
        _require(tensor.is_floating_point(), "leaves of a floating-point dtype", str(tensor.dtype))
        _require(tensor.dtype == tensors[0].dtype, f"leaves of one dtype, {tensors[0].dtype}", str(tensor.dtype))
    for kind, (first, *_) in zip(program.leaves, grouped(program, tensors), strict=True):
        rows = {"vector": "[W]", "scalar": f"[{num_edges}] or [{num_edges}, 1]"}.get(kind, "a matrix")
        right = first.dim() == (1 if kind == "vector" else 2) or (kind == "scalar" and first.dim() == 1)
        _require(right, f"{rows} for a leaf {kind!r}", str(list(first.shape)))
    width = width_of(program, tensors)
    num_src, shapes = None, {"dst": (num_dst, width), "edge": (num_edges, width), "vector": (width,)}
    for kind, (first, *others) in zip(program.leaves, grouped(program, tensors), strict=True):
        shape, came = tuple(first.shape), ", ".join(str(list(tensor.shape)) for tensor in (first, *others))
        if kind == "src":
            num_src = shape[0] if num_src is None else num_src
            _require(shape == (num_src, width), f"sources' rows [{num_src}, {width}]", came)
        elif kind == "scalar":
            _require(shape in ((num_edges,), (num_edges, 1)), f"a scalar of each of {num_edges} edges", came)
        elif others:
            own = [(width, shape[1]), (width,)][: len(others)]
            right = shape[0] == num_edges and [tuple(tensor.shape) for tensor in others] == own
            _require(right, f"features [{num_edges}, K], a weight [{width}, K] and, if narrow, a bias [{width}]", came)
            _require(1 <= shape[1] <= WIDEST_NARROW, f"features of 1 to {WIDEST_NARROW} columns", came)
        else:
            _require(shape == shapes[kind], f"{kind} {list(shapes[kind])}", came)
    heads = heads_of(reduce)
    _require(not heads or width % heads == 0, f"columns in {heads} heads", str(width))
    return width


def check_wanted(program: EdgeProgram, tensors: Sequence, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Per leaf whether any of its tensors wants a gradient; ``ValueError`` where features of a narrow leaf do."""
    _require(len(wanted) == len(tensors), f"wanted of {len(tensors)} tensors", str(len(wanted)))
    for kind, (first, *_) in zip(program.leaves, grouped(program, wanted), strict=True):
        _require(not (first and "narrow" in kind), "no gradient of narrow features", "one; make them an edge leaf")
    return tuple(any(group) for group in grouped(program, wanted))


@functools.lru_cache(1024)
def gradient(program: EdgeProgram, wanted: tuple[bool, ...]) -> EdgeGradient:
    """How the gradients of the ``wanted`` leaves follow from the gradient of the program's value.

    Subgradients are PyTorch's: ReLU and the absolute value have 0 at 0, the leaky ReLU its slope, equal arguments of a
    maximum or minimum half each.
    """
    first = len(program.leaves)
    moved = [renumbered(step, lambda value: value + (value >= first)) for step in program.steps]
    steps, needed = list(moved), {leaf for leaf in range(first) if wanted[leaf]}
    for number, step in enumerate(moved, first + 1):
        if needed.intersection(operands(step)):
            needed.add(number)
    found = {program.result + (program.result >= first): first}

    def push(*step) -> int:
        steps.append(step)
        return first + len(steps)

    for number in range(first + len(moved), first, -1):
        if number in found and number in needed:
            for value, part in parts_of(moved[number - first - 1], number, found[number], push, needed.__contains__):
                found[value] = push("add", found[value], part) if value in found else part
    results = tuple(found.get(leaf, -1) if wanted[leaf] else -1 for leaf in range(first))
    return living((*program.leaves, "grad"), steps, results)


def parts_of(
    step: Step, result: int, grad: int, push: Callable[..., int], needed: Callable[[int], bool]
) -> Iterable[tuple[int, int]]:
    """(a value that the step reads, its gradient through the step), for the values that need one."""
    name, *arguments = step
    a = arguments[0]
    if name in BINARY:
        b = arguments[1]
        for_a, for_b = {
            "add": (lambda: grad, lambda: grad),
            "sub": (lambda: grad, lambda: push("neg", grad)),
            "mul": (lambda: push("mul", grad, b), lambda: push("mul", grad, a)),
            "div": (
                lambda: push("div", grad, b),
                lambda: push("neg", push("div", push("mul", grad, result), b)),
            ),
            "maximum": (lambda: push("larger_grad", grad, a, b), lambda: push("larger_grad", grad, b, a)),
            "minimum": (lambda: push("larger_grad", grad, b, a), lambda: push("larger_grad", grad, a, b)),
        }[name]
        return [(value, part()) for value, part in ((a, for_a), (b, for_b)) if needed(value)]
    if name == "add_scalar":
        return [(a, grad)]
    if name in ("neg", "mul_scalar"):
        return [(a, push(name, grad, *arguments[1:]))]
    if name == "exp":
        return [(a, push("mul", grad, result))]
    of = result if name in ("sigmoid", "tanh") else a
    return [(a, push(f"{name}_grad", grad, of, *arguments[1:]))]


def renumbered(step: Step, number: Callable[[int], int]) -> Step:
    count = 1 + OPERANDS[step[0]]
    return (step[0], *map(number, step[1:count]), *step[count:])


def living(leaves: tuple[str, ...], steps: list[Step], results: tuple[int, ...]) -> EdgeGradient:
    """Without the steps that no result depends on."""
    alive = set(results)
    for number in range(len(leaves) + len(steps) - 1, len(leaves) - 1, -1):
        if number in alive:
            alive.update(operands(steps[number - len(leaves)]))
    kept = [number for number in range(len(leaves), len(leaves) + len(steps)) if number in alive]
    place = {-1: -1, **{leaf: leaf for leaf in range(len(leaves))}}
    place.update({number: len(leaves) + i for i, number in enumerate(kept)})
    left = tuple(renumbered(steps[number - len(leaves)], place.__getitem__) for number in kept)
    return EdgeGradient(leaves, left, tuple(place[result] for result in results))
