"""Sizes used as numbers (``x / block.num_dst``) become counts, which live on the device."""

import torch
from torch import fx

from joestar.torch_private import OpOverload

aten = torch.ops.aten

SHAPE_SCALARS = {aten.arange.default, aten.arange.start, aten.arange.start_step}
"""Ops whose Scalar arguments are sizes, not values."""

_FILLS = {aten.full.default: 1, aten.scalar_tensor.default: 0, aten.new_full.default: 2, aten.full_like.default: 1}
"""Ops that fill a tensor with a value: position of the value."""

_WITH_TENSOR = {
    "Scalar": ("Tensor", "Tensor_Tensor"), "Tensor_Scalar": ("Tensor_Tensor",), "Scalar_Tensor": ("Tensor",),
    "ScalarOther": ("self",), "ScalarSelf": ("self",), "default": ("Tensor",),
}  # fmt: skip
"""Overloads that take a tensor where this one takes a number."""


_SIZED = {
    "view", "reshape", "_unsafe_view", "unflatten", "expand", "expand_copy", "broadcast_to", "zeros", "ones", "full",
    "empty", "new_zeros", "new_ones", "new_full", "new_empty", "arange", "eye", "slice", "narrow", "repeat", "tile",
    "one_hot", "sym_size", "layer_norm", "native_layer_norm", "rms_norm",
}  # fmt: skip
"""Ops whose integer arguments say how large something is: under bounds, its valid entries stay a prefix."""


def is_symbolic(value) -> bool:
    """Whether a node's value is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def values_to_counts(context, node: fx.Node) -> None:
    """Replaces every size among the arguments of a node that stands for a value, not for a shape."""
    if not isinstance(node.target, OpOverload) or node.target in SHAPE_SCALARS:
        return
    if node.target in _FILLS:
        _fill_with_count(context, node)
        return
    sized = node.target.namespace == "joestar" or node.target._schema.name.partition("::")[2] in _SIZED
    for index, argument in enumerate(node.target._schema.arguments):
        inside = index < len(node.args)
        value = node.args[index] if inside else node.kwargs.get(argument.name)
        if not _mentions_size(value):
            continue
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind not in ("Tensor", "number", "Scalar") or isinstance(value.meta["val"], torch.SymBool):
            if sized and "float" not in kind:
                continue
            raise _refused(context, node)
        if kind != "Tensor":
            node.target = _tensor_overload(context, node, index)
        count = _as_number(context, node, value)
        if not node.target._schema.is_mutable:
            _widen(context, node)
        if inside:
            node.update_arg(index, count)
        else:
            node.update_kwarg(argument.name, count)
        context.note("size to count")


def _as_number(context, node: fx.Node, size: fx.Node) -> fx.Node:
    """The count behind a size, in a dtype that leaves the result's as it would be with a Python number."""
    value, result = size.meta["val"], node.meta.get("val")
    count = context.count(value.node.expr, node)
    if isinstance(value, torch.SymFloat) and _is_float(result):
        count = context.call(aten._to_copy.default, count, dtype=torch.promote_types(result.dtype, torch.float32))
    return count


def _widen(context, node: fx.Node) -> None:
    """The node computes in at least float32, as with a Python number: 70,000 is no float16, and 257 no bfloat16.

    Autocast may make any value one of 16 bits; for others, the conversions do nothing.
    """
    operands = [arg for arg in node.args if isinstance(arg, fx.Node) and _is_float(arg.meta.get("val"))]
    for operand in dict.fromkeys(operands):
        wide = context.call(torch.ops.joestar.widened.default, operand, like=operand)
        node.replace_input_with(operand, wide)
    result = node.meta.get("val")
    like = [operand for operand in operands if _is_float(result) and operand.meta["val"].dtype == result.dtype]
    if like:
        with context.gm.graph.inserting_before(node.next):
            narrowed = context.call(torch.ops.joestar.narrowed.default, node, like[0], like=node)
        node.replace_all_uses_with(narrowed, delete_user_cb=lambda user: user is not narrowed)


def _is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _tensor_overload(context, node: fx.Node, index: int):
    """The overload that takes a tensor as argument ``index``."""
    names = _WITH_TENSOR.get(node.target._overloadname, ())
    arguments = [argument.name for argument in node.target._schema.arguments]
    numbers = [arg for i, arg in enumerate(node.args) if i != index and isinstance(arg, (int, float))]
    for name in names:
        found = getattr(node.target.overloadpacket, name, None)
        if found is not None and [argument.name for argument in found._schema.arguments] == arguments:
            others = [a for a in found._schema.arguments if "Tensor" in str(a.type)]
            if len(others) == len(arguments) and numbers:
                break
            return found
    raise _refused(context, node)


def _mentions_size(value) -> bool:
    """Whether an argument, or an entry of it, is a size or a comparison of sizes."""
    if isinstance(value, (list, tuple)):
        return any(map(_mentions_size, value))
    return isinstance(value, fx.Node) and isinstance(
        value.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def _refused(context, node: fx.Node):
    return context.refuse(
        node, "uses the size of a sampled set as a number in a place where only constants may stand",
        "Divide or multiply by the size instead.",
    )  # fmt: skip


def _fill_with_count(context, node: fx.Node) -> None:
    position = _FILLS[node.target]
    fill = node.args[position]
    if not isinstance(fill, fx.Node) or not is_symbolic(fill.meta.get("val")):
        return
    count = context.count(fill.meta["val"].node.expr, node)
    new = context.call(aten._to_copy.default, count, like=node, dtype=node.meta["val"].dtype)
    if node.target is aten.full_like.default:
        new = context.call(aten.expand_as.default, new, node.args[0], like=node)
    elif position and node.args[position - 1]:
        new = context.call(aten.expand.default, new, node.args[position - 1], like=node)
    node.replace_all_uses_with(new)
