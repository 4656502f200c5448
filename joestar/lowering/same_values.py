"""Which values of a graph that runs are the same: those of the same operation on the same values.

    a = y >= 0;  p = out[a];  b = y >= 0;  q = y[b]     a and b pick the same rows
    y.mul_(2);   c = y >= 0                             c may pick others: what it reads was written in between

Only what masks are made of is compared; of everything else every result is one of its own.
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, fx

from joestar.torch_private import OpOverload

_PURE = frozenset(
    [
        "ge", "gt", "le", "lt", "eq", "ne", "__ge__", "__gt__", "__le__", "__lt__", "__eq__", "__ne__",
        "greater", "greater_equal", "less", "less_equal", "not_equal",
        "and_", "or_", "xor", "invert", "__and__", "__or__", "__xor__", "__invert__", "logical_and", "logical_or",
        "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
        "isnan", "isinf", "isfinite", "isin", "abs", "neg", "add", "sub", "mul", "mod", "remainder", "floordiv",
        "getitem", "to", "bool", "int", "long", "float", "double", "view", "reshape", "flatten", "squeeze", "unsqueeze",
        "select", "slice", "amax", "amin", "argmax", "max", "min", "sum", "any", "all", "softmax", "sigmoid", "detach",
    ]
)  # fmt: skip
"""Functions and methods without effects, by name; in place they have other names."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, type(Ellipsis))


class SameValues:
    """Names of values, equal where these are, of a run in which every node is taken in when its value is made."""

    def __init__(self):
        self._names: dict[fx.Node, Hashable] = {}
        self._versions: dict[fx.Node, int | None] = {}
        self._numbers: dict[Hashable, int] = {}
        self._blind = False

    def take_in(self, node: fx.Node, value, values: Mapping[fx.Node, object]) -> None:
        """A node that has run; ``values`` are those of its arguments."""
        name: Hashable = node
        target = name_of(node.target)
        if target == "_get_data_attr":  # writes to x.data leave no trace at x
            self._blind = True
        if node.op in ("call_function", "call_method") and target in _PURE:
            try:
                parts = self._form((node.args, tuple(sorted(node.kwargs.items()))), values)
                name = self._numbers.setdefault((node.op, node.target, parts), len(self._numbers))
            except TypeError:
                pass
        self._names[node], self._versions[node] = name, _version(value)

    def name(self, node: fx.Node, value) -> Hashable:
        """What a node's value is called now."""
        version = _version(value)
        if self._blind or version != self._versions[node]:
            return node, version
        return self._names[node]

    def _form(self, arg, values: Mapping[fx.Node, object]) -> Hashable:
        """Arguments as something that can be compared: 1, 1.0 and True are three.

        Raises:
            TypeError: for what cannot be.
        """
        if isinstance(arg, fx.Node):
            return self.name(arg, values[arg])
        if isinstance(arg, (tuple, list)):
            return tuple(self._form(part, values) for part in arg)
        if isinstance(arg, slice):
            return "slice", self._form((arg.start, arg.stop, arg.step), values)
        if isinstance(arg, _PLAIN):
            return type(arg), arg
        raise TypeError(f"{arg!r} is none of the constants that are compared.")


def name_of(target) -> str:
    """The name of an operation, without its overload."""
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _version(value) -> int | None:
    return value._version if isinstance(value, Tensor) else None
