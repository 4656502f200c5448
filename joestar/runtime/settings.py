"""Settings of model, sampler and loss as texts that processes can compare: whatever may be traced into a program."""

import enum
import functools
import re
import types
from collections.abc import Mapping

import numpy as np
import torch

from joestar.distributed.facts import SAMPLE, digest, plain, text_digest
from joestar.graph_api import Graph
from joestar.runtime.code_names import DYNAMIC, function_of, is_foreign, own_names
from joestar.runtime.watch import HOOKS, Same, Watched

_ENTRIES = frozenset({"forward", "sample", "__call__"})
"""Methods that a program is traced from."""
_OWN_DEVICE = re.compile(r"cuda:\d+")


class Settings(Watched):
    """What ``Watched`` finds, without what differs between processes that do the same: places, identities, devices.

    Tensors count by shape, dtype and values, but parameters and buffers of modules without values (``model``: they come
    from rank 0). The graph is compared elsewhere. Methods count that are called from ``forward``, ``sample`` or the
    loss, and attributes that those name: a trainer's writer may be on rank 0 alone.
    """

    def __init__(self, model: torch.nn.Module, others: dict):
        self._from_first = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._methods: set[tuple[type, str]] = set()
        super().__init__({"model": model, **others})

    def texts(self) -> dict[str, str]:
        """Path -> text, the same in every process that runs the same script."""
        return {path: _text(fact) for path, fact in self.facts.items()}

    def _note_tensor(self, path: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._from_first:
            self.facts[path] = f"{tensor.dtype} {list(tensor.shape)} #{digest(tensor, SAMPLE)}"

    def _note_thing(self, path: str, value, names: frozenset[str] | None) -> None:
        if isinstance(value, Graph):
            return
        if isinstance(value, types.MethodType) and names is not None:
            names |= own_names(value.__func__)
        if isinstance(value, (set, frozenset)):
            self.facts[path] = ("set", *sorted(plain(entry) for entry in value))
        elif isinstance(value, np.ndarray):
            self.facts[path] = f"{value.dtype} {list(value.shape)} #{text_digest(value.tobytes().hex())}"
        else:
            super()._note_thing(path, value, names)

    def _note_module(self, path: str, module: torch.nn.Module, names: frozenset[str] | None) -> None:
        known = _hook_names(module)
        super()._note_module(path, module, None if names is None or known is None else names | known)

    def _note_hooks(self, path: str, hooks: Mapping) -> None:
        for position, hook in enumerate(hooks.values()):
            self._note(f"{path}[{position}]", hook, frozenset())

    def _names_in(self, kind: type, names: frozenset[str] | None) -> frozenset[str] | None:
        """Names in the methods that are called from those that programs are traced from, or that ``names`` holds."""
        if names is None:
            return None
        known, methods = _ENTRIES | names, _methods(kind)
        while todo := [name for name in methods if name in known]:
            known = known.union(*(own_names(function) for name in todo for function in methods.pop(name)))
        return None if DYNAMIC & known else known

    def _note_class(self, kind: type, names: frozenset[str] | None) -> None:
        self._classes.difference_update(kind.__mro__)  # another subclass may call other methods of a base
        super()._note_class(kind, names)

    def _is_part(self, base: type, name: str, names: frozenset[str] | None) -> bool:
        if (base, name) in self._methods or not (names is None or name in names):
            return False
        self._methods.add((base, name))
        return True


def _methods(kind: type) -> dict[str, list[types.FunctionType]]:
    """Name -> the methods of a class and its bases, overridden ones, too: ``super()`` calls them."""
    found: dict[str, list[types.FunctionType]] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base not in (torch.nn.Module, object) else ():
            if (function := function_of(value)) is not None:
                found.setdefault(name, []).append(function)
    return found


def _hook_names(module: torch.nn.Module) -> frozenset[str] | None:
    """What the hooks of a module name: they are given the module."""
    hooks = [hook for kind in HOOKS for hook in vars(module).get(kind, {}).values() if callable(hook)]
    hooks = [getattr(hook, "func", hook) if isinstance(hook, functools.partial) else hook for hook in hooks]
    functions = [function_of(getattr(hook, "__func__", hook)) for hook in hooks]
    functions += [function_of(type(hook).__call__) for hook in hooks]
    found = frozenset().union(*(own_names(function) for function in functions if function is not None))
    return None if DYNAMIC & found else found


def _text(fact) -> str:
    if isinstance(fact, tuple):
        return plain(f"({', '.join(map(_text, fact))})")[1:-1]
    if isinstance(fact, Same):
        return _name(fact.thing)
    if isinstance(fact, (str, torch.device)):
        return _OWN_DEVICE.sub("cuda", str(fact))
    return str(fact) if isinstance(fact, enum.Enum) else plain(fact)


def _name(thing) -> str:
    """Of a class, a function or an object; with a digest of its code where that is the user's."""
    function = thing if isinstance(thing, types.FunctionType) else None
    if function is not None and not is_foreign(function):
        return f"{function.__qualname__} #{text_digest(_code(function.__code__))}"
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__


def _code(code: types.CodeType) -> str:
    """A function's instructions and constants."""
    inner = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts if not _unordered(c)]
    return f"{code.co_code.hex()} {code.co_names} {inner}"


def _unordered(constant) -> bool:
    return isinstance(constant, frozenset)
