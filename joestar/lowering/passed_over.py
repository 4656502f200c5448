"""What TorchDynamo passes over without a word: the caches of functions, and what modules, functions and classes lack.

It traces what ``functools.lru_cache`` and ``functools.cache`` wrap, so that ``get_config().scale`` would be that of an
object that nobody has set, and a table that was written in place would be a new one. Here the cached function itself is
asked, as Python does, and what it returns is read, and watched, like anything else (``reads``).

``getattr(config, "scale", 1.0)``, ``hasattr`` and ``try`` of a module, a function or a class leave no guard where there
is nothing, nor do ``vars`` and ``__dict__``. They are noted here: what comes later is noticed.
"""

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from joestar.lowering.origin import is_own, model_line
from joestar.torch_private import (
    CallFunctionNoArgsSource,
    DynamoClass,
    DynamoFunction,
    DynamoModule,
    DynamoObject,
    DynamoWrapper,
    GlobalSource,
    TracingContext,
    VariableTracker,
)

PREFIX = "joestar_cached_call"
"""What names of calls begin with, as globals of the traced program."""
_HELD = {DynamoModule: "value", DynamoClass: "value", DynamoFunction: "fn"}
"""Kind of variable -> where it has the module, class or function."""
_OTHERS = ("torch", "joestar", "numpy")
_ENTRIES = {dict.__getitem__: "__getitem__", dict.get: "get"}
"""What makes attributes of a dict's entries, as ``__getattr__`` of its class."""


@dataclass(frozen=True)
class Lack:
    """An attribute that a module, a function or a class did not have, and the user's line that asked for it."""

    owner: object
    name: str
    line: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}"


@dataclass(frozen=True)
class Dict:
    """The ``__dict__`` of an object or a class that a user's line asked for: which names were in it counts."""

    owner: object
    line: str

    def names(self) -> frozenset[str]:
        """As they are now, but for properties that are kept when they are first read."""
        kind = self.owner if isinstance(self.owner, type) else type(self.owner)
        kept = (name for name in vars(self.owner) if not isinstance(_static(kind, name), functools.cached_property))
        return frozenset(kept)

    def __str__(self) -> str:
        kind = self.owner if isinstance(self.owner, type) else type(self.owner)
        return f"set(vars({kind.__qualname__}))" + ("" if kind is self.owner else " of an object")


