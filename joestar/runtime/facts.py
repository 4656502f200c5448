"""Facts about what a captured program may have read, and places that tell quickly whether they still hold."""

import gc
import math
import types
from collections.abc import Mapping

import torch
from torch import nn

from joestar import host
from joestar.runtime.code_names import filled


class Same:
    """Something that must stay the same object."""

    def __init__(self, thing):
        self.thing = thing

    def __repr__(self) -> str:
        named = getattr(self.thing, "__qualname__", None) or getattr(self.thing, "__name__", None)
        return named or getattr(self.thing, "co_qualname", None) or repr(self.thing)


class TensorFacts(tuple):
    """(identity, address, shape, dtype, device, whether it requires gradients) of a tensor.

    Of a parameter the last is ``None``: programs follow it (``TrainingModes``).
    """

    @staticmethod
    def of(tensor: torch.Tensor) -> "TensorFacts":
        """The facts of a tensor as it is now."""
        needs_grad = None if isinstance(tensor, nn.Parameter) else tensor.requires_grad
        where = (id(tensor), host.address(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, needs_grad)
        return TensorFacts(where)


def same(before, after) -> bool:
    """Whether two facts say the same: NaN is itself, ``True`` is not 1."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, Same):
        return before.thing is after.thing
    if type(before) is tuple:
        return len(before) == len(after) and all(map(same, before, after))
    if isinstance(before, float) and math.isnan(before):
        return math.isnan(after)
    return before == after


class Entries:
    """What some mappings hold: the same keys in the same order, the same objects under them."""

    def __init__(self, mappings: list[Mapping]):
        self._mappings = list(map(_behind, mappings))
        self._sizes = list(map(len, mappings))
        self._keys = [key for mapping in mappings for key in mapping]
        self._values = [value for mapping in mappings for value in mapping.values()]

    def same(self) -> bool:
        """Whether nothing was put in, taken out or moved."""
        return host.same_entries(self._mappings, self._sizes, self._keys, self._values)


def _behind(mapping: Mapping) -> Mapping:
    """The dictionary of a class behind the proxy that ``vars`` gives: it is compared ten times as fast."""
    held = gc.get_referents(mapping) if isinstance(mapping, types.MappingProxyType) else []
    return held[0] if len(held) == 1 and type(held[0]) is dict else mapping


class Places:
    """Where some tensors are, and in which form."""

    def __init__(self, tensors: list[torch.Tensor]):
        self._tensors = tensors
        self._addresses = [host.address(tensor) for tensor in tensors]
        self._known = self._now()

    def _now(self) -> list[tuple]:
        return [(t.requires_grad, t.shape, t.dtype) for t in self._tensors]

    def same(self) -> bool:
        """Whether each has the memory, the shape and the dtype that it had, and requires gradients as it did."""
        return host.same_addresses(self._tensors, self._addresses) and self._now() == self._known


class Functions:
    """Code and defaults of some functions, which may be replaced within them, as autoreload does."""

    def __init__(self, functions: list[types.FunctionType]):
        self._known = functions, *self._now(functions)

    @staticmethod
    def _now(functions: list[types.FunctionType]) -> tuple[list, list, list]:
        names = "__code__", "__defaults__", "__kwdefaults__"
        return tuple([getattr(function, name) for function in functions] for name in names)

    def same(self) -> bool:
        """Whether each has what it had."""
        return host.same_functions(*self._known)


class Slots:
    """An object's slots, as if they were a scope."""

    def __init__(self, owner):
        self.owner = owner

    def get(self, name: str, default):
        """The content of a slot."""
        return getattr(self.owner, name, default)


class Cell:
    """What a closure holds, as if it were a scope."""

    def __init__(self, cell: types.CellType):
        self.cell = cell

    def get(self, name: str, default):
        """The content of the cell."""
        return self.cell.cell_contents if filled(self.cell) else default
