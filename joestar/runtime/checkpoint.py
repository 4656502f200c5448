"""Checkpoints: the state of a run in files that are whole or not there, the last few of them kept."""

import contextlib
import hashlib
import os
import re
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joestar.distributed import current
from joestar.errors import CheckpointError, ConfigError, JoestarWarning
from joestar.runtime.occupied import TRAINING, WRITING, occupied
from joestar.whole_numbers import plain

STATE_FORMAT = 1
"""Format of ``Step.state_dict``."""
FILE_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{9,})\.pt")
_KEYS = ("seed", "epochs", "calls", "under_way", "model", "optimizer", "programs")


def check_state(state: Mapping) -> None:
    """Raises ``CheckpointError`` unless ``state`` is a state of a step, in a format that is known here."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise CheckpointError("expected what step.state_dict() returned (a dict with the key 'format').")
    if state["format"] != STATE_FORMAT:
        raise CheckpointError(
            f"the state has format {state['format']!r} (Joestar {state.get('joestar', 'unknown')}); expected "
            f"{STATE_FORMAT}: load it with the version that wrote it."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise CheckpointError(f"the state lacks {', '.join(missing)}: expected what step.state_dict() returned.")


def versions_of(module: torch.nn.Module) -> dict[str, int | None]:
    """Versions of the parts of a module, by which they know an older state; checkpoints hold plain dicts without."""
    metadata = getattr(module.state_dict(), "_metadata", {})
    return {name: entry.get("version") for name, entry in metadata.items()}


def versioned(state: Mapping, versions: Mapping[str, int | None] | None) -> Mapping:
    """A module's state with the versions that were saved beside it, unless it has its own."""
    if versions is None or hasattr(state, "_metadata"):
        return state
    made = OrderedDict(state)
    made._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return made


def load_into(model: torch.nn.Module, optimizer, state: Mapping, loss: torch.nn.Module | None = None) -> None:
    """Loads parameters, buffers and optimizer; all are checked before the first is changed.

    Args:
        loss: the loss function, if it is a module; a state may have nothing of it.

    Raises:
        CheckpointError: if names or shapes of the model's or the loss's tensors, or the optimizer's groups, differ.
    """
    problems = _differences(model.state_dict(), state["model"])
    further = state.get("loss") or {}
    if further:
        problems += _differences({} if loss is None else loss.state_dict(), further, "of the loss, ")
    if optimizer is not None:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        if sizes != theirs:
            problems.append(f"the optimizer has groups of {theirs} parameters, here of {sizes}")
        numbers = {name for name, value in optimizer.defaults.items() if not isinstance(value, (bool, type(None)))}
        for group in state["optimizer"]["param_groups"][:1]:
            if missing := sorted(numbers - group.keys()):
                problems.append(f"the optimizer has no {', '.join(missing)}, which {type(optimizer).__name__} has")
    if problems:
        raise CheckpointError(
            f"the checkpoint is of another model, loss or optimizer: {'; '.join(sorted(problems)[:5])}. Build them as "
            "they were when it was saved; to go on with another loss, take state['loss'] out."
        )
    model.load_state_dict(versioned(state["model"], state.get("versions")))
    if further:
        loss.load_state_dict(versioned(further, state.get("loss_versions")))
    if optimizer is not None:
        optimizer.load_state_dict(_copied(state["optimizer"]))  # it would go on with the very tensors


