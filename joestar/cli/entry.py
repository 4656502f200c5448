"""Where the ``joestar`` command begins and ends: signals, before anything slow is imported.

Ctrl-C and SIGTERM end it with a word and the exit code that shells expect (130, 143): while modules are imported, while
Inductor compiles, and while it trains. SIGTERM is a kind of ``KeyboardInterrupt``, so that whatever saves the work
after one saves it after the other.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

INTERRUPTED = 130
TERMINATED = 143
WORDS = {INTERRUPTED: "Interrupted.", TERMINATED: "Terminated."}
DEFECT = (
    "This is a defect of Joestar. Please report it with what stands above and the output of `joestar doctor --json`."
)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """What a shell expects of a process that this signal ended."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def guarded(run: Callable[[], Any]) -> int:
    """Runs a command to its end: its exit code, also where a signal ends it."""
    try:
        signal.signal(signal.SIGTERM, _terminate)
        run()
    except KeyboardInterrupt as interrupt:
        code = exit_code(interrupt)
        print(WORDS[code], file=sys.stderr)
        return code
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        print(DEFECT, file=sys.stderr)
        return 1
    return 0


def main() -> None:
    """The ``joestar`` command, and ``python -m joestar``."""
    leave(guarded(_command))


def leave(code: int) -> None:
    """Ends the process; after a signal at once, as what was cut off complains when the interpreter clears up."""
    if code not in WORDS:
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, which is no news now
            stream.flush()
    os._exit(code)


def _command() -> None:
    from joestar.cli.main import app

    app(prog_name="joestar")


def _terminate(number: int, frame: Any) -> None:
    raise Terminated
