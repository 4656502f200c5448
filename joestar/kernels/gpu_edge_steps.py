"""Edge programs inside Triton kernels: leaves are loaded and steps run for a tile of edges, one per row of the tile.

A program reaches a kernel as tuples that are constants of its compilation: ``KINDS`` (of leaves), ``PLACES`` (each
leaf's first tensor), ``COLUMNS`` (of narrow features), ``NAMES``, ``READ`` (three values a step) and ``NUMBERS``. Rows
of one end, ``OWN``, are held in registers while a tile goes over its edges; so are vectors and narrow weights.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.edge_program import EdgeProgram, Step, grouped, operands


def edges_ahead(leaves: Sequence[Tensor], program: EdgeProgram, most: int) -> int:
    """Edges that a program loads before it uses the first: fewer, the more narrow features they bring along."""
    features = sum(group[0].shape[1] for group in grouped(program, leaves) if len(group) > 1)
    return max(1, min(most, 4 * most // max(1, features)))


def described(program: EdgeProgram, leaves: Sequence[Tensor], steps: tuple[Step, ...], kinds: tuple[str, ...]) -> dict:
    """The constants of a kernel that runs ``steps`` over leaves of ``kinds``: "none" loads nothing.

    ``features`` are those of a narrow leaf whose value is not read.
    """
    groups = grouped(program, leaves)
    read = [(*operands(step), operands(step)[0], operands(step)[0])[:3] for step in steps]
    return {
        "KINDS": kinds,
        "PLACES": tuple(sum(map(len, groups[:leaf])) for leaf in range(len(groups))),
        "COLUMNS": tuple(group[0].shape[1] if len(group) > 1 else 0 for group in groups),
        "NAMES": tuple(step[0] for step in steps),
        "READ": tuple(value for values in read for value in values),
        "NUMBERS": tuple(float((*step, 0.0)[1 + len(operands(step))]) for step in steps),
    }


def prepared(program: EdgeProgram, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The tensors as kernels read them: narrow weights transposed, ``[K, W]``."""
    groups = zip(program.leaves, grouped(program, leaves), strict=True)
    return tuple(
        tensor.t().contiguous() if "narrow" in kind and place == 1 else tensor
        for kind, group in groups
        for place, tensor in enumerate(group)
    )


@triton.jit
def _sigmoid(a):
    return 1 / (1 + tl.exp(-a))


@triton.jit
def _forward_step(
    values, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):
    NAME: tl.constexpr = NAMES[K]
    a, b = values[READ[3 * K]], values[READ[3 * K + 1]]
    number = tl.full([1, 1], NUMBERS[K], ACC)
    if NAME == "add":
        return a + b
    elif NAME == "sub":
        return a - b
    elif NAME == "mul":
        return a * b
    elif NAME == "div":
        return a / b
    elif NAME == "maximum":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "minimum":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "neg":
        return -a
    elif NAME == "relu":
        return tl.where(a <= 0, 0, a)
    elif NAME == "leaky_relu":
        return tl.where(a > 0, a, a * number)
    elif NAME == "elu":
        return tl.where(a > 0, a, (tl.exp(a) - 1) * number)
    elif NAME == "sigmoid":
        return _sigmoid(a)
    elif NAME == "tanh":
        return 2 * _sigmoid(2 * a) - 1
    elif NAME == "exp":
        return tl.exp(a)
    elif NAME == "abs":
        return tl.abs(a)
    elif NAME == "silu":
        return a * _sigmoid(a)
    elif NAME == "add_scalar":
        return a + number
    elif NAME == "mul_scalar":
        return a * number
    else:
        return _gradient_step(values, NAMES, READ, NUMBERS, K, ACC)


@triton.jit
def _gradient_step(
    values, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):
    """Steps of gradients: ``a`` is the argument, or for ``sigmoid`` and ``tanh`` the result."""
    NAME: tl.constexpr = NAMES[K]
    grad, a, b = values[READ[3 * K]], values[READ[3 * K + 1]], values[READ[3 * K + 2]]
    number = tl.full([1, 1], NUMBERS[K], ACC)
    if NAME == "relu_grad":
        return tl.where(a <= 0, 0, grad)
    elif NAME == "leaky_relu_grad":
        return tl.where(a > 0, grad, grad * number)
    elif NAME == "elu_grad":
        return tl.where(a > 0, grad, grad * tl.exp(a) * number)
    elif NAME == "sigmoid_grad":
        return grad * a * (1 - a)
    elif NAME == "tanh_grad":
        return grad * (1 - a * a)
    elif NAME == "abs_grad":
        return tl.where(a > 0, grad, tl.where(a < 0, -grad, 0))
    elif NAME == "silu_grad":
        return grad * _sigmoid(a) * (1 + a * _sigmoid(-a))
    elif NAME == "larger_grad":
        return tl.where(a > b, grad, tl.where(a == b, grad / 2, 0))
    else:
        tl.static_assert(False, "a step that the kernels do not know")


