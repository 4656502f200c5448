"""Which names the code of functions and classes reads, and which methods of a class it can call."""

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping

from torch import nn

from joestar.lowering.origin import is_installed

DYNAMIC = {"getattr", "hasattr", "vars", "__dict__", "attrgetter"}
"""Names in whose presence any attribute may be read."""
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_OF_WHAT_WAS_READ = ("LOAD_ATTR", "LOAD_METHOD")
_BRANCHES = {
    "is_compiling": "compiled", "is_dynamo_compiling": "compiled", "is_grad_enabled": "gradients",
    "is_inference_mode_enabled": "gradients",
}  # fmt: skip
"""Functions of PyTorch that say whether code is compiled, or whether gradients are computed."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
_ENTRIES = frozenset({"forward", "sample"})
"""Methods that a program is traced from, beside operators (``__call__``, ``__getitem__``)."""
_OURS = ("torch", "numpy", "joestar")
_NOT_TRACED = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__del__", "__setattr__"})


def filled(cell: types.CellType) -> bool:
    """Whether a closure's cell holds something yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def function_of(value) -> types.FunctionType | None:
    """The function behind an entry of a class, but for cached ones: these are asked for what they hold."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value, stop=is_cached) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def is_cached(value) -> bool:
    """Whether it is what ``functools.lru_cache`` or ``functools.cache`` makes of a function."""
    return hasattr(value, "cache_parameters")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Globals and variables of enclosing functions that a function reads, with what it reads of them, in order.

    ``config.model.width`` gives ``("config", "model", "width")``.
    """
    found = set()
    for inner in _codes(code):
        chain: list[str] = []
        for step in dis.get_instructions(inner):
            if chain and step.opname in _OF_WHAT_WAS_READ:
                chain.append(step.argval)
                continue
            if chain:
                found.add(tuple(chain))
            chain = [step.argval] if step.opname in _READS else []
        if chain:
            found.add(tuple(chain))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> tuple[str, ...]:
    """Names of the modules that a function imports itself."""
    steps = (step for inner in _codes(code) for step in dis.get_instructions(inner))
    return tuple(sorted({step.argval for step in steps if step.opname == "IMPORT_NAME" and step.argval}))


def variables_of(code: types.CodeType, scope: Mapping) -> set[str]:
    """Names that may be variables of the environment which a function reads; none if it reads no environment.

    Args:
        scope: what names of the function stand for.
    """
    codes = list(_codes(code))
    if not _ENVIRONMENT & {name for inner in codes for name in inner.co_names}:
        return set()
    found = [constant for inner in codes for constant in inner.co_consts]
    found += [scope.get(name) for inner in codes for name in (*inner.co_names, *inner.co_freevars)]
    return {text for text in found if isinstance(text, str) and text.isidentifier()}


def branches_of(function: types.FunctionType) -> list[tuple[str, str]]:
    """Lines of a function, as ``file:line in function``, that ask whether it is compiled, or whether gradients are
    computed; ``"compiled"`` or ``"gradients"`` beside each."""
    steps = (step for inner in _codes(function.__code__) for step in dis.get_instructions(inner))
    found = {
        (step.positions.lineno, _BRANCHES[step.argval])
        for step in steps
        if step.positions is not None and isinstance(step.argval, str) and step.argval in _BRANCHES
    }
    return [(f"{function.__code__.co_filename}:{n} in {function.__qualname__}", what) for n, what in sorted(found)]


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


def reached(kind: type, names: frozenset[str] | None) -> frozenset[str] | None:
    """What code can name that has an object of a class: ``names``, and those of the methods that it can call.

    Those are ``forward``, ``sample``, operators, and methods and properties that ``names`` holds or such a method
    names: what only a trainer calls (``self.history.append``) is no part of a program.

    Returns:
        ``None`` if anything may be read.
    """
    if names is None:
        return None
    methods = _methods(kind)
    known = names | _ENTRIES | {name for name in methods if _is_operator(name)}
    while todo := [name for name in methods if name in known]:
        known = known.union(*(own_names(function) for name in todo for function in methods.pop(name)))
    return None if DYNAMIC & known else known


def _is_operator(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _NOT_TRACED


def _methods(kind: type) -> dict[str, list[types.FunctionType]]:
    """Name -> the methods of a class and its bases, overridden ones, too: ``super()`` calls them."""
    found: dict[str, list[types.FunctionType]] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            if (function := function_of(value)) is not None:
                found.setdefault(name, []).append(function)
    return found


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
    return is_installed(file) and root != "joestar"


def is_space(value) -> bool:
    """Whether a module, class or function is the user's, whose attributes may be settings: ``config.width``."""
    if isinstance(value, types.ModuleType):
        root = value.__name__.partition(".")[0]
        file = getattr(value, "__file__", None) or ""
        return root not in (*_OURS, *sys.stdlib_module_names) and not is_installed(file)
    if not isinstance(value, (type, types.FunctionType)):
        return False
    return not is_foreign(value) and (value.__module__ or "").partition(".")[0] not in _OURS


class Space:
    """What a module, a class or a function holds, read as its dict has it."""

    def __init__(self, owner: types.ModuleType | type | types.FunctionType):
        self._dicts = [vars(base) for base in owner.__mro__] if isinstance(owner, type) else [vars(owner)]

    def get(self, name: str, default=None):
        """The entry under a name."""
        return next((space[name] for space in self._dicts if name in space), default)
