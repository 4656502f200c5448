"""What may not change after compile: tensors that the graph holds on to, and whatever else was traced into it."""

import operator
import types
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from joestar.errors import ChangedAfterCompileError, JoestarWarning
from joestar.graph_api.frame import Frame
from joestar.lowering.reads import MISSING, Reads, Thing
from joestar.runtime.facts import Entries, Places, Same, TensorFacts, same
from joestar.runtime.watch import Watched

_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
_AGAIN = "Call joestar.compile again."


def plain_attributes(thing) -> dict:
    """Public attributes of an object that are plain values, or containers of them."""
    values = {}
    for name, value in vars(thing).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            values[name] = tuple(value)
        elif isinstance(value, _PLAIN):
            values[name] = value
    return values


class ChangeGuard:
    """A fingerprint of model, sampler, loss and graph; ``check()`` raises when one of them differs from it.

    Python that is traced runs once: types of modules, their settings, nested ones, too, functions and hooks, and the
    globals that they read are part of the program. The ``training`` flags, and which parameters require gradients, are
    not: programs follow them.

    Attributes:
        changes: how often something changed that programs follow, or may have. Whoever follows remembers its number.
    """

    def __init__(self, model: torch.nn.Module, sampler, graph, loss: Callable | None = None):
        self.sampler = sampler
        self.graph = graph
        self.changes = 0
        self._roots = {"model": model, "sampler": sampler} | ({} if loss is None else {"loss": loss})
        self._watched = Watched(self._roots)
        warn_of_branches(self._watched)
        self._graph = self._graph_facts()
        self._frames = Entries([graph.ndata, graph.edata])
        self._structure = [graph.indptr, graph.indices, graph.ids]
        held = [*self._structure, *graph.ndata.values(), *graph.edata.values()]
        self._places = Places([tensor for tensor in held if isinstance(tensor, torch.Tensor)])

    def _graph_facts(self) -> dict[str, TensorFacts]:
        graph = self.graph
        facts = {"graph.indptr": TensorFacts.of(graph.indptr), "graph.indices": TensorFacts.of(graph.indices)}
        if graph.ids is not None:
            facts["graph.ids"] = TensorFacts.of(graph.ids)
        for frame in ("ndata", "edata"):
            for name, value in getattr(graph, frame).items():
                facts[f"graph.{frame}[{name!r}]"] = TensorFacts.of(value)
        return facts

    def check(self) -> None:
        """Raises ``ChangedAfterCompileError`` with what changed, and what to do; some 0.02 ms if nothing did."""
        if self.sampler.graph is not self.graph:
            raise ChangedAfterCompileError(f"sampler.graph is another graph than the one compiled. {_AGAIN}")
        if not self._same_graph():
            _compare(self._graph, self._graph_facts())
        if isinstance(self.graph.ndata, Frame):
            self.graph.ndata.refresh()
        if not self._watched.untouched():
            now = Watched(self._roots)
            _compare(self._watched.facts, now.facts, self._watched.unsure)
            self._watched = now
            self.changes += 1

    def check_reads(self, reads: Reads, flags: bool = True) -> None:
        """Raises ``ChangedAfterCompileError`` if what a trace read of objects that are not watched is another now.

        Args:
            flags: also ``training`` flags of modules that are not the model's (a teacher's), which a program reads that
                does not run now.
        """
        for read in reads.leave_out(self._watched.covers):
            if read.key == "training" and not flags:
                continue
            now = read.now()
            if not same(read.value, now):
                where, what = read.line or "an unknown line", "gone" if now is MISSING else repr(now)
                if isinstance(read.value, Thing) and repr(now) == repr(read.value):
                    raise ChangedAfterCompileError(
                        f"{read.name} is another {read.value.kind} than the one that was read, at {where}; what was "
                        f"read is part of the program. {_HINTS.get(read.value.kind, '')}{_AGAIN}"
                    )
                raise ChangedAfterCompileError(
                    f"{read.name} was {read.value!r} when it was read, at {where}, and is {what} now; "
                    f"what was read is part of the program. {_hint(read.value, now)}{_AGAIN}"
                )

    def _same_graph(self) -> bool:
        graph = self.graph
        same_structure = all(map(operator.is_, (graph.indptr, graph.indices, graph.ids), self._structure))
        return same_structure and self._frames.same() and self._places.same()


