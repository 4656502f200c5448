"""Numbers as people read them."""

import re

from joestar.errors import ConfigError
from joestar.whole_numbers import plain

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_MOST = 2.0**64
"""Of any unit: more is no memory, and may be no number that Python can convert."""


def parse_bytes(value: int | str, name: str = "memory", least: int = 1) -> int:
    """``"24GiB"``, ``"512 MB"`` (both in powers of 1,024) or a number of bytes, at least so many.

    Raises:
        ConfigError: for anything else.
    """
    value = plain(value)
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
        count = int(float(found[1]) * _UNITS[found[2]]) if found and float(found[1]) < _MOST else -1
        if count >= least:
            return count
    elif isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigError(f"{name} must be a number of bytes such as 24 * 2**30, or a text such as '24GiB'; got {value!r}.")


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_rate(per_second: float) -> str:
    """Bytes per second in decimal units, as vendors give bandwidths: ``4.2e12`` as ``4.20 TB/s``."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if per_second < 1000:
            return f"{digits(per_second)} {unit}"
        per_second /= 1000
    return f"{digits(per_second)} TB/s"


def digits(value: float) -> str:
    """Three significant digits, and all of the whole part: ``0.0617``, ``6.17``, ``617``, ``1,234``."""
    size = abs(value)
    places = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:,.{places}f}"


def milliseconds(value: float) -> str:
    """``6.17 ms``."""
    return f"{digits(value)} ms"


def seconds(value: float) -> str:
    """``12.3 ms``, ``1.00 s``."""
    return f"{digits(value)} s" if value >= 1 else milliseconds(value * 1e3)


def percent(share: float) -> str:
    """``38.0 %``, of a share in [0, 1]."""
    return f"{share * 100:.1f} %"


def count(value: float) -> str:
    """``120,600``; a fraction of a count shows one place."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.1f}"


def short(value: float) -> str:
    """``120k``, ``1.5M``: the labels of an axis."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}G"


def plural(number: int, noun: str, many: str = "") -> str:
    """``1 step``, ``1,200 steps``; ``many``: the plural, if it is another one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {many or noun + 's'}"


def rounded(value: float) -> str:
    """Two digits are enough for an estimate: ``12,432`` as ``12,000``."""
    size = 10 ** max(0, len(str(int(value))) - 2)
    return f"{round(value / size) * size:,}"
