"""Every write is to the first operand: what reads a tensor before, and what reads it after, is told apart by that.

Before                                          After
    add = aten.add.out(a, 1, out=shift)             new = aten.add.Tensor(a, 1)
                                                    add = aten.copy_(shift, new)
"""

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import same_shape
from joestar.torch_private import OpOverload

aten = torch.ops.aten


def settle_out(gm: fx.GraphModule) -> None:
    """Ops that write to ``out=`` become the op and a ``copy_``; call it under the fake mode of the graph.

    Raises:
        CaptureError: an op writes to something else than one tensor, its first operand or ``out``.
    """
    for node in list(gm.graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            continue
        arguments = node.target._schema.arguments
        written = [argument for argument in arguments if argument.alias_info and argument.alias_info.is_write]
        if not written or (written == arguments[:1] and str(written[0].type) == "Tensor"):
            continue
        target = _twin(node.target) if [argument.name for argument in written] == ["out"] else None
        if target is None or not _settled(gm, node, target):
            raise CaptureError(
                f"{node.target} at {node_line(node)} writes to several tensors, or to one of another shape or dtype "
                "than its result.\n  Write instead: a plain operation, and tensor.copy_(result) for each of them."
            )


def _settled(gm: fx.GraphModule, node: fx.Node, target: OpOverload) -> bool:
    kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
    args, given = torch.fx.map_arg((node.args, kwargs), lambda each: each.meta["val"])
    out, value = node.kwargs["out"], target(*args, **given)
    held = out.meta["val"]
    if not isinstance(value, Tensor) or value.dtype != held.dtype or not same_shape(value.shape, held.shape):
        return False
    with gm.graph.inserting_before(node):
        result = gm.graph.call_function(target, node.args, kwargs)
    result.meta = {**node.meta, "val": value}
    node.target, node.args, node.kwargs = aten.copy_.default, (out, result), {}
    return True


def _twin(target: OpOverload) -> OpOverload | None:
    """The overload that returns what this one writes to ``out``."""
    wanted = [str(argument.type) for argument in target._schema.arguments if argument.name != "out"]
    for name in target.overloadpacket.overloads():
        twin = getattr(target.overloadpacket, name)
        if not twin._schema.is_mutable and [str(argument.type) for argument in twin._schema.arguments] == wanted:
            return twin
    return None
