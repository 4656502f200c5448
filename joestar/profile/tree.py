"""From plain dicts and lists back to a tree of dataclasses."""

import math
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any


def rebuilt(kind: Any, value: Any) -> Any:
    """``value``, as ``dataclasses.asdict`` and JSON leave it, as an object of type ``kind``.

    Args:
        kind: a dataclass, ``list[...]``, ``dict[...]``, ``X | None``, or a plain type.

    Raises:
        TypeError: if the value does not have this form.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else rebuilt(inner, value)
    if origin is list:
        return [rebuilt(arguments[0], item) for item in _checked(value, list)]
    if origin is dict:
        return {key: rebuilt(arguments[1], item) for key, item in _checked(value, dict).items()}
    if is_dataclass(kind):
        hints, names = typing.get_type_hints(kind), {field.name for field in fields(kind)}
        unknown = sorted(_checked(value, dict).keys() - names)
        if unknown:
            raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
        return kind(**{name: rebuilt(hints[name], item) for name, item in value.items()})
    if kind is float:
        return math.nan if value is None else _checked(value, (int, float))
    return _checked(value, kind)


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind}, got {value!r}"[:200])
    return value
