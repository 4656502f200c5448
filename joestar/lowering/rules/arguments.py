"""Arguments of a node by the names of the op's schema."""

from torch import fx

from joestar.lowering.sizes import expression


def position(node: fx.Node, name: str) -> int | None:
    """Index of an argument, or ``None`` if the op has none of that name."""
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index(name) if name in names else None


def argument(node: fx.Node, name: str):
    """Value of an argument, its default if it was not given, ``None`` if the op has none of that name."""
    index = position(node, name)
    if index is None:
        return None
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, node.target._schema.arguments[index].default_value)


def set_argument(node: fx.Node, name: str, value) -> None:
    """Sets an argument, filling positions up to it with defaults."""
    names = [a.name for a in node.target._schema.arguments]
    if names.index(name) >= len(node.args) and node.target._schema.arguments[names.index(name)].kwarg_only:
        node.update_kwarg(name, value)
        return
    last = max(names.index(name) + 1, len(node.args))
    node.args = tuple(value if n == name else argument(node, n) for n in names[:last])


def dims(node: fx.Node, rank: int) -> list[int]:
    """The argument ``dim`` or ``dims`` counted from the front; every dimension if it names none."""
    given = argument(node, "dim" if position(node, "dim") is not None else "dims")
    if given is None or given == []:
        return list(range(rank))
    return [dim % rank for dim in (given if isinstance(given, (list, tuple)) else [given])] if rank else []


def padded_among(node: fx.Node) -> list[int]:
    """Those of ``dims`` that range over padded rows of the first argument."""
    value = node.args[0].meta["val"]
    return [dim for dim in dims(node, value.dim()) if expression(value.shape[dim]) is not None]
