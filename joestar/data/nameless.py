"""The index of a data frame among the columns of a table, where it has no name: it says nothing of nodes or edges."""

import re
from collections.abc import Collection

_PARQUET = re.compile(r"__index_level_\d+__")
_READ_BACK = re.compile(r"Unnamed: 0(\.\d+)*")
"""What pandas calls a nameless index in Parquet, and the nameless first column of a CSV file that it reads."""


def without_index(
    names: list[str], asked: Collection[str | int], ids: Collection[str] = ()
) -> tuple[list[str], str | None]:
    """(the columns of a table without such an index, what to tell of it).

    Args:
        names: as the table has them; a nameless index of a CSV file is a first one that is empty.
        asked: names and positions that the caller asked for; they stay.
        ids: what a column of ids may be called, where the first column is one unless another is called so.
    """
    of_ids = bool(names and ids) and not any(name.lower() in ids for name in names)
    index = [name for place, name in enumerate(names) if _is_index(name, place)]
    stay = {name for place, name in enumerate(names) if name in asked or place in asked or (of_ids and place == 0)}
    left_out = [name for name in index if name not in stay]
    notes = []
    if of_ids and names[0] in index:
        notes.append(f"the ids are {names[0]!r}, the index of a data frame without a name (id=... names others)")
    if left_out:
        shown = ", ".join(map(repr, left_out))
        notes.append(
            f"left out: {shown}, the index of a data frame without a name (id={left_out[0]!r} takes it for ids)"
        )
    return [name for name in names if name not in left_out], "; ".join(notes) or None


def _is_index(name: str, place: int) -> bool:
    return (place == 0 and not name) or bool(_PARQUET.fullmatch(name) or _READ_BACK.fullmatch(name))
