"""Message functions under DGL's names: ``u`` is the source, ``v`` the destination, ``e`` the edge (thesis table 5.2).

They hold their operands: ``block.pull(fn.u_mul_e(x, w), "sum")``. Rows of a ``u`` operand are sources, of a ``v``
operand destinations, of an ``e`` operand edges.
"""

from torch import Tensor


class Message:
    """An edge-wise function: ``op`` of a left and a right operand, each with the side its rows belong to."""

    def __init__(self, op: str, lhs: Tensor | None, lhs_side: str, rhs: Tensor | None = None, rhs_side: str = ""):
        self.op = op
        self.lhs = lhs
        self.lhs_side = lhs_side
        self.rhs = rhs
        self.rhs_side = rhs_side


def copy_u(x: Tensor) -> Message:
    """The source's row: ``x[src]``."""
    return Message("copy", x, "u")


def copy_e(e: Tensor) -> Message:
    """The edge's own value."""
    return Message("copy", e, "e")


def u_add_e(x: Tensor, e: Tensor) -> Message:
    """``x[src] + e``."""
    return Message("add", x, "u", e, "e")


def u_mul_e(x: Tensor, e: Tensor) -> Message:
    """``x[src] * e``; ``e`` is ``[E]``, ``[E, H]`` for ``x`` ``[N, H, D]``, or shaped like the messages."""
    return Message("mul", x, "u", e, "e")


def u_add_v(a: Tensor, b: Tensor) -> Message:
    """``a[src] + b[dst]``, same trailing shape."""
    return Message("add", a, "u", b, "v")


def u_sub_v(a: Tensor, b: Tensor) -> Message:
    """``a[src] - b[dst]``, same trailing shape."""
    return Message("sub", a, "u", b, "v")


def u_mul_v(a: Tensor, b: Tensor) -> Message:
    """``a[src] * b[dst]``, same trailing shape."""
    return Message("mul", a, "u", b, "v")


def u_div_v(a: Tensor, b: Tensor) -> Message:
    """``a[src] / b[dst]``, same trailing shape."""
    return Message("div", a, "u", b, "v")


def u_dot_v(a: Tensor, b: Tensor) -> Message:
    """Inner product over the last dimension of ``a[src]`` and ``b[dst]``."""
    return Message("dot", a, "u", b, "v")
