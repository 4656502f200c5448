"""What layers of PyG keep of one call for later ones: results over the whole graph, notes of what they chose."""

import contextlib
import dis
import functools
import types
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from joestar.errors import ConfigError

_CACHE = "_cached_"
_ONCE = ("__init__", "reset_parameters")
_MISSING = object()


def check_caches(model: nn.Module) -> None:
    """Raises ``ConfigError`` for layers that keep what they computed of one set of edges: batches differ in theirs."""
    for name, module in model.named_modules():
        if not _bases(type(module)):
            continue
        filled = [key for key in _caches(module) if vars(module)[key] is not None]
        if getattr(module, "cached", False) or filled:
            what = "cached=True" if getattr(module, "cached", False) else f"{filled[0]}, filled by a call before"
            where = f"{type(model).__name__}.{name}".rstrip(".")
            raise ConfigError(
                f"{where} ({type(module).__name__}) has {what}: it would take edges or rows of the whole graph for "
                "those of a batch. Make the layer with cached=False."
            )


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within, layers of PyG have no caches; behind it, what their code sets while it runs is as it was before."""
    before = []
    for module in model.modules():
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            continue  # what its first call sets is to stay
        names = frozenset().union(*(_set_by(base) for base in _bases(type(module)))) | set(_caches(module))
        before.append((module, {name: vars(module).get(name, _MISSING) for name in names}))
        for name in _caches(module):
            setattr(module, name, None)
    try:
        yield
    finally:
        for module, values in before:
            for name, value in values.items():
                if value is not _MISSING:
                    setattr(module, name, value)
                elif name in vars(module):
                    delattr(module, name)


def _bases(kind: type) -> list[type]:
    """The classes of PyG's that a layer is made of."""
    return [base for base in kind.__mro__ if base.__module__.startswith("torch_geometric.")]


def _caches(module: nn.Module) -> list[str]:
    return [name for name in vars(module) if name.startswith(_CACHE)] if _bases(type(module)) else []


@functools.cache
def _set_by(kind: type) -> frozenset[str]:
    """Names of the attributes that methods of a class set, but for those that make it."""
    methods = [f for name, f in vars(kind).items() if isinstance(f, types.FunctionType) and name not in _ONCE]
    found = (step for method in methods for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")
    return frozenset(step.argval for step in found)
