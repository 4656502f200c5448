"""New nodes with the shapes that later passes and padding read, and questions about nodes that several passes ask."""

import contextlib

import torch
from torch import fx

from joestar.lowering import fakes
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_size
from joestar.torch_private import FakeTensor

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def emit(graph: fx.Graph, like: fx.Node, target, *args, **kwargs) -> fx.Node:
    """A call at the insertion point: its value is found by running the op on shapes, its source line is ``like``'s."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    values, named = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    modes = [value.fake_mode for value in _tensors((*values, like.meta["val"])) if isinstance(value, FakeTensor)]
    mode = modes[0] if modes else None

    def ran():
        with mode or contextlib.nullcontext(), torch.no_grad():
            return target(*values, **named)

    fakes.made(node, fakes.once(mode, ran, target, values, named))
    return node


def hashed(draw: fx.Node) -> dict[str, fx.Node]:
    """What a draw is told of ids that nodes hash as, for another op in its place: ``node_ids``, or nothing."""
    node_ids = argument(draw, "node_ids")
    return {} if node_ids is None else {"node_ids": node_ids}


def _tensors(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        else:
            yield value


def leads(part: fx.Node, whole: fx.Node, rows) -> bool:
    """Whether ``part`` is ``whole[:n]`` with ``n`` the size ``rows``."""
    if part.target is not _ATEN.slice.Tensor or part.args[0] is not whole:
        return False
    if argument(part, "dim") != 0 or argument(part, "start") not in (0, None) or argument(part, "step") != 1:
        return False
    return same_size(part.meta["val"].shape[0], rows)


def tensor(value) -> torch.Tensor | None:
    """The traced tensor of an argument; ``None`` for numbers, sizes and tuples."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_product(value) -> bool:
    """Whether a node is ``linear`` of a matrix of rows by a matrix (weights may be a vector, rows have heads)."""
    if not isinstance(value, fx.Node) or value.target is not _ATEN.linear.default:
        return False
    return all(tensor(operand) is not None and tensor(operand).dim() == 2 for operand in value.args[:2])


def has_plain_bias(linear: fx.Node) -> bool:
    """Whether a product has no bias, or one with an entry per column (PyTorch also takes one for all columns)."""
    bias = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    if bias is None:
        return True
    return tensor(bias).dim() == 1 and same_size(tensor(bias).shape[0], tensor(linear.args[1]).shape[0])


def is_column(value) -> bool:
    """Whether a node holds one value per row, ``[n, 1]``."""
    found = tensor(value)
    return found is not None and found.dim() == 2 and same_size(found.shape[1], 1)


def scaled(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """The factor ``[n, 1]`` by which ``node`` scales the rows of ``source``, or ``None``."""
    if node.target is not _ATEN.mul.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for rows, factor in (node.args, node.args[::-1]):
        if rows is source and factor is not source and is_column(factor) and tensor(source) is not None:
            if tensor(source).dim() != 2:
                return None
            return factor if same_size(tensor(factor).shape[0], tensor(source).shape[0]) else None
    return None


def vector(graph: fx.Graph, like: fx.Node, factor: fx.Node, rows: fx.Node) -> fx.Node:
    """A factor ``[n, 1]`` as ``[n]`` in the dtype of the rows, in which products of factors are then computed."""
    flat = emit(graph, like, _ATEN.squeeze.dim, factor, 1)
    dtype = rows.meta["val"].dtype
    return flat if factor.meta["val"].dtype == dtype else emit(graph, like, _ATEN.to.dtype, flat, dtype)


def name(node: fx.Node) -> str:
    """What a node calls, for messages."""
    return str(node.target).removesuffix(".default")


def erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erases a node, and what is read no more then."""
    waiting = {node}
    while waiting:
        unread = waiting.pop()
        inputs = unread.all_input_nodes
        graph.erase_node(unread)
        waiting.update(source for source in inputs if source.op == "call_function" and not source.users)
