"""Message functions under DGL's names: ``u`` is the source, ``v`` the destination, ``e`` the edge (thesis table 5.2).

They hold their operands: ``block.pull(fn.u_mul_e(x, w), "sum")``. Rows of a ``u`` operand are sources, of a ``v``
operand destinations, of an ``e`` operand edges. Node operands of one message have the same trailing shape; an edge
operand is ``[E]``, ``[E, H]`` for node rows ``[N, H, D]``, or shaped like them.
"""

from collections.abc import Callable

from torch import Tensor


class Message:
    """An edge-wise function: ``op`` of a left and a right operand, each with the side its rows belong to.

    Args:
        op: ``copy``, ``add``, ``sub``, ``mul``, ``div`` or ``dot`` (inner product over the last dimension).
        lhs_side, rhs_side: ``u``, ``v`` or ``e``.
    """

    def __init__(self, op: str, lhs: Tensor, lhs_side: str, rhs: Tensor | None = None, rhs_side: str = ""):
        self.op = op
        self.lhs = lhs
        self.lhs_side = lhs_side
        self.rhs = rhs
        self.rhs_side = rhs_side

    @property
    def name(self) -> str:
        """As in DGL: ``copy_u``, ``u_mul_e``."""
        return f"copy_{self.lhs_side}" if self.rhs is None else f"{self.lhs_side}_{self.op}_{self.rhs_side}"


def copy_u(x: Tensor) -> Message:
    """The source's row: ``x[src]``."""
    return Message("copy", x, "u")


def copy_v(x: Tensor) -> Message:
    """The destination's row: ``x[dst]``."""
    return Message("copy", x, "v")


def copy_e(e: Tensor) -> Message:
    """The edge's own value."""
    return Message("copy", e, "e")


def _binary(name: str) -> Callable[[Tensor, Tensor], Message]:
    lhs_side, op, rhs_side = name.split("_")

    def message(lhs: Tensor, rhs: Tensor) -> Message:
        return Message(op, lhs, lhs_side, rhs, rhs_side)

    form = f"the inner product over the last dimension of {lhs_side} and {rhs_side}" if op == "dot" else op
    rows = {"u": "x[src]", "v": "x[dst]", "e": "the edge's value"}
    message.__name__ = message.__qualname__ = name
    message.__doc__ = f"Per edge, {form}: left {rows[lhs_side]}, right {rows[rhs_side]}; rows as in the module's text."
    return message


u_add_v, u_sub_v, u_mul_v = _binary("u_add_v"), _binary("u_sub_v"), _binary("u_mul_v")
u_div_v, u_dot_v = _binary("u_div_v"), _binary("u_dot_v")
v_add_u, v_sub_u, v_mul_u = _binary("v_add_u"), _binary("v_sub_u"), _binary("v_mul_u")
v_div_u, v_dot_u = _binary("v_div_u"), _binary("v_dot_u")
u_add_e, u_sub_e, u_mul_e = _binary("u_add_e"), _binary("u_sub_e"), _binary("u_mul_e")
u_div_e, u_dot_e = _binary("u_div_e"), _binary("u_dot_e")
e_add_u, e_sub_u, e_mul_u = _binary("e_add_u"), _binary("e_sub_u"), _binary("e_mul_u")
e_div_u, e_dot_u = _binary("e_div_u"), _binary("e_dot_u")
v_add_e, v_sub_e, v_mul_e = _binary("v_add_e"), _binary("v_sub_e"), _binary("v_mul_e")
v_div_e, v_dot_e = _binary("v_div_e"), _binary("v_dot_e")
e_add_v, e_sub_v, e_mul_v = _binary("e_add_v"), _binary("e_sub_v"), _binary("e_mul_v")
e_div_v, e_dot_v = _binary("e_div_v"), _binary("e_dot_v")
