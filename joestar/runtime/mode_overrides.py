"""Methods ``train`` and ``eval`` of a user's own class: they may set modes and freeze, and do nothing else.

Training, predictions and exact inference are traced in modes of their own and run side by side. What such a method does
besides, such as merging weights for evaluation, would be done while a program is traced and missing when it runs.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from joestar.errors import ConfigError, JoestarWarning
from joestar.torch_private import TorchDispatchMode, tree_leaves

_CHECKED: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
_PARTS = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, str)


class _Before:
    """What a model is, to compare with and to go back to; ``kept`` holds values once they were asked for."""

    def __init__(self, model: nn.Module):
        self.modules = dict(model.named_modules())
        self.training = {name: module.training for name, module in self.modules.items()}
        self.attributes = {name: self._of(module) for name, module in self.modules.items()}
        self.data = {
            name: (tensor, tensor.data) for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self.memory = {held.untyped_storage().data_ptr() for _, held in self.data.values()} - {0}
        self.kept: list[Tensor] = []
        self.trained = {parameter: parameter.requires_grad for parameter in model.parameters()}

    @staticmethod
    def _of(module: nn.Module) -> dict[str, dict]:
        own = {name: value for name, value in vars(module).items() if name not in ("training", *_PARTS)}
        return {"": own, **{part: dict(vars(module)[part]) for part in _PARTS}}

    def keep(self) -> None:
        """Copies the values of all parameters and buffers."""
        self.kept = [held.clone() for _, held in self.data.values()]

    def changed(self) -> list[str]:
        """Names of attributes, parts and tensors that are others by now."""
        found = [name for name, (tensor, held) in self.data.items() if tensor.data_ptr() != held.data_ptr()]
        for path, module in self.modules.items():
            now, missing = self._of(module), object()
            for part, before in self.attributes[path].items():
                found += [
                    f"{path}.{name}".lstrip(".")
                    for name in {**before, **now[part]}
                    if not _same(before.get(name, missing), now[part].get(name, missing))
                ]
        return found

    def back(self, whole: bool) -> None:
        """Modes, and what is frozen; ``whole``: everything."""
        for path, module in self.modules.items():
            vars(module)["training"] = self.training[path]
            for part, before in self.attributes[path].items() if whole else ():
                held = vars(module)[part] if part else vars(module)
                for name in [name for name in held if name not in before and name not in ("training", *_PARTS)]:
                    del held[name]
                held.update(before)
        for parameter, trained in self.trained.items():
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for tensor, held in self.data.values() if whole else ():
            if tensor.data_ptr() != held.data_ptr():
                tensor.data = held
        for (_, held), values in zip(self.data.values(), self.kept, strict=False):
            held.copy_(values)


def _same(before, now) -> bool:
    return before is now or (type(before) in _PLAIN and type(before) is type(now) and before == now)


class _Written(TorchDispatchMode):
    """Whether a model's tensors are written within, be it by zeros; in front of the first write all values are kept."""

    def __init__(self, before: _Before):
        super().__init__()
        self.before = before
        self.any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and not self.any:
            given = tree_leaves((args, kwargs))
            memory = {tensor.untyped_storage().data_ptr() for tensor in given if isinstance(tensor, Tensor)}
            if memory & self.before.memory:
                self.any = True
                self.before.keep()
        return func(*args, **(kwargs or {}))


def check_overrides(model: nn.Module, trains: bool = False) -> None:
    """Calls the model's ``train``, for either mode, if some module has its own, and takes back what that did.

    Args:
        trains: whether to warn if ``train`` would freeze what is not frozen now.

    Raises:
        ConfigError: if it writes to tensors or to attributes.
    """
    methods = overridden(model)
    known = frozenset(map(id, methods))
    if not methods or (_CHECKED.get(model) == known and not trains):
        return
    before, mode, changed, frozen = _Before(model), model.training, [], []
    try:
        with torch.no_grad(), _Written(before) as written:
            for now in (not mode, mode):
                model.train(now) if now else model.eval()
                changed += before.changed()
                if now:
                    modes = before.training.items()
                    frozen = [name for name, trained in modes if trained and not before.modules[name].training]
    except BaseException:
        before.back(True)
        raise
    before.back(bool(written.any or changed))
    places = " and ".join(map(_place, methods))
    if written.any or changed:
        what = f"sets {', '.join(sorted(set(changed))[:3])}" if changed else "writes to tensors"
        raise ConfigError(
            f"{places} does more than set modes: called by model.eval() and model.train(), it {what}. Joestar runs "
            "training and predictions side by side and sets modes by itself, without that. Let forward look at "
            "self.training instead (for LoRA layers: merge_weights=False)."
        )
    _CHECKED[model] = known
    if trains and mode and frozen:
        warnings.warn(
            f"{places} puts {', '.join(frozen[:3])} into evaluation mode, and was not called since: modules train "
            "in the modes that they have. Call model.train() before joestar.compile.",
            JoestarWarning,
            stacklevel=2,
        )


def overridden(model: nn.Module) -> list[Callable]:
    """Methods ``train`` that are not PyTorch's, each once, and ``eval`` of the model (of its parts nobody calls it)."""
    found = {}
    for module in model.modules():
        for name in ("train", "eval") if module is model else ("train",):
            method = vars(module).get(name, getattr(type(module), name))
            if method is not getattr(nn.Module, name) and not getattr(method, "__module__", "").startswith("torch."):
                found[getattr(method, "__qualname__", name)] = method
    return list(found.values())


def _place(method: Callable) -> str:
    name, code = getattr(method, "__qualname__", repr(method)), getattr(inspect.unwrap(method), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
