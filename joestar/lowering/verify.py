"""Rules of the IR, checked after capture and after every pass."""

import builtins
import math
import operator

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, VerificationError
from joestar.lowering import fakes
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import same_shape, same_size
from joestar.torch_private import (
    FakeTensor,
    OpOverload,
    free_unbacked_symbols,
    sym_cos,
    sym_log2,
    sym_sin,
    sym_sqrt,
    sym_tanh,
    tree_leaves,
)

NAMESPACES = ("aten", "joestar")
_SYMBOLIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg,
    operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.getitem,
    operator.lshift, operator.rshift, operator.and_, operator.or_, builtins.abs, builtins.round, operator.abs,
    math.ceil, math.floor, math.trunc, torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not,
    torch.sym_sum, sym_sqrt, sym_log2, sym_cos, sym_sin, sym_tanh,
}  # fmt: skip
_TO_HOST = {
    torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default, torch.ops.aten.allclose.default,
}  # fmt: skip


def namespace(node: fx.Node) -> str:
    """Namespace of the op a node calls (``aten``, ``joestar``), or an empty string."""
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def foreign_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes that are not aten or joestar ops, integer arithmetic on sizes, or inputs and outputs."""
    return [
        node
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output")
        and not (node.op == "call_function" and _allowed(node))
        and not (node.op == "get_attr" and isinstance(getattr(gm, node.target, None), Tensor))
    ]


def _allowed(node: fx.Node) -> bool:
    return namespace(node) in NAMESPACES or node.target in _SYMBOLIC


def verify_capture(gm: fx.GraphModule, origin: str) -> None:
    """Raises ``CaptureError`` if the captured graph holds anything but ops."""
    for node in foreign_nodes(gm):
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            raise CaptureError(
                f"{origin}: torch.autocast within the model or the loss cannot be lowered. Write instead: "
                "joestar.compile(..., autocast=torch.bfloat16), which runs the model under it and the loss in float32; "
                "for single results x.float() and x.to(torch.bfloat16)."
            )
        raise CaptureError(
            f"{origin}: {node.op} {node.target} at {node_line(node)} is not an aten or joestar op. Higher-order "
            "functions (checkpoint, cond, vmap) and foreign custom ops cannot be lowered: call plain torch functions."
        )
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(gm, node.target), FakeTensor):
            raise CaptureError(
                f"{origin}: a tensor at {node_line(node)} is hidden from the trace (tensor.data, torch.vmap, "
                "torch.func). Write instead: .detach() and plain torch functions."
            )
        if node.target in _TO_HOST:
            raise _brings_to_host(node, origin)
        if _depends_on_data(node.meta.get("val")):
            raise _size_of_data(node, origin)
    for node in gm.graph.nodes:  # assertions about a size or value: what made it tells more
        if namespace(node) and "val" not in node.meta and not node.users:
            masked = next((other for other in gm.graph.nodes if _picks_by_mask(other)), None)
            raise _brings_to_host(node, origin) if masked is None else _size_of_data(masked, origin)


def _picks_by_mask(node: fx.Node) -> bool:
    """Whether the size of a result depends on data, though the trace found it to equal another size."""
    if node.target is not torch.ops.aten.index.Tensor:
        return node.target in (torch.ops.aten.masked_select.default, torch.ops.aten.nonzero.default)
    return any(index is not None and index.meta["val"].dtype == torch.bool for index in node.args[1])


def _size_of_data(node: fx.Node, origin: str) -> CaptureError:
    return CaptureError(
        f"{origin}: the size of the result of {node.target} at {node_line(node)} depends on data (unique, "
        "nonzero of several dimensions, a mask beside other indices), so it cannot be padded. Write instead: x[mask], "
        "and columns of that; torch.where(mask, x, 0), sums weighted by the mask."
    )


def _brings_to_host(node: fx.Node, origin: str) -> CaptureError:
    return CaptureError(
        f"{origin}: {node.target} at {node_line(node)} would bring a value to the host in every step (.item(), "
        "float(tensor), bool(tensor), torch.equal). Write instead: keep the value in a tensor."
    )


def _depends_on_data(value) -> bool:
    """Whether a tensor, or any tensor of a list, has a size that only its data tell."""
    if isinstance(value, (list, tuple)):
        return any(_depends_on_data(v) for v in value)
    return isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)) and bool(free_unbacked_symbols(value))


class State:
    """Every node of a graph in order, what it is called with, and the value that it has.

    Attributes:
        calls: node -> (target, args, kwargs, ``id`` of the value), which Python compares without a line of Python.
        values: of the nodes, in order; as long as they are held, nothing else has their ``id``.
    """

    def __init__(self, gm: fx.GraphModule):
        self.values = [node.meta.get("val") for node in gm.graph.nodes]
        pairs = zip(gm.graph.nodes, self.values, strict=True)
        self.calls = {node: (node.target, node.args, node.kwargs, id(value)) for node, value in pairs}

    def __eq__(self, other: object) -> bool:
        """Whether a graph has the same nodes in the same order, with the very same values."""
        return isinstance(other, State) and list(self.calls.items()) == list(other.calls.items())


def verify(gm: fx.GraphModule, before_outputs: list, stage: str, before: State | None = None) -> None:
    """Raises ``VerificationError`` if a pass broke the IR: malformed graph, foreign ops, values that no op can be
    run on, changed output shapes. ``before``: the graph when that was looked at last: values that it had were found
    to be as they must."""
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"{stage} left a malformed graph: {error}") from error
    for node in foreign_nodes(gm):
        raise VerificationError(f"{stage} left a node that is no op: {node.format_node()}")
    for node in gm.graph.nodes:
        if node.op == "call_function" and namespace(node) and "val" not in node.meta:
            raise VerificationError(f"{stage} left node {node.name} without shape information.")
    verify_fakes(gm, stage, before)
    after = output_shapes(gm)
    if after != before_outputs:
        raise VerificationError(f"{stage} changed the graph's outputs from {before_outputs} to {after}.")


def verify_fakes(gm: fx.GraphModule, stage: str, before: State | None = None) -> None:
    """Raises ``VerificationError`` if a node's value is not a fake tensor of the one mode that all others have."""
    known = set() if before is None else set(map(id, before.values))
    new = [node for node in gm.graph.nodes if id(node.meta.get("val")) not in known]
    for node, what in fakes.strangers(gm.graph, new):
        raise VerificationError(
            f"{stage} left node {node.name} with {what} for a value; expected a fake tensor of the graph's mode. "
            "Make values by running the op on those of its arguments (fusion.match.emit.emit, lowering.fakes.run)."
        )


