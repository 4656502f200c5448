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
from joestar.torch_private import TorchDispatchMode

_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_PARTS = ("_parameters", "_buffers", "_modules")


class _Before:
    """What a model is, to compare with and to go back to; ``tensors`` hold values once they were kept."""

    def __init__(self, model: nn.Module):
        self.held = [*model.parameters(), *model.buffers()]
        self.modules = dict(model.named_modules())
        self.training = {name: module.training for name, module in self.modules.items()}
        self.attributes = {name: self._of(module) for name, module in self.modules.items()}
        self.tensors: dict[Tensor, Tensor] = {}
        self.trained = {parameter: parameter.requires_grad for parameter in model.parameters()}

    @staticmethod
    def _of(module: nn.Module) -> dict[str, dict]:
        own = {name: value for name, value in vars(module).items() if name not in ("training", *_PARTS)}
        return {"": own, **{part: dict(vars(module)[part]) for part in _PARTS}}

    def keep(self) -> None:
        """Copies the values of all parameters and buffers."""
        self.tensors = {tensor: tensor.detach().clone() for tensor in self.held}

    def changed(self) -> list[str]:
        """Names of attributes and parts that are others by now."""
        found = []
        for path, module in self.modules.items():
            now = self._of(module)
            for part, before in self.attributes[path].items():
                missing = object()
                found += [
                    f"{path}.{name}".lstrip(".")
                    for name in {**before, **now[part]}
                    if before.get(name, missing) is not now[part].get(name, missing)
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
        for tensor, before in self.tensors.items() if whole else ():
            tensor.data.copy_(before)


class _Written(TorchDispatchMode):
    """Whether tensors are written within, be it by zeros; in front of the first write all values are kept."""

    def __init__(self, before: _Before):
        super().__init__()
        self.before = before
        self.any = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and not self.any:
            self.any = True
            self.before.keep()
        return func(*args, **(kwargs or {}))


def check_overrides(model: nn.Module, trains: bool = False) -> None:
    """Calls the model's ``eval`` and ``train`` once, if some module has its own, and takes back what they did.

    Args:
        trains: whether to warn if ``train`` would freeze what is not frozen now.

    Raises:
        ConfigError: if they write to tensors or to attributes.
    """
    methods = _overridden(model)
    if not methods or (model in _CHECKED and not trains):
        return
    before, mode = _Before(model), model.training
    try:
        with torch.no_grad(), _Written(before) as written:
            model.eval()
            changed = before.changed()
            model.train()
        frozen = [name for name, module in before.modules.items() if before.training[name] and not module.training]
        changed += before.changed()
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
    _CHECKED.add(model)
    if trains and mode and frozen:
        warnings.warn(
            f"{places} puts {', '.join(frozen[:3])} into evaluation mode, and was not called since: modules train "
            "in the modes that they have. Call model.train() before joestar.compile.",
            JoestarWarning,
            stacklevel=2,
        )


def _overridden(model: nn.Module) -> list[Callable]:
    """Methods that are not PyTorch's, each once; ``eval`` of parts of a model is not called by the model's."""
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
