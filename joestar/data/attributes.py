"""What a graph knows of itself, as files keep it: text and numbers of Python."""

from numbers import Number
from typing import Any

import numpy as np

from joestar.errors import DataError
from joestar.graph_api import Graph
from joestar.whole_numbers import plain


def plain_attributes(graph: Graph) -> dict[str, Any]:
    """``name``, ``num_classes``, ``multilabel``, ``class_names``, ``feature_names`` of a graph, as text and numbers.

    Names of features that are no longer those of ``x``, which has other columns by now, are left out.

    Raises:
        DataError: one is of another kind, is no text that can be written, or classes and names differ in number.
    """
    number, names = _number(graph.num_classes), _names(graph.class_names, "class_names")
    if names is not None and number is not None and len(names) != number:
        raise DataError(
            f"graph.class_names has {len(names)} names, but graph.num_classes is {number}: name every class."
        )
    name = None if graph.name is None else text_of(graph.name, "graph.name")
    columns, x = _names(graph.feature_names, "feature_names"), graph.ndata.get("x")
    if columns is not None and (x is None or list(x.shape[1:]) != [len(columns)]):
        columns = None
    return {
        "name": name, "num_classes": number, "multilabel": bool(graph.multilabel), "class_names": names,
        "feature_names": columns,
    }  # fmt: skip


def text_of(value, what: str) -> str:
    """Text that has bytes in UTF-8.

    Raises:
        DataError: it is no text, or holds half of a character.
    """
    if not isinstance(value, str):
        raise DataError(f"{what} must be text; got {value!r}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what}: {value!r} holds half of a character, which no file of text may have ({error})."
        ) from None
    return str(value)


def _number(value) -> int | None:
    found = plain(value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value)
    if found is not None and (type(found) is not int or found < 0):
        raise DataError(f"graph.num_classes must be a whole number or None; got {value!r}.")
    return found


def _names(value, what: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, (list, tuple, np.ndarray)):
        raise DataError(f"graph.{what} must be a list of text, a name for each; got {value!r}.")
    return [text_of(str(name) if isinstance(name, Number) else name, f"graph.{what}") for name in list(value)]
