"""What a state of historical embeddings says of pushes under way, checked before anything of it is taken over."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from joestar.errors import CheckpointError
from joestar.whole_numbers import is_whole


def check_place(state: dict[str, Any]) -> None:
    """``CheckpointError`` unless the latest macro-batch, its epoch and the number of that one's first are numbers."""
    latest, epoch, base = (state[name] for name in ("latest", "epoch", "base"))
    if not is_whole(latest) or latest < -1:
        raise _wrong("latest", "the number of a macro-batch, or -1", repr(latest))
    if epoch is not None and (not is_whole(epoch) or epoch < 0):
        raise _wrong("epoch", "the number of an epoch, or None", repr(epoch))
    if not is_whole(base) or not 0 <= base <= latest + 1:
        raise _wrong("base", f"the number of a macro-batch from 0 to {latest + 1}", repr(base))


def check_pushes(state: dict[str, Any], widths: Sequence[int], dtype: torch.dtype, num_nodes: int) -> None:
    """``CheckpointError`` unless ``waiting`` and ``undo`` are pushes into tables of these widths and this dtype.

    Each entry has a ``number`` and, per layer, ids ``[m]`` of nodes below ``num_nodes`` and rows ``[m, width]``; those
    of ``undo`` also, as ``before``, the rows and stamps ``[m]`` that they wrote over.
    """
    for name in ("waiting", "undo"):
        entries = state[name]
        if not isinstance(entries, (list, tuple)):
            raise _wrong(name, "a list of pushes", type(entries).__name__)
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("number"), int):
                raise _wrong(name, "pushes with the number of their macro-batch", repr(type(entry).__name__))
            layers = _pairs(name, "layers", entry, len(widths))
            before = _pairs(name, "before", entry, len(widths)) if name == "undo" else [None] * len(layers)
            for width, (ids, rows), old in zip(widths, layers, before, strict=True):
                _check_ids(name, ids, num_nodes)
                _check(name, "rows", rows, [len(ids), width], dtype)
                if old is not None:
                    _check(name, "rows written over", old[0], [len(ids), width], dtype)
                    _check(name, "their stamps", old[1], [len(ids)], None)


def _pairs(name: str, part: str, entry: dict, layers: int) -> list:
    found = entry.get(part)
    right = isinstance(found, (list, tuple)) and len(found) == layers
    right = right and all(len(pair) == 2 and all(isinstance(t, Tensor) for t in pair) for pair in found)
    if not right:
        raise _wrong(
            name, f"{part} of {layers} pairs of tensors, one per hidden layer", f"others ({type(found).__name__})"
        )
    return list(found)


def _check_ids(name: str, ids: Tensor, num_nodes: int) -> None:
    whole = ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole or (ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_nodes)):
        raise _wrong(
            name, f"node ids [m] below {num_nodes:,}", _form(ids) if not whole else f"up to {int(ids.max()):,}"
        )


def _check(name: str, what: str, tensor: Tensor, shape: list[int], dtype: torch.dtype | None) -> None:
    if list(tensor.shape) != shape or dtype not in (None, tensor.dtype):
        expected = f"{what} {shape}" + ("" if dtype is None else f" in {dtype}")
        raise _wrong(name, expected, _form(tensor))


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {tensor.dtype}"


def _wrong(name: str, expected: str, came: str) -> CheckpointError:
    return CheckpointError(
        f"history, {name!r}: expected {expected}; got {came}. The state was changed, or belongs to another model or "
        "graph; to begin with an empty history, load its 'model' into the model."
    )
