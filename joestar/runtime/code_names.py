"""Which names the code of functions and classes reads."""

import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator

from torch import nn

DYNAMIC = {"getattr", "hasattr", "vars", "__dict__", "attrgetter"}
"""Names in whose presence any attribute may be read."""
_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def filled(cell: types.CellType) -> bool:
    """Whether a closure's cell holds something yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def function_of(value) -> types.FunctionType | None:
    """The function behind an entry of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of the globals that a function reads, in order."""
    read = {step.argval for inner in _codes(code) for step in dis.get_instructions(inner) if step.opname in _READS}
    return tuple(sorted(read))


def names_of(function: types.FunctionType) -> frozenset[str]:
    """Every name in a function's code and in that of the functions that it names, as far as they are not foreign."""
    found, todo, done = set(), [function], set()
    while todo:
        function = todo.pop()
        if function in done or is_foreign(function):
            continue
        done.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        found |= names
        held = [function.__globals__.get(name) for name in names]
        held += [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
        todo += [value for value in held if isinstance(value, types.FunctionType)]
    return frozenset(found)


_NAMES: weakref.WeakKeyDictionary[type, frozenset[str] | None] = weakref.WeakKeyDictionary()


def names_in(kind: type) -> frozenset[str] | None:
    """Names in the methods of a class and its bases, ``__init__`` left out; ``None`` if they may read anything."""
    if kind not in _NAMES:
        bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
        entries = [value for base in bases for name, value in vars(base).items() if name != "__init__"]
        functions = [function for function in map(function_of, entries) if function is not None]
        names = frozenset().union(*map(own_names, functions))
        _NAMES[kind] = None if DYNAMIC & names else names
    return _NAMES[kind]


def own_names(function: types.FunctionType) -> frozenset[str]:
    """Names in a function's code, of the user's also in that of the functions that it names."""
    if is_foreign(function):  # a layer of PyTorch: its own names are enough
        return frozenset(name for code in _codes(function.__code__) for name in code.co_names) - DYNAMIC
    return names_of(function)


def is_foreign(thing) -> bool:
    """Whether a class or function is Python's, PyTorch's or of an installed package, not the user's."""
    module = getattr(thing, "__module__", None) or ""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return True
    if root in ("torch", "numpy", "builtins"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file and root != "joestar"
