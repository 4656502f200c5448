"""Ctrl-C where a ``Condition`` is entered or left."""

import contextlib
import signal
import sys
import threading


@contextlib.contextmanager
def pressed(function: str, at: str):
    """Within, once: Ctrl-C where a function enters, or leaves, a ``Condition``, in the main thread."""
    real = {"enter": threading.Condition.__enter__, "leave": threading.Condition.__exit__}
    left = [True]

    def press(now: str, caller: str) -> None:
        if left[0] and (now, caller) == (at, function) and threading.current_thread() is threading.main_thread():
            left[0] = False
            signal.raise_signal(signal.SIGINT)

    def enter(self):
        found = real["enter"](self)
        press("enter", sys._getframe(1).f_code.co_name)
        return found

    def leave(self, *error):
        press("leave", sys._getframe(1).f_code.co_name)
        return real["leave"](self, *error)

    threading.Condition.__enter__, threading.Condition.__exit__ = enter, leave
    try:
        yield
    finally:
        threading.Condition.__enter__, threading.Condition.__exit__ = real["enter"], real["leave"]
    assert not left[0], "it was not pressed"
