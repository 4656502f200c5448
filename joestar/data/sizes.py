"""Amounts of memory as people write them: ``"4GiB"``, ``"500MB"``, a number of bytes."""

import re

from joestar.errors import DataError

UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def bytes_of(amount: str | int | float, what: str = "memory") -> int:
    """Bytes of ``"24GiB"``, ``"1.5 GB"`` or a number.

    Raises:
        DataError: it is no such text, or not above zero.
    """
    if isinstance(amount, (int, float)) and not isinstance(amount, bool):
        found = int(amount)
    else:
        parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(amount))
        unit = parts and UNITS.get(parts[2].lower())
        if not unit:
            raise DataError(f"{what} must be an amount such as '4GiB', '500MB' or a number of bytes; got {amount!r}.")
        found = int(float(parts[1]) * unit)
    if found <= 0:
        raise DataError(f"{what} must be above 0 bytes; got {amount!r}.")
    return found
