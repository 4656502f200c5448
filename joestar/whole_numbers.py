"""Whole numbers of other kinds as Python's. It imports nothing slow, as commands that only print help read it."""

from numbers import Integral


def plain(value):
    """NumPy's whole numbers as Python's, those in lists and tuples too; anything else as it is."""
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def is_whole(value) -> bool:
    """Whether it is one of Python's whole numbers, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
