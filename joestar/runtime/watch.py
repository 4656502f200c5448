"""What a captured program may have read: everything that is reached from the model, the sampler and the loss.

``Watched`` walks over modules, plain objects, containers, functions with what they close over, and the globals that
their code names, and notes a fact for each: the value of what is plain, the identity of what is not, where a tensor's
memory is. Of modules, classes and functions that code names (``config.width``, ``Config.width``) what it reads of them
counts. An attribute that no code names that a program can have called (from ``forward``, ``sample`` or the loss) cannot
have been read and is left out, so that ``model.best = 0.9`` in a script, or in a method of its own, changes nothing.
"""

import collections
import dataclasses
import functools
import inspect
import operator
import os
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from joestar.graph_api.computation import Computation
from joestar.lowering.origin import is_own
from joestar.lowering.reads import PLAIN
from joestar.runtime import code_names as code
from joestar.runtime.code_names import Space, function_of, is_foreign, is_space
from joestar.runtime.facts import Cell, Entries, Functions, Places, Same, Slots, TensorFacts, same
from joestar.runtime.process_settings import settings_of

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_MEMBERS = ("_parameters", "_buffers", "_modules")
_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_use_segment_matmul_heuristic_output"}
"""What PyTorch keeps in every module, and PyG's layers over types in themselves from the first call on; ``training``
is followed elsewhere (``TrainingModes``)."""
_NOTED = 5000
"""Facts after which plain objects are no longer looked into."""
_SMALL = 4096
"""Bytes of a NumPy array up to which its content counts."""


