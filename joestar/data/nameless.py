"""The index of a data frame among the columns of a table, where it has no name: it says nothing of nodes or edges."""

import re
from collections.abc import Collection

_PARQUET = re.compile(r"__index_level_\d+__")
_READ_BACK = re.compile(r"Unnamed: 0(\.\d+)*")
"""What pandas calls a nameless index in Parquet, and the nameless first column of a CSV file that it reads."""


def without_index(names: list[str], asked: Collection[str]) -> tuple[list[str], str | None]:
    """(the columns of a table without such an index, what to tell of it).

    Args:
        names: as the table has them; a nameless index of a CSV file is a first one that is empty.
        asked: names that the caller asked for; they stay.
    """
    left_out = [name for place, name in enumerate(names) if name not in asked and _is_index(name, place)]
    if not left_out:
        return names, None
    shown = ", ".join(map(repr, left_out))
    note = f"left out: {shown}, the index of a data frame without a name (id={left_out[0]!r} takes it for ids)"
    return [name for name in names if name not in left_out], note


def _is_index(name: str, place: int) -> bool:
    return (place == 0 and not name) or bool(_PARQUET.fullmatch(name) or _READ_BACK.fullmatch(name))