def _differences(own: Mapping, saved: Mapping, of: str = "") -> list[str]:
    """What of a module's state differs from a saved one, in words."""
    problems = [f"{of}{name} is missing" for name in own.keys() - saved.keys()]
    problems += [f"{of}{name} is unknown here" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        if isinstance(own[name], Tensor) and own[name].shape != saved[name].shape:
            problems.append(f"{of}{name} is {list(saved[name].shape)}, here {list(own[name].shape)}")
    return problems


def _copied(value: Any) -> Any:
    """A tree with tensors of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return type(value)(_copied(entry) for entry in value) if type(value) in (list, tuple) else value


class Checkpoints:
    """A folder of checkpoints, the newest ``keep`` of them.

    A checkpoint is a file that ``torch.load(path, weights_only=True)`` reads: nothing in it is unpickled but tensors,
    numbers, strings and containers of them. It is written beside, flushed to the disk and renamed, so that a process
    that is killed leaves whole files only, and it carries a SHA-256 of its content. One process writes there at a time:
    while a ``fit`` does, others are refused.

    Args:
        folder: made if it does not exist.
        keep: how many to keep.
        extra: goes into every checkpoint, beside what ``save`` is given.

    Raises:
        ConfigError: if the folder cannot be written to, or ``keep`` is not positive.
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 3, extra: Mapping | None = None):
        keep = plain(keep)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep must be a positive number of checkpoints; got {keep!r}.")
        self.folder, self.keep, self.extra = Path(folder), keep, dict(extra or {})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made a folder of checkpoints ({error}).") from error
        if not os.access(self.folder, os.W_OK):
            raise ConfigError(f"{folder} cannot be written to: expected a folder for checkpoints.")

    def paths(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)

    def save(self, step, **more: Any) -> Path:
        """Writes the state of a ``Step``, and anything else made of tensors, numbers, strings and containers.

        Of several ranks (``joestar.distributed``) only rank 0 writes: the state is the same on all. The others wait
        until the file is there; rank 0 may save alone, except over partitions, where ranks know parts of the state.

        Returns:
            The file. Older ones beyond ``keep`` are gone.

        Raises:
            ConfigError: if it cannot be written (a full disk?), on all ranks, or another process trains with this
                folder; the older ones are still there then.
        """
        group = current()
        if group is None:
            return self.write(step, **more)
        state = step if isinstance(step, Mapping) else step.state_dict()
        what = f"Checkpoints.save in {self.folder}, {_moment(state)}"
        return Path(group.only_first(what, lambda: str(self.write(state, **more))))

    def check(self, step) -> None:
        """Raises ``ConfigError`` where ``save`` would for what is no tensor: before anything is trained."""
        storable(self.extra, "Checkpoints.extra")
        groups = [{k: v for k, v in group.items() if k != "params"} for group in step.optimizer.param_groups]
        storable(groups, "a group of the optimizer: param_groups")
        prepared = step.scorer.prepared
        for what, module in (("model", step.model), ("loss", prepared and prepared.module)):
            for name, value in ({} if module is None else module.state_dict()).items():
                if not isinstance(value, Tensor):
                    storable(value, f"the {what}'s state_dict()[{name!r}]")

    def occupied(self) -> contextlib.AbstractContextManager:
        """Within, no other process writes here; of several ranks, which call it together, the first one sees to that.

        Raises:
            ConfigError: another one does; on all ranks.
        """
        group, stack = current(), contextlib.ExitStack()
        if group is None:
            return occupied(self.folder, TRAINING)
        group.only_first(f"fit in {self.folder}", lambda: stack.enter_context(occupied(self.folder, TRAINING)) or "")
        return stack

    def write(self, step, **more: Any) -> Path:
        """``save``, in this process whatever its rank."""
        state = step if isinstance(step, Mapping) else step.state_dict()
        with occupied(self.folder, WRITING):
            return self._written({"step": dict(state), **self.extra, **more})

    def _written(self, content: Mapping) -> Path:
        paths = self.paths()
        path = self.folder / f"checkpoint-{_number(paths[-1]) + 1 if paths else 1:09d}.pt"
        write_checkpoint(path, content)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        for left in self.folder.glob(".checkpoint-*.tmp"):  # of processes that were killed
            if not left.name.startswith(f".{path.name}"):
                left.unlink(missing_ok=True)
        return path

    def latest(self, map_location="cpu") -> dict | None:
        """The newest whole checkpoint, as ``{"step": state, ...}``; ``None`` if there is none.

        Damaged ones are passed over, with a warning.

        Raises:
            CheckpointError: if there are checkpoints, and all of them are damaged.
        """
        problems = []
        for path in reversed(self.paths()):
            try:
                content = read_checkpoint(path, map_location)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                warnings.warn(f"{problem} Going on from {path.name}.", JoestarWarning, stacklevel=2)
            return content
        if problems:
            raise CheckpointError(f"no checkpoint in {self.folder} can be read: {' '.join(problems)}")
        return None

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep})"