def _static(kind: type, name: str):
    """What a class has under a name, its own or a base's; ``None`` without."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


class CachedCall:
    """A call of a cached function with the arguments of the program: what it returns now."""

    def __init__(self, function: Callable, args: list, kwargs: dict):
        self._function, self._args, self._kwargs = function, args, kwargs
        self.first = self()

    def __call__(self):
        return self._function(*self._args, **self._kwargs)

    def __str__(self) -> str:
        given = [_word(arg) for arg in self._args] + [f"{name}={_word(arg)}" for name, arg in self._kwargs.items()]
        return f"{self._function.__qualname__}({', '.join(given)})"

    def lasts(self) -> bool:
        """Whether the cache still has it: one that is too small for all the calls of a program gives others."""
        return self() is self.first


@dataclass
class PassedOver:
    """What one trace asked: global name -> call of a cached function; what was not there; whose attributes."""

    calls: dict[str, CachedCall] = field(default_factory=dict)
    lacks: list[Lack] = field(default_factory=list)
    dicts: list[Dict] = field(default_factory=list)


@contextlib.contextmanager
def passed_over() -> Iterator[PassedOver]:
    """Within, TorchDynamo asks cached functions themselves, and what is not there is noted."""
    found = PassedOver()
    plain = DynamoWrapper.call_function

    def call_function(variable, tx, args, kwargs):
        made = _cached(found, variable, tx, args, kwargs)
        return plain(variable, tx, args, kwargs) if made is None else made

    with contextlib.ExitStack() as stack:
        _replace(stack, DynamoWrapper, "call_function", call_function)
        _replace(stack, DynamoObject, "var_getattr", _kept(found, DynamoObject.var_getattr))
        for kind, place in _HELD.items():
            _replace(stack, kind, "call_obj_hasattr", _asked(found, kind.call_obj_hasattr, place))
            _replace(stack, kind, "var_getattr", _read(found, kind.var_getattr, place))
        yield found


def _replace(stack: contextlib.ExitStack, kind: type, name: str, method: Callable) -> None:
    own = vars(kind).get(name)
    setattr(kind, name, method)
    stack.callback(delattr, kind, name) if own is None else stack.callback(setattr, kind, name, own)


# --- cached functions ---


def _cached(found: PassedOver, variable, tx, args, kwargs):
    """What a cached function returns, as a variable that says where it comes from; ``None`` if it is to be traced."""
    function = variable.wrapper_obj
    if not hasattr(function, "cache_parameters") or function.cache_parameters()["maxsize"] == 0:
        return None
    if (function.__module__ or "").partition(".")[0] in _OTHERS:
        return None
    try:
        given = [_value(arg) for arg in (*variable.self_args(), *args)]
        call = CachedCall(function, given, {name: _value(arg) for name, arg in kwargs.items()})
    except Exception:  # a tensor or a size of the program, or an error that is the program's own: it is traced
        return None
    behind = weakref.ref(call)  # Dynamo may keep its globals for good
    name = tx.output.install_global(PREFIX, lambda: behind()())
    found.calls[name] = call
    return VariableTracker.build(tx, call.first, CallFunctionNoArgsSource(GlobalSource(name)))


def _kept(found: PassedOver, plain: Callable) -> Callable:
    """Attributes of objects: properties that are kept are read; a dict's entries may be what they stand for."""

    def var_getattr(variable, tx, name):
        thing, kind = variable.value, type(variable.value)
        if name == "__dict__" and variable.source is not None:
            _note_dict(found, thing)
        known = _static(kind, name)
        if isinstance(known, functools.cached_property) and variable.source is not None:
            with contextlib.suppress(Exception):  # an error that is the program's own: it is traced
                getattr(thing, name)
        way = _entry(kind) if known is None and isinstance(thing, dict) else None
        if way is not None and name not in getattr(thing, "__dict__", ()):
            return variable.call_method(tx, way, [VariableTracker.build(tx, name)], {})
        return plain(variable, tx, name)

    return var_getattr


def _entry(kind: type) -> str | None:
    """The method of ``dict`` that a class has as its ``__getattr__``, as long as it is dict's own."""
    way = _ENTRIES.get(getattr(kind, "__getattr__", None))
    own = way is not None and getattr(kind, way) is getattr(dict, way) and not hasattr(kind, "__missing__")
    return way if own else None


def _value(variable):
    """The Python value of an argument that was there before the program ran."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(variable, DynamoObject) and variable.source is not None:
        return variable.value
    raise TypeError(f"{variable} is the program's own")


def _word(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else type(value).__name__


# --- what is not there ---


def _asked(found: PassedOver, plain: Callable, place: str) -> Callable:
    def call_obj_hasattr(variable, tx, name):
        result = plain(variable, tx, name)
        if result.is_python_constant() and result.as_python_constant() is False:
            _note(found, getattr(variable, place), name)
        return result

    return call_obj_hasattr


def _read(found: PassedOver, plain: Callable, place: str) -> Callable:
    def var_getattr(variable, tx, name):
        if name == "__dict__" and isinstance(getattr(variable, place), type):
            _note_dict(found, getattr(variable, place))
        try:
            return plain(variable, tx, name)
        except Exception:
            _note(found, getattr(variable, place), name)
            raise

    return var_getattr


def _note(found: PassedOver, owner, name: str) -> None:
    if inspect.getattr_static(owner, name, owner) is owner and _is_users(owner):
        found.lacks.append(Lack(owner, name, model_line(_frames())))


def _note_dict(found: PassedOver, owner) -> None:
    frames, has_one = _frames(), isinstance(getattr(owner, "__dict__", None), Mapping)  # slots alone have none
    if frames and has_one and is_own(frames[-1][0]) and _is_users(owner if isinstance(owner, type) else type(owner)):
        found.dicts.append(Dict(owner, model_line(frames)))


def _frames() -> list[tuple[str, str, str, str]]:
    return [(f.filename, str(f.lineno), f.name, f.line or "") for f in TracingContext.extract_stack()]


def _is_users(owner: types.ModuleType | types.FunctionType | type) -> bool:
    module = owner if isinstance(owner, types.ModuleType) else sys.modules.get(owner.__module__ or "")
    if module is None or module.__name__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(module, "__file__", None)
    return file is None or is_own(file)