def verify_changed(before: State, after: State, stage: str, dtypes: bool = True) -> None:
    """Raises ``VerificationError`` where an op that a pass added, or gave other operands, does not give what it says.

    A rewrite that replaces rows by others of another shape or dtype, which the next op would broadcast or convert
    without a word, is found here. An op whose operands were replaced by others of the same forms gives what it gave.

    Args:
        before, after: the graph in front of the pass and behind it.
        dtypes: whether they count; under autocast values do not say what an op gives.
    """
    for node, call in after.calls.items():
        earlier = before.calls.get(node)
        if fakes.is_made(node) or earlier == call or not namespace(node):
            continue
        if earlier is not None and _as_before(earlier, call):
            continue
        found, said = fakes.result(node), node.meta["val"]
        if not _alike(found, said, dtypes):
            raise VerificationError(
                f"{stage} left node {node.name} with another value than {node.target} gives: expected "
                f"{_forms(said)}, got {_forms(found)}, at {node_line(node)}."
            )


def _as_before(before: tuple, after: tuple) -> bool:
    """Whether a call is the one that it was, but for operands of the same forms, and has the value that it had."""
    return before[3] == after[3] and before[0] is after[0] and fakes.form(before[1:3]) == fakes.form(after[1:3])


def _alike(value, other, dtypes: bool) -> bool:
    """Whether two results have tensors of the same shapes (and dtypes), and equal sizes."""
    leaves, others = tree_leaves(value), tree_leaves(other)
    return len(leaves) == len(others) and all(_alike_leaf(*pair, dtypes) for pair in zip(leaves, others, strict=True))


def _alike_leaf(value, other, dtypes: bool) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return (value.dtype == other.dtype or not dtypes) and same_shape(value.shape, other.shape)
    if isinstance(value, (int, torch.SymInt)) and isinstance(other, (int, torch.SymInt)):
        return same_size(value, other)
    return value == other


def _forms(value) -> list[str]:
    """Dtype and shape of every tensor, the value of every size."""
    leaves = tree_leaves(value)
    return [f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else str(v) for v in leaves]


def output_shapes(gm: fx.GraphModule) -> list:
    """(dtype, shape) of every tensor output, shapes as strings (they may be symbolic)."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [arg.meta.get("val") for arg in output.args[0] if isinstance(arg, fx.Node)]
    return [(str(v.dtype), str(tuple(v.shape))) for v in values if isinstance(v, torch.Tensor)]