def write_checkpoint(path: str | os.PathLike, content: Mapping) -> None:
    """Writes tensors, numbers, strings and containers of them: beside, flushed, then renamed.

    Raises:
        ConfigError: if it cannot be written, or holds something else.
    """
    path = Path(path)
    plain = storable(content, "checkpoint")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"joestar_checkpoint": FILE_FORMAT, "sha256": content_hash(plain), "content": plain}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        with contextlib.suppress(OSError):  # the name, too, is on the disk then; not every system can do it
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be written ({error}). Is there space, and permission?") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike, map_location="cpu") -> dict:
    """What ``write_checkpoint`` wrote.

    Raises:
        CheckpointError: if the file is missing, damaged, or no checkpoint.
    """
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: expected a checkpoint.") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or no checkpoint ({first}).") from error
    if not isinstance(found, dict) or "joestar_checkpoint" not in found:
        raise CheckpointError(f"{path} is no checkpoint of Joestar's: expected one that Checkpoints.save wrote.")
    if found["joestar_checkpoint"] != FILE_FORMAT:
        raise CheckpointError(
            f"{path} has format {found['joestar_checkpoint']!r}; expected {FILE_FORMAT}: read it with the version that "
            "wrote it."
        )
    if content_hash(found["content"]) != found["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum.")
    return found["content"]


def content_hash(content: Any) -> str:
    """SHA-256 over names, types, shapes and bytes of everything in a tree."""
    state = hashlib.sha256()
    _absorb(state, content)
    return state.hexdigest()


def _absorb(state, value: Any) -> None:
    if isinstance(value, Tensor):
        state.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().to("cpu").contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # one number may have any stride
        state.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        state.update(f"dict {len(value)}".encode())
        for key, entry in value.items():
            _absorb(state, key)
            _absorb(state, entry)
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)}".encode())
        for entry in value:
            _absorb(state, entry)
    else:
        state.update(f"{type(value).__name__} {value!r}".encode())


def of_python(value: Any) -> Any:
    """Numbers and texts of NumPy, and of classes made of Python's, as Python's own: others cannot be read again.

    ``np.float64`` is a ``float``, and what a schedule computes with ``np.cos``.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(of_python, value))
    kind = next((kind for kind in (bool, int, float, str, bytes) if isinstance(value, kind)), None)
    return value if kind in (None, type(value)) else kind(value)


def storable(value: Any, where: str) -> Any:
    """The tree with tensors on the CPU, and containers of Python's own; a ``Counter``, which is no dict of counts to
    those who have one, stays one.

    Raises:
        ConfigError: for what could not be read again without unpickling, with ``where`` it is.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu")
    if isinstance(value, Mapping):
        entries = {storable(key, where): storable(entry, f"{where}[{key!r}]") for key, entry in value.items()}
        return Counter(entries) if isinstance(value, Counter) else entries
    if isinstance(value, (list, tuple)):
        entries = [storable(entry, where) for entry in value]
        return tuple(entries) if type(value) is tuple else entries
    value = of_python(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return value
    raise ConfigError(
        f"{where} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings, lists and dicts of them, "
        "so that reading one runs no code."
    )


def _moment(state: Mapping) -> str:
    """When a state was taken: ranks that save together do it after the same steps."""
    steps = [epoch["position"] for epoch in state.get("under_way", ())]
    return f"after {state.get('epochs')} epochs begun, {state.get('calls')} calls, steps {steps}"


def _number(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])
