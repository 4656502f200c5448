"""Removes in-place writes to intermediate values: ``relu_(x)`` becomes ``relu(x)`` and later readers see the result.

Writes to inputs of the graph (BatchNorm's buffers) stay: they are the state that a step changes on purpose.
"""

import operator

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.lowering.dropout import refuse_random
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import same_shape
from joestar.torch_private import OpOverload

aten = torch.ops.aten

_IN_PLACE_BUFFERS = {aten.batch_norm.default}
_DROPOUTS = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}
"""Ops ``(x, p, train)`` that return ``x`` itself, not a copy, unless they drop something."""

_CONVERSIONS = {
    aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.to.prim_dtype, aten.type_as.default,
}  # fmt: skip

WRITES = {
    aten.embedding_renorm_.default: "a table without max_norm, and in front of every step and prediction (of a frozen "
    "table, once), under torch.no_grad(), table.weight.copy_(table.weight.renorm(norm_type, 0, max_norm)): all rows, "
    "not those that are looked up, which moments and weight decay tell apart",
}
"""Ops that write to tensors of the model without being asked to by name -> what to write instead."""


def is_in_place(node: fx.Node) -> bool:
    """Whether the node writes to its first argument (``aten.relu_`` and the like)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target not in _IN_PLACE_BUFFERS and node.target._schema.is_mutable


def ancestors(node: fx.Node) -> list[fx.Node]:
    """The node and what is behind it, in graph order."""
    found, stack = {node}, [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg not in found:
                found.add(arg)
                stack.append(arg)
    return [other for other in node.graph.nodes if other in found]


def is_view(node: fx.Node) -> bool:
    """Whether the node's tensor, or list of tensors, may share memory with its first argument."""
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, OpOverload) or converted(node):
        return False
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def converted(node: fx.Node) -> bool | None:
    """Whether a conversion (``to``, ``type_as``) is a new tensor: ``False`` if it gives back the very one, as that has
    the dtype and is there already; ``None`` of other nodes, and where that cannot be told."""
    if node.target not in _CONVERSIONS:
        return None
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("copy") or (before.dtype, before.device) != (after.dtype, after.device):
        return True
    return False if given.get("memory_format") in (None, torch.preserve_format) else None


def outlived_views(node: fx.Node, later: set[fx.Node]) -> list[fx.Node]:
    """Views of a node, and views of those, that were taken before the nodes ``later`` and are read by one of them."""
    found, open_ends = [], [node]
    while open_ends:
        base = open_ends.pop()
        views = [user for user in base.users if user.args[:1] == (base,) and is_view(user) and user not in later]
        found += [view for view in views if later & view.users.keys()]
        open_ends += views
    return found


def functional_overload(target):
    """The out-of-place twin of an in-place overload, or ``None``."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None:
        return None
    wanted, names = _types(target), [target._overloadname, *packet.overloads()]
    found = [getattr(packet, overload, None) for overload in names]
    plain = [twin for twin in found if twin is not None and not twin._schema.is_mutable]
    return next((twin for twin in plain if _types(twin) == wanted), None)


def _types(target) -> list[str]:
    """Types of an overload's arguments: ``pow_.Scalar`` is ``pow.Tensor_Scalar``, whatever they are called."""
    return [str(argument.type) for argument in target._schema.arguments]


