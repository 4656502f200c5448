"""How far a long conversion is: whoever shows it gives a function, nobody else pays for it."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many units of it are done, and how many there are (0: unknown)."""


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""
