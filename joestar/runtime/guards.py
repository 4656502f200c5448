"""What may not change after compile: tensors that the graph holds on to, and settings that were traced into it."""

import torch

from joestar.errors import ChangedAfterCompileError

_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)


def plain_attributes(thing) -> dict:
    """Attributes of an object that are plain values, or containers of them."""
    values = {}
    for name, value in vars(thing).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            values[name] = tuple(value)
        elif isinstance(value, _PLAIN):
            values[name] = value
    return values


def _tensor_facts(tensor: torch.Tensor) -> tuple:
    return id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


class ChangeGuard:
    """A fingerprint of model, sampler and graph; ``check()`` raises when one of them differs from it."""

    def __init__(self, model: torch.nn.Module, sampler, graph):
        self.model = model
        self.sampler = sampler
        self.graph = graph
        self.tensors = {name: _tensor_facts(t) for name, t in self._named_tensors()}
        self.settings = self._settings()

    def _named_tensors(self):
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        for frame in ("ndata", "edata"):
            for name, value in getattr(self.graph, frame).items():
                yield f"graph.{frame}[{name!r}]", value
        for name, value in vars(self.sampler).items():
            if isinstance(value, torch.Tensor):
                yield f"sampler.{name}", value
        yield "graph.indptr", self.graph.indptr
        yield "graph.indices", self.graph.indices

    def _settings(self) -> dict:
        settings = {f"sampler.{name}": value for name, value in plain_attributes(self.sampler).items()}
        for path, module in self.model.named_modules():
            for name, value in plain_attributes(module).items():
                settings[f"{path}.{name}" if path else name] = value
        return settings

    def check(self) -> None:
        """Raises ``ChangedAfterCompileError`` with what changed, and what to do."""
        again = "Call joestar.compile again."
        if self.sampler.graph is not self.graph:
            raise ChangedAfterCompileError(f"sampler.graph is another graph than the one compiled. {again}")
        now = dict(self._named_tensors())
        for name, facts in self.tensors.items():
            if name not in now:
                raise ChangedAfterCompileError(f"{name} was removed after compile. {again}")
            current = _tensor_facts(now[name])
            if current != facts:
                raise ChangedAfterCompileError(f"{name} was {_difference(facts, current)} after compile. {again}")
        for name in now.keys() - self.tensors.keys():
            raise ChangedAfterCompileError(f"{name} was added after compile. {again}")
        settings = self._settings()
        for name, value in self.settings.items():
            if settings.get(name) != value:
                raise ChangedAfterCompileError(
                    f"{name} was changed from {value!r} to {settings.get(name)!r} after compile; it is part of the "
                    f"compiled program. {again}"
                )


def _difference(before: tuple, after: tuple) -> str:
    if before[4] != after[4]:
        return f"moved from {before[4]} to {after[4]}"
    if before[3] != after[3]:
        return f"converted from {before[3]} to {after[3]}"
    if before[2] != after[2]:
        return f"resized from {list(before[2])} to {list(after[2])}"
    if before[5] != after[5]:
        return "switched to " + ("require" if after[5] else "not require") + " gradients"
    return "replaced by another tensor (assign with .copy_() under torch.no_grad() instead)"