class Watched:
    """The facts about some roots, and what tells quickly that none of them can have changed.

    Args:
        roots: name in messages -> model, sampler, loss.

    Attributes:
        facts: path -> plain value, tuple of such, ``Same`` or ``TensorFacts``.
        unsure: paths of what may be read under any name, as code computes names (``getattr``).
        branches: lines, as ``file:line in function``, that ask whether they are compiled, and what they ask.
    """

    def __init__(self, roots: Mapping[str, object]):
        self.facts: dict[str, object] = {}
        self.branches: list[tuple[str, str]] = []
        self.unsure: list[str] = []
        self._seen: dict[int, str] = {}
        self._keep: list = []  # ids of what is gone may be given away again
        self._dicts: list[Mapping] = []
        self._empty: list[Mapping] = []
        self._lists: list[tuple[list | collections.deque, tuple]] = []
        self._functions: list[types.FunctionType] = []
        self._sets: list[tuple[set, frozenset]] = []
        self._types: list[tuple[object, type]] = []
        self._tensors: list[torch.Tensor] = []
        self._scopes: list[tuple[dict | Cell | Slots | Space, str, object]] = []
        self._methods: set[tuple[type, str]] = set()
        self._noted: set[tuple[int, object]] = set()
        self._whole: dict[int, frozenset[str] | None] = {}  # what is noticed if an object gets it; ``None``: anything
        self._variables: dict[str, str | None] = {}
        self._settings: dict[str, tuple[Callable[[], object], object]] = {}
        for name, root in roots.items():
            self._note(name, root, frozenset())
        for when in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
            self._note_hooks(f"torch.nn's global {when}", getattr(nn.modules.module, f"_global_{when}"))
        del self._seen
        self._entries = Entries(self._dicts)
        self._places = Places(self._tensors)
        self._code = Functions(self._functions)

    def untouched(self) -> bool:
        """Whether everything is the very same object; if not, facts may still agree.

        It is asked in every step: some 0.02 ms.
        """
        return (
            not any(self._empty)
            and self._entries.same()
            and self._places.same()
            and all(len(now) == len(was) and all(map(operator.is_, now, was)) for now, was in self._lists)
            and all(type(thing) is kind for thing, kind in self._types)
            and all(now == was for now, was in self._sets)
            and self._code.same()
            and all(scope.get(name, _MISSING) is value for scope, name, value in self._scopes)
            and all(os.environ.get(name) == value for name, value in self._variables.items())
            and all(same(now(), was) for now, was in self._settings.values())
        )

    def covers(self, owner, key, absent: bool = False) -> bool:
        """Whether what an object has under a name, position or key (``len``: how much it has) is among the facts.

        Args:
            absent: whether it is also to be noticed if something is there that was not, or that hides what is.
        """
        if absent:
            names = self._whole.get(id(owner), frozenset())
            return names is None or key in names or (key in (type, len) and id(owner) in self._whole)
        held = vars(owner) if isinstance(owner, types.ModuleType) else owner
        return (id(held), key) in self._noted

    # --- the walk ---

    def _note(self, path: str, value, names: frozenset[str] | None) -> None:
        """Notes a value and what is behind it.

        Args:
            names: what code that can reach the value names; ``None`` if it may read anything.
        """
        if isinstance(value, PLAIN):
            self.facts[path] = value
        elif isinstance(value, torch.Tensor):
            self._note_tensor(path, value)
        elif id(value) in self._seen:
            if self._seen[id(value)] != path:
                self.facts[path] = ("the same as", self._seen[id(value)])
        else:
            self._seen[id(value)] = path
            self._keep.append(value)
            self._note_thing(path, value, names)

    def _note_thing(self, path: str, value, names: frozenset[str] | None) -> None:
        if isinstance(value, nn.Module):
            self._note_module(path, value, names)
        elif isinstance(value, (list, tuple, collections.deque, set, frozenset, Mapping)):
            self._note_container(path, value, names)
        elif isinstance(value, functools.partial):
            self._remember(value.keywords)
            self._note_container(path, {"func": value.func, "args": value.args, **value.keywords}, names)
        elif isinstance(value, types.FunctionType):
            self._note_function(path, value)
        elif isinstance(value, types.MethodType):
            names = None if names is None else names | code.own_names(value.__func__)
            self._note_container(path, [value.__func__, value.__self__], names)
        elif isinstance(value, np.ndarray):
            content = value.tobytes() if value.nbytes <= _SMALL else b""
            self.facts[path] = (Same(value), value.shape, str(value.dtype), content)
        elif is_space(value):
            self.facts[path] = Same(value)
            for name in sorted(vars(value) if names is None else names):
                self._note_read(path, value, (name,), names)
        elif isinstance(value, (type, Computation)) or not _is_open(value) or len(self.facts) > _NOTED:
            self.facts[path] = Same(value)
        else:
            self._note_attributes(path, value, names, _attributes(value))

    def _note_tensor(self, path: str, tensor: torch.Tensor) -> None:
        self.facts[path] = TensorFacts.of(tensor)
        self._keep.append(tensor)
        if self.facts[path][1]:
            self._tensors.append(tensor)

    def _note_module(self, path: str, module: nn.Module, names: frozenset[str] | None) -> None:
        own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
        hooks = _hook_names(module)
        names = None if names is None or hooks is None else names | hooks
        names = self._note_attributes(path, module, names, own)
        if f"{path}.".startswith("model."):  # programs follow it; elsewhere, as of a teacher, it counts as it was
            self._noted.add((id(module), "training"))
        for kind in _MEMBERS:
            members = vars(module)[kind]
            self._remember(members)
            self._whole[id(members)] = None
            self._noted.add((id(members), len))
            for name, member in members.items():
                self._noted |= {(id(members), name), (id(module), name)}
                self._note(f"{path}.{name}", member, names if kind == "_modules" else frozenset())
        for kind in HOOKS:
            self._note_hooks(f"{path}.{kind}", vars(module).get(kind, {}))

    def _note_hooks(self, path: str, hooks: Mapping) -> None:
        self._remember(hooks)
        for position, hook in enumerate(hooks.values()):
            self.facts[f"{path}[{position}]"] = Same(hook) if callable(hook) else hook

    def _note_attributes(self, path: str, owner, names: frozenset[str] | None, values: dict) -> frozenset[str] | None:
        """Notes type and attributes; returns what names code knows that reaches them."""
        self.facts[f"type({path})"] = Same(type(owner))
        self._types.append((owner, type(owner)))
        names = code.reached(type(owner), names)
        self.unsure += [path] * (names is None)
        self._whole[id(owner)] = names
        self._note_class(type(owner), names)
        if hasattr(owner, "__dict__"):
            self._remember(vars(owner))
        slots = {name: values.get(name, _MISSING) for name in _slots(owner)}
        self._scopes += [(Slots(owner), name, value) for name, value in slots.items()]
        for name in sorted(values):
            if (names is None or name in names) and not _is_kept(type(owner), name):
                self._noted |= {(id(owner), name), (id(getattr(owner, "__dict__", owner)), name)}
                self._note(f"{path}.{name}", values[name], names)
        return names

    def _note_container(self, path: str, value, names: frozenset[str] | None) -> None:
        self._noted.add((id(value), len))
        self._whole[id(value)] = None
        if isinstance(value, (set, frozenset)):
            self.facts[path] = ("set", frozenset(v if isinstance(v, PLAIN) else id(v) for v in value))
            self._keep.extend(value)
            self._sets.append((value, frozenset(value)))
        elif isinstance(value, Mapping):
            self.facts[f"type({path})"] = Same(type(value))
            self._remember(value)
            for key, entry in value.items():
                self._noted.add((id(value), key))
                self._note(f"{path}[{key!r}]", entry, names)
        else:
            if not isinstance(value, tuple):
                self._lists.append((value, tuple(value)))
            self._noted |= {(id(value), position) for position in range(len(value))}
            if all(isinstance(entry, PLAIN) for entry in value):
                self.facts[path] = tuple(value)
                return
            self.facts[f"len({path})"] = len(value)
            for position, entry in enumerate(value):
                self._note(f"{path}[{position}]", entry, names)

    def _remember(self, entries: Mapping) -> None:
        (self._dicts if entries else self._empty).append(entries)

    # --- code ---

    def _note_class(self, kind: type, names: frozenset[str] | None) -> None:
        """What code can read of methods and constants of classes that are the user's own."""
        for base in kind.__mro__:
            if is_foreign(base):
                continue
            self._remember(vars(base))
            for name, value in sorted(vars(base).items()):
                if (base, name) in self._methods or not (names is None or name in names):
                    continue
                self._methods.add((base, name))
                function = function_of(value)
                if function is not None:
                    self._note_function(f"{base.__qualname__}.{name}", function)
                elif not (name.startswith("__") and name.endswith("__")):
                    self._noted.add((id(base), name))
                    self._note(f"{base.__qualname__}.{name}", value, names)

    def _note_function(self, path: str, function: types.FunctionType) -> None:
        """A function, what it closes over, its defaults, and the globals that it names."""
        self.facts[path] = Same(function)
        self._keep.append(function)
        if is_foreign(function):
            return
        self.facts[f"{path}'s code"] = Same(function.__code__)
        self._functions.append(function)
        if is_own(function.__code__.co_filename):
            self.branches += code.branches_of(function)
        names = code.names_of(function)
        names = None if code.DYNAMIC & names else names
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {name: cell for name, cell in cells.items() if name != "__class__" and code.filled(cell)}
        for name, cell in cells.items():
            self._scopes.append((Cell(cell), name, cell.cell_contents))
            self._noted.add((id(cell), "cell_contents"))
            if not isinstance(cell.cell_contents, (types.ModuleType, type)):
                self._note(f"{path}'s {name}", cell.cell_contents, names)
        self._noted |= {(id(function.__defaults__), len), (id(function.__kwdefaults__), len)}
        for name, value in (function.__kwdefaults__ or {}).items():
            self._noted.add((id(function), name))
            self._scopes.append((function.__kwdefaults__, name, value))
            self._note(f"{path}'s default of {name}", value, names)
        for position, value in enumerate(function.__defaults__ or ()):
            self._noted.add((id(function), position))
            self._note(f"{path}'s default {position}", value, names)
        for name, *read in code.reads_of(function.__code__):
            where, scope = f"{path}'s {name}", cells
            if name not in cells:
                where, scope = f"{function.__module__}.{name}", function.__globals__
            if name not in scope:
                continue
            value = cells[name].cell_contents if scope is cells else scope[name]
            if is_space(value) and read:
                self._note_read(where, value, read, names)
            if scope is not cells and not isinstance(value, (types.ModuleType, type)):
                self._scopes.append((scope, name, value))
                self._noted.add((id(scope), name))
                self._note(where, value, names)
        inner = {name: cell.cell_contents for name, cell in cells.items()}
        scope = collections.ChainMap(inner, function.__globals__)
        for name in code.variables_of(function.__code__, scope):
            self._variables[name] = self.facts[f"os.environ[{name!r}]"] = os.environ.get(name)
        for name, now in settings_of(function.__code__, scope):
            self._settings[f"{path}'s {name}"] = now, now()
            self.facts[f"{path}'s {name}"] = self._settings[f"{path}'s {name}"][1]
        for name in code.imports_of(function.__code__):
            if is_space(module := sys.modules.get(name)):
                self._note(f"{path}'s import {name}", module, names)

    def _note_read(self, path: str, space, read: Sequence[str], names: frozenset[str] | None) -> None:
        """What is read of a module, class or function: ``width`` of ``config.width``, ``model.width`` further in."""
        name, *further = read
        value = Space(space).get(name, _MISSING)
        if value is _MISSING or (name.startswith("__") and name.endswith("__")):
            return
        function = None if isinstance(value, type) else function_of(value)
        self._scopes.append((Space(space), name, value))
        if is_space(value) and further:
            self._note_read(f"{path}.{name}", value, further, names)
        elif function is not None:
            self._note_function(f"{path}.{name}", function)
        elif not isinstance(value, (types.ModuleType, type)):
            self._noted.add((id(vars(space) if isinstance(space, types.ModuleType) else space), name))
            self._note(f"{path}.{name}", value, names)