_BRANCHES = {
    "compiled": (
        "asks whether it is compiled: torch.compiler.is_compiling() is true in what joestar.compile captures, as under "
        "torch.compile. The branch for compiled code is the one that is trained and predicted with; both must give "
        "the same results (docs/faq.md)."
    ),
    "gradients": (
        "asks whether gradients are computed: that is answered once, while the program is traced, with yes for "
        "training and no for predictions, whatever is around their call (docs/faq.md)."
    ),
}


def warn_of_branches(watched: Watched) -> None:
    """Warns of every line of the user's that takes another way where it is compiled."""
    for line, what in dict.fromkeys(watched.branches):
        warnings.warn(f"{line} {_BRANCHES[what]}", JoestarWarning, stacklevel=3)


def _compare(before: dict, now: dict, unsure: Sequence[str] = ()) -> None:
    """Raises ``ChangedAfterCompileError`` if facts differ.

    Args:
        unsure: paths of what code may read under any name.
    """
    for path, fact in before.items():  # a replaced method first, then what only the old one read
        if path in now and not same(fact, now[path]):
            computed = any(path.startswith(f"{owner}.") for owner in unsure)
            raise ChangedAfterCompileError(_message(path, fact, now[path], _COMPUTED if computed else ""))
    for path in before:
        if path not in now:
            raise ChangedAfterCompileError(f"{path} was removed after compile. {_AGAIN}")
    for path in now:
        if path not in before:
            raise ChangedAfterCompileError(f"{path} was added after compile. {_AGAIN}")
    if list(before) != list(now):
        path = next(path for path, other in zip(before, now, strict=True) if path != other)
        raise ChangedAfterCompileError(f"{path} was moved to another place after compile: order counts. {_AGAIN}")


_COMPUTED = (
    "If no code reads it: attributes are looked up under computed names (getattr, hasattr, vars) beside it, so that "
    "any may be read; keep what is only recorded in a list of the script's, and layers in an nn.ModuleList. "
)


def _message(path: str, before, after, unread: str = "") -> str:
    if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
        return f"{path} was {_difference(before, after)} after compile. {_AGAIN}"
    if isinstance(before, Same) and isinstance(before.thing, types.CodeType):
        what = path.removesuffix("'s code")
        return f"{what} was given other code (edited and reloaded) after compile; its code was traced. {_AGAIN}"
    if isinstance(before, Same) and repr(before) == repr(after):
        return f"{path} was replaced by another {before!r} after compile; it is part of the compiled program. {_AGAIN}"
    return (
        f"{path} was changed from {before!r} to {after!r} after compile; it is part of the compiled program. "
        f"{unread}{_hint(before, after)}{_AGAIN}"
    )


_HINTS = {
    "tensor": "Write new values into it (.copy_() under torch.no_grad()), which every step reads. Else: ",
    "array": "Write new values into it (array[:] = values), which every step reads. Else: ",
}


def _hint(before, after) -> str:
    if not all(isinstance(value, (int, float, np.number)) and type(value) is not bool for value in (before, after)):
        return ""
    return (
        "A number that changes while training (a temperature, a learning rate) belongs into a buffer, which every step "
        "reads: self.register_buffer('name', torch.tensor(value)), then model.name.fill_(new). Else: "
    )


def _difference(before: TensorFacts, after: TensorFacts) -> str:
    if before[4] != after[4]:
        return f"moved from {before[4]} to {after[4]}"
    if before[3] != after[3]:
        return f"converted from {before[3]} to {after[3]}"
    if before[2] != after[2]:
        return f"resized from {list(before[2])} to {list(after[2])}"
    if before[5] != after[5]:
        return "switched to " + ("require" if after[5] else "not require") + " gradients"
    return "replaced by another tensor (assign with .copy_() under torch.no_grad() instead)"