@triton.jit
def run_steps(values, NAMES: tl.constexpr, READ: tl.constexpr, NUMBERS: tl.constexpr, ACC: tl.constexpr):
    """``values`` of the leaves, then of the steps."""
    for k in tl.static_range(len(NAMES)):
        values = values + (_forward_step(values, NAMES, READ, NUMBERS, k, ACC),)  # noqa: RUF005
    return values


@triton.jit
def _held_leaf(
    leaves, i, column, used, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr, OWN: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What stays the same for all edges of rows ``i``: a tuple per leaf, weights before the bias."""
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    leaf = leaves[PLACES[L]]
    held = ()
    if KIND == "vector":
        held = held + (tl.load(leaf + column, inside, 0).to(ACC),)  # noqa: RUF005
    elif KIND == OWN:
        at = leaf + i.to(tl.int64) * WIDTH + column
        held = held + (tl.load(at, used & inside, 0).to(ACC),)  # noqa: RUF005
    elif KIND == "narrow" or KIND == "narrow_plain":
        at = tl.program_id(2) * WIDTH + column + 0 * i  # as if they were rows, to be where rows are; the id is 0
        for k in tl.static_range(COUNT):
            held = held + (tl.load(leaves[PLACES[L] + 1] + at + k * WIDTH, inside, 0).to(ACC),)  # noqa: RUF005
        if KIND == "narrow":
            held = held + (tl.load(leaves[PLACES[L] + 2] + at, inside, 0).to(ACC),)  # noqa: RUF005
    return held


@triton.jit
def held_leaves(
    leaves, i, column, used, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """``_held_leaf`` of all; rows ``i`` ``[ROWS, 1]`` are read where ``used``."""
    held = ()
    for leaf in tl.static_range(len(KINDS)):
        held = held + (  # noqa: RUF005
            _held_leaf(leaves, i, column, used, inside, KINDS, PLACES, COLUMNS, leaf, OWN, WIDTH, ACC),
        )
    return held


@triton.jit
def _edge_leaf(
    leaves, e, other, valid, column, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr, OWN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What an edge ``e`` ``[ROWS, 1]`` brings along, its other end being row ``other``: a tuple per leaf."""
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    leaf = leaves[PLACES[L]]
    loaded = ()
    if KIND == OWN:
        loaded = ()
    elif KIND == "src" or KIND == "dst":
        loaded = loaded + (tl.load(leaf + other * WIDTH + column, valid & inside, 0),)  # noqa: RUF005
    elif KIND == "edge":
        loaded = loaded + (tl.load(leaf + e * WIDTH + column, valid & inside, 0),)  # noqa: RUF005
    elif KIND == "scalar":
        loaded = loaded + (tl.load(leaf + e, valid, 0),)  # noqa: RUF005
    elif KIND == "narrow" or KIND == "narrow_plain" or KIND == "features":
        for k in tl.static_range(COUNT):
            loaded = loaded + (tl.load(leaf + e * COUNT + k, valid, 0),)  # noqa: RUF005
    return loaded


@triton.jit
def edge_leaves(
    leaves, e, other, valid, column, inside,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``_edge_leaf`` of all, in the dtype of the leaves; 0 where not ``valid``."""
    loaded = ()
    for leaf in tl.static_range(len(KINDS)):
        loaded = loaded + (  # noqa: RUF005
            _edge_leaf(leaves, e, other, valid, column, inside, KINDS, PLACES, COLUMNS, leaf, OWN, WIDTH),
        )
    return loaded


@triton.jit
def _leaf_value(
    held, loaded, KINDS: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr, OWN: tl.constexpr, ACC: tl.constexpr
):
    KIND: tl.constexpr = KINDS[L]
    COUNT: tl.constexpr = COLUMNS[L]
    if KIND == "vector" or KIND == OWN:
        return held[L][0]
    elif KIND == "narrow" or KIND == "narrow_plain":
        value = loaded[L][0].to(ACC) * held[L][0]
        for k in tl.static_range(1, COUNT):
            value += loaded[L][k].to(ACC) * held[L][k]
        if KIND == "narrow":
            value += held[L][COUNT]
        return value
    elif KIND == "none" or KIND == "features":
        return tl.zeros([1, 1], ACC)
    else:
        return loaded[L][0].to(ACC)


@triton.jit
def leaf_values(held, loaded, KINDS: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr, ACC: tl.constexpr):
    """The values of the leaves for a tile of edges."""
    values = ()
    for leaf in tl.static_range(len(KINDS)):
        values = values + (_leaf_value(held, loaded, KINDS, COLUMNS, leaf, OWN, ACC),)  # noqa: RUF005
    return values


@triton.jit
def head_grads(grad, e, valid, column, inside, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, ACC: tl.constexpr):
    """``grad[e, head of the column]``; a few heads one by one, which leaves the tile where rows are."""
    if HEADS <= 8:
        value = tl.load(grad + e * HEADS, valid, 0).to(ACC)
        for head in tl.static_range(1, HEADS):
            other = tl.load(grad + e * HEADS + head, valid, 0).to(ACC)
            value = tl.where(column < head * HEAD_WIDTH, value, other)
        return value
    else:
        return tl.load(grad + e * HEADS + column // HEAD_WIDTH, valid & inside, 0).to(ACC)