def _hook_names(module: nn.Module) -> frozenset[str] | None:
    """What the hooks of a module name: they are given the module."""
    hooks = [hook for kind in HOOKS for hook in vars(module).get(kind, {}).values() if callable(hook)]
    hooks = [getattr(hook, "func", hook) if isinstance(hook, functools.partial) else hook for hook in hooks]
    functions = [function_of(getattr(hook, "__func__", hook)) for hook in hooks]
    functions += [function_of(type(hook).__call__) for hook in hooks]
    found = frozenset().union(*(code.own_names(function) for function in functions if function is not None))
    return None if code.DYNAMIC & found else found


_MISSING = object()


def _is_open(value) -> bool:
    """Whether an object's attributes are settings: it is the user's, a dataclass or a namespace."""
    if isinstance(value, (Namespace, types.SimpleNamespace)) or dataclasses.is_dataclass(value):
        return True
    return not is_foreign(type(value)) and (hasattr(value, "__dict__") or hasattr(value, "__slots__"))


def _is_kept(kind: type, name: str) -> bool:
    """Whether objects have it from when it is first read on: who reads it tells (``reads``)."""
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _attributes(value) -> dict:
    found = dict(getattr(value, "__dict__", {}))
    return found | {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}


def _slots(value) -> list[str]:
    found = []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return [name for name in found if name not in ("__dict__", "__weakref__")]
