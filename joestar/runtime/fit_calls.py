"""What a ``fit`` calls of the user's: whether it can be called so, which is known before the first step."""

import inspect
from collections.abc import Callable

from joestar.errors import ConfigError


def accepts(call: Callable, *given, **named) -> bool:
    """Whether ``call`` takes such arguments, as far as its signature tells."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # of C, say
        return True
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def check_callback(call, name: str) -> None:
    """Raises ``ConfigError`` unless a callback is ``None``, or can be called with a record."""
    if call is not None and not (callable(call) and accepts(call, None)):
        raise ConfigError(f"{name} must be a function of one argument, the record; got {call!r}.")


def stops(answer, name: str) -> bool:
    """Whether a callback's answer ends the training.

    Raises:
        ConfigError: it is none.
    """
    if answer is not None and not isinstance(answer, bool):
        raise ConfigError(
            f"{name} returned {answer!r} ({type(answer).__name__}): expected True to stop, False or None to go on."
        )
    return bool(answer)
