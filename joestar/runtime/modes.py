"""Which modules are in training mode when a program is traced, and which parameters are trained.

A program is traced with the flags that the user has set, so that what was frozen (``model.bn.eval()``) stays frozen:

| kind | the model itself is in training mode | it is in evaluation mode |
|---|---|---|
| ``train`` | every module as it is | ``model.train()``, except for what was frozen when it was last in training mode |
| ``logits`` | every module as it is | every module as it is (``model.eval(); model.drop.train()``) |
| ``predict`` | ``model.eval()`` | ``model.eval()`` |

A class of the user's may have a ``train`` or ``eval`` of its own that freezes (``mode_overrides.py``).
Parameters that do not require gradients are frozen, too: programs that compute gradients are traced without theirs.
Other flags than those of the trace mean another trace (``Program.follow_modes``), before the next step.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from joestar.errors import ConfigError
from joestar.runtime.mode_overrides import check_overrides, overridden


def check_modules(model: nn.Module, graph) -> None:
    """Lets every module that has ``check_graph(graph)`` look at the graph that it will work on, once."""
    for module in model.modules():
        if hasattr(module, "check_graph"):
            module.check_graph(graph)


def check_autocast(device: torch.device, wanted: torch.dtype | None) -> None:
    """Raises ``ConfigError`` if ``torch.autocast`` is on for a device in another dtype than a program was made for.

    Programs switch it as they were compiled: within, the model would not run as the context says.
    """
    kind = device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == wanted:
        return
    dtype = torch.get_autocast_dtype(kind)
    raise ConfigError(
        f"torch.autocast({kind!r}, dtype={dtype}) is on here, and does not reach into what is compiled, which has "
        f"autocast={wanted}: leave the context out and give autocast={dtype} to joestar.compile or joestar.inference."
    )


class TrainingModes:
    """The flags that programs of one kind are traced under.

    Args:
        kind: ``train``, ``logits`` or ``predict``; model: whose modules' ``training`` flags are read and, while a
            program is traced, set.
    """

    def __init__(self, kind: str, model: nn.Module):
        self.kind = kind
        self.model = model
        self._frozen: tuple[str, ...] = ()
        check_overrides(model, trains=kind == "train")
        self.frozen()

    def traced_with(self) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """What a trace would now depend on: modules in evaluation mode, and whether each parameter is trained."""
        if self.kind == "predict":
            return (), ()
        return self.frozen(), tuple(parameter.requires_grad for parameter in self.model.parameters())

    def frozen(self) -> tuple[str, ...]:
        """Names of the modules that a trace would now see in evaluation mode; the model's own name is empty."""
        if self.kind == "predict":
            return ()
        if self.kind == "logits" or self.model.training:
            self._frozen = tuple(name for name, module in self.model.named_modules() if not module.training)
        return self._frozen

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Modules have these flags within, and those of the user afterwards."""
        with _kept(self.model):
            if self.kind == "predict":
                self.model.eval()
            elif self.kind == "train" and not self.model.training:
                self.model.train(True)
                for name, module in self.model.named_modules():
                    module.training = module.training and name not in self._frozen
            yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode within, and every module in its own afterwards."""
    check_overrides(model)
    with _kept(model):
        model.eval()
        yield


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        if model.training != before[model] and overridden(model):  # which may set modes of unregistered modules
            model.train(before[model])
        for module, mode in before.items():
            module.training = mode
        for parameter, wanted in trained.items():
            if parameter.requires_grad != wanted:  # by a ``train`` or ``eval`` of the user's
                parameter.requires_grad_(wanted)