def out_of_place(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Turns an in-place node into one that returns the new value; returns the node of that value, in the old dtype.

    ``None`` if there is no such form.
    """
    written, target = node.args[0], node.target
    if target is aten.zero_.default:
        node.target = aten.zeros_like.default
    elif target is aten.fill_.Scalar:
        node.target = aten.full_like.default
    elif target in (aten.copy_.default, aten.fill_.Tensor):
        node.target, node.args = aten.expand_as.default, (node.args[1], written)
    else:
        node.target = functional_overload(target)
        if node.target is None:
            node.target = target
            return None
    return _in_dtype_of(gm, written, node)


def _in_dtype_of(gm: fx.GraphModule, written: fx.Node, node: fx.Node) -> fx.Node:
    """``node``, converted if type promotion would give it another dtype than the tensor it once wrote to."""
    dtype = written.meta["val"].dtype
    others = [arg.meta.get("val") for arg in node.all_input_nodes if arg is not written]
    if not any(isinstance(v, Tensor) and v.dtype != dtype and v.dtype.is_floating_point for v in others) and (
        node.target is not aten.expand_as.default or node.args[0].meta["val"].dtype == dtype
    ):
        return node
    with gm.graph.inserting_after(node):
        converted = gm.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    converted.meta = dict(node.meta)
    node.replace_all_uses_with(converted, delete_user_cb=lambda user: user is not converted)
    return converted


def remove_in_place(gm: fx.GraphModule) -> int:
    """Rewrites every in-place op on an intermediate value; returns how many.

    Raises:
        CaptureError: if the written tensor shares memory with another (a view), or the op has no out-of-place twin.
    """
    rewrites = 0
    for node in [node for node in gm.graph.nodes if is_in_place(node)]:
        _by_one_name(node.args[0])
    for node in list(gm.graph.nodes):
        if node.target in _DROPOUTS and (not node.args[2] or node.args[1] == 0):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            continue
        if not is_in_place(node) or root(node.args[0]).op == "placeholder":
            continue
        refuse_random(node)
        if node.target is aten.detach_.default:
            node.target = aten.detach.default
            continue
        if written_anew(gm, node) is None:
            raise CaptureError(
                f"in-place {node.target} on a tensor that shares memory with another, at {node_line(node)}. "
                "Write the out-of-place form (for example x = x + y instead of x[...] += y)."
            )
        rewrites += 1
    _copy_before_writes(gm)
    gm.graph.lint()
    return rewrites


def _by_one_name(written: fx.Node) -> None:
    """What is written is read as itself, not as what a conversion gives that has nothing to convert."""
    while converted(written) is False:
        written = written.args[0]
    for user in list(written.users):
        if user.args[:1] == (written,) and converted(user) is False:
            user.replace_all_uses_with(written)
            user.graph.erase_node(user)
            _by_one_name(written)
            return


def written_anew(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """An in-place node on an intermediate value returns the new one, for all that reads it later; the node of that.

    ``None`` if the written tensor shares memory with another, or the op has no out-of-place twin.
    """
    written, later, result = node.args[0], nodes_after(gm, node), None
    if isinstance(node.meta.get("val"), Tensor) and not is_view(written) and not outlived_views(written, later):
        result = out_of_place(gm, node)
    if node.target is aten.expand_as.default and same_shape(*(arg.meta["val"].shape for arg in node.args)):
        node.target, node.args = aten.clone.default, node.args[:1]  # no view: it may be written again
    if result is not None:
        written.replace_all_uses_with(result, delete_user_cb=lambda user: user in later)
    return result


def _copy_before_writes(gm: fx.GraphModule) -> None:
    """What reads an input of the graph before it is written reads a copy: passes may then move it behind the write.

    Before                                   After
        h = aten.linear(x, ema)                  c = aten.clone(ema)
        aten.mul_(ema, 0.9)                      h = aten.linear(x, c)
                                                 aten.mul_(ema, 0.9)

    Views that are read after the write see the new values, and stay; what reads them before reads a copy of them.
    """
    nodes = list(gm.graph.nodes)
    place = {node: position for position, node in enumerate(nodes)}
    start = next(node for node in nodes if node.op != "placeholder")
    writes: dict[fx.Node, list[fx.Node]] = {}
    copies = set()
    for position, write in enumerate(nodes):
        written = root(write.args[0]) if is_in_place(write) else None
        if written is None or written.op != "placeholder":
            continue
        later, before = {write, *nodes[position + 1 :]}, writes.setdefault(written, [])
        for alias, readers in _read_before((written, *before), later, copies):
            behind = max([alias, *before], key=place.__getitem__)
            first = behind.op == "placeholder"
            with gm.graph.inserting_before(start) if first else gm.graph.inserting_after(behind):
                copied = gm.graph.call_function(aten.clone.default, (alias,))
            copied.meta = dict(alias.meta)
            copies.add(copied)
            for reader in readers:
                reader.replace_input_with(alias, copied)
        before.append(write)


def _read_before(aliases: tuple[fx.Node, ...], later: set[fx.Node], copies: set[fx.Node]):
    """Yields tensors that share the memory of some, and what reads them in front of the nodes ``later`` alone."""
    waiting = list(aliases)
    while waiting:
        alias = waiting.pop()
        users = [user for user in alias.users if user not in later | copies and not is_in_place(user)]
        views = users if not isinstance(alias.meta.get("val"), Tensor) else [u for u in users if _lives_on(u, later)]
        readers = [user for user in users if user not in views]
        waiting += views
        if readers:
            yield alias, readers


def _lives_on(view: fx.Node, later: set[fx.Node]) -> bool:
    """Whether a view, or a view of it, is read by one of the nodes, or written through."""
    if not is_view(view):
        return False
    written = any(is_in_place(user) and user.args[0] is view for user in view.users)
    return written or bool(later & view.users.keys()) or any(_lives_on(user, later) for user in view.users)


def root(node: fx.Node) -> fx.Node:
    """The value whose memory a chain of views looks at."""
    while node.op == "call_function":
        if node.target is operator.getitem:
            node = node.args[0]
            continue
        if not isinstance(node.target, OpOverload) or converted(node):
            return node
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not node.all_input_nodes:
            return node
        node = node.all_input_nodes[0]
    return node


def nodes_after(gm: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    """Every node behind this one."""
    nodes = list(gm.graph.nodes)
    return set(nodes[nodes.index(node) + 1 :])
