"""Structures of tensors that models and losses return: taken apart while they are traced, put together again.

A structure is described by nested tuples of constants: ``"*"`` for a tensor, ``("dict", ("logits", "*"), ...)``,
``("tuple", "*", ...)``, ``("list", ...)``, ``("named", type, "*", ...)``, ``("data", type, ("logits", "*"), ...)`` for
a dataclass, ``("const", None)``.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from joestar.errors import CaptureError
from joestar.pyg.call import is_fixed

LEAF = "*"
_PLAIN = (bool, int, float, str)


def flatten(value, tensors: list[Tensor], where: str = "the model's output"):
    """The structure of ``value``; its tensors are appended to a list.

    Raises:
        CaptureError: for something else than tensors, numbers, strings, None and containers of them.
    """
    if isinstance(value, Tensor):
        again = isinstance(value, nn.Parameter) or any(value is other for other in tensors)
        again = again or is_fixed(value.shape[0] if value.dim() else 1)  # as buffers and views of parameters
        tensors.append(value.clone() if again else value)  # of outputs that are one, or an input, Dynamo gives none
        return LEAF
    if isinstance(value, dict):
        return ("dict", *((key, flatten(entry, tensors, f"{where}[{key!r}]")) for key, entry in value.items()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ("named", type(value), *(flatten(entry, tensors, where) for entry in value))
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, *(flatten(entry, tensors, f"{where}[{i}]") for i, entry in enumerate(value)))
    if value is None or isinstance(value, _PLAIN):
        return ("const", value)
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return ("data", type(value), *((name, flatten(one, tensors, f"{where}.{name}")) for name, one in held.items()))
    raise CaptureError(
        f"{where} is a {type(value).__name__}: expected a tensor, or dicts, tuples, lists, dataclasses, numbers and "
        "strings around tensors."
    )


def rebuild(structure, tensors: Iterator[Tensor]):
    """What ``flatten`` took apart, with these tensors in place of the old ones."""
    if structure == LEAF:
        return next(tensors)
    kind, *parts = structure
    if kind == "const":
        return parts[0]
    if kind == "dict":
        return {key: rebuild(part, tensors) for key, part in parts}
    if kind == "data":
        return parts[0](**{name: rebuild(part, tensors) for name, part in parts[1:]})
    if kind == "named":
        return parts[0](*(rebuild(part, tensors) for part in parts[1:]))
    values = [rebuild(part, tensors) for part in parts]
    return tuple(values) if kind == "tuple" else values


def leaf_names(structure, where: str = "") -> list[str]:
    """``["['logits']", "['hidden'][0]"]``: how to get at every tensor, in order."""
    if structure == LEAF:
        return [where]
    kind, *parts = structure
    if kind == "const":
        return []
    if kind == "dict":
        return [name for key, part in parts for name in leaf_names(part, f"{where}[{key!r}]")]
    if kind == "data":
        return [name for field, part in parts[1:] for name in leaf_names(part, f"{where}.{field}")]
    parts = parts[1:] if kind == "named" else parts
    return [name for i, part in enumerate(parts) for name in leaf_names(part, f"{where}[{i}]")]


def loss_and_values(value, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, 0-d, and what is to be logged with it, from what a loss function returned.

    Raises:
        CaptureError: for anything but a tensor, or a pair of a tensor and a dict of tensors.
    """
    logged = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, logged = value
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"{name} must return a tensor (a number, 0-d), or a pair of it and a dict of tensors to log; got "
            f"{type(value).__name__}. Keep the value in a tensor: .item() or float() would bring it to the host in "
            "every step. Put what else is to be logged into a dict: return loss, {'accuracy': hits}."
        )
    value = value if value.dim() == 0 else value.mean()
    for key, entry in logged.items():
        if not isinstance(key, str) or not isinstance(entry, Tensor):
            raise CaptureError(
                f"{name} returned {key!r}: {type(entry).__name__} to be logged: expected names and tensors."
            )
    return value, {key: _number(entry, value) for key, entry in logged.items()}


def _number(entry: Tensor, like: Tensor) -> Tensor:
    entry = entry.detach().to(like.dtype)
    return entry if entry.dim() == 0 else entry.mean()
