"""Arenas on a CPU whose book of slots is kept as a GPU keeps it, by Triton kernels in their interpreter."""

import contextlib
import threading
from unittest import mock

from triton.runtime import interpreter

from joestar.staged import planning


@contextlib.contextmanager
def book_on_device():
    """For all plans made within; the interpreter changes Triton's language while a kernel runs: one at a time."""
    one_at_a_time, call = threading.Lock(), interpreter.GridExecutor.__call__

    def locked(*args, **kwargs):
        with one_at_a_time:
            return call(*args, **kwargs)

    with (
        mock.patch.object(planning, "keeps_book", return_value=True),
        mock.patch.object(interpreter.GridExecutor, "__call__", locked),
    ):
        yield
