"""Products: rows of the result are rows of an operand, unless the contraction runs over padded rows."""

from torch import fx

from joestar.lowering.rules.pointwise import guard_product, is_large
from joestar.lowering.sizes import expression, padded_dims


def _contraction(context, node: fx.Node, position: int, dim: int) -> None:
    """Sets the padding of one operand to 0 if the contracted dimension is padded."""
    operand = node.args[position]
    value = operand.meta["val"]
    dim = dim % value.dim()
    if expression(value.shape[dim]) is not None:
        node.update_arg(position, context.mask(operand, dim, 0, node))
        context.note("masked product")


def _product(position: int):
    """A rule for products whose left operand ``args[position]`` is contracted over its last dimension."""

    def rule(context, node: fx.Node) -> None:
        _contraction(context, node, position, -1)
        guard_product(context, node, (position, position + 1))

    return rule


def _einsum(context, node: fx.Node) -> None:
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    if not any(padded_dims(operand.meta["val"]) for operand in operands):
        return
    inputs, arrow, result = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation:
        raise context.refuse(node, "uses an implicit einsum on padded rows", "Spell out the result: 'nd,de->ne'.")
    for position, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        value = operand.meta["val"]
        for dim, letter in enumerate(term):
            if letter not in result and expression(value.shape[dim]) is not None:
                operands[position] = context.mask(operands[position], dim, 0, node)
                context.note("masked product")
    large = [position for position, operand in enumerate(operands) if is_large(context, operand)]
    for position in large[1:]:
        operands[position] = context.guard(operands[position], 0, node)
        context.note("guard")
    node.update_arg(1, operands)


def _batch_sum(context, node: fx.Node) -> None:
    """``addbmm`` sums over the batch as well."""
    _contraction(context, node, 1, 0)
    _contraction(context, node, 1, -1)
    guard_product(context, node, (1, 2))


def _scaled(context, node: fx.Node) -> None:
    """``scaled_linear`` multiplies rows, factors and weights."""
    guard_product(context, node, (0, 1))


RULES = {
    "scaled_linear": _scaled,
    **dict.fromkeys(("mm", "matmul", "bmm", "mv", "dot", "vdot", "inner", "linear"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _product(1)),
    "addbmm": _batch_sum,
    "einsum": _einsum,
}
