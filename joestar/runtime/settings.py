"""Settings of model, sampler and loss as texts that processes can compare: whatever may be traced into a program."""

import enum
import re
import types
from collections.abc import Mapping

import numpy as np
import torch

from joestar.distributed.facts import SAMPLE, digest, plain, text_digest
from joestar.graph_api import Graph
from joestar.runtime.code_names import is_foreign
from joestar.runtime.watch import Same, Watched

_OWN_DEVICE = re.compile(r"cuda:\d+")
_ROOT = "<sampler>"
"""No module has that name."""
_ATTRIBUTE = re.compile(rf"{_ROOT}(\.\w+)+")


class Settings(Watched):
    """What ``Watched`` finds, without what differs between processes that do the same: places, identities, devices.

    Tensors count by shape, dtype and values, but parameters and buffers of modules without values (``model``: they come
    from rank 0). The graph is compared elsewhere. Methods count that are called from ``forward``, ``sample`` or the
    loss, and attributes that those name: a trainer's writer may be on rank 0 alone.
    """

    def __init__(self, model: torch.nn.Module, others: dict):
        self._from_first = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
        if isinstance(value, (set, frozenset)):
            self.facts[path] = ("set", *sorted(plain(entry) for entry in value))
        elif isinstance(value, np.ndarray):
            self.facts[path] = f"{value.dtype} {list(value.shape)} #{text_digest(value.tobytes().hex())}"
        else:
            super()._note_thing(path, value, names)

    def _note_hooks(self, path: str, hooks: Mapping) -> None:
        for position, hook in enumerate(hooks.values()):
            self._note(f"{path}[{position}]", hook, frozenset())


class _OfSampler(Settings):
    """Those of a sampler, without its tensors, arrays and sets."""

    def __init__(self, sampler):
        super().__init__(torch.nn.Module(), {_ROOT: sampler})

    def _note_tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Tensors may be large, trained or elsewhere."""

    def _note_thing(self, path: str, value, names: frozenset[str] | None) -> None:
        if not isinstance(value, (set, frozenset, np.ndarray)):
            super()._note_thing(path, value, names)


def sampler_texts(sampler) -> dict[str, str]:
    """What a sampler is and the plain attributes that it draws by, path -> text, the same in another process."""
    found = {}
    for path, fact in _OfSampler(sampler).facts.items():
        if path == f"type({_ROOT})" or (_ATTRIBUTE.fullmatch(path) and _is_plain(fact)):
            found[path.replace(_ROOT, "sampler")] = _text(fact)
    return found


def _is_plain(fact) -> bool:
    if isinstance(fact, tuple):
        return all(map(_is_plain, fact))
    return fact is None or type(fact) in (bool, int, float, str)


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
