"""Where the commands print, and how their errors look."""

import contextlib
import functools
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from joestar.cli.entry import WORDS, exit_code
from joestar.errors import JoestarError
from joestar.profile.numbers import human_bytes

__all__ = ["columns", "err", "human_bytes", "out", "plain_errors", "say", "say_path"]


def out() -> Console:
    """Standard output as it is now."""
    return Console()


def err() -> Console:
    """Standard error as it is now."""
    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """A sentence, wrapped between words; never with a single word on its last line."""
    console.print("\n".join(balanced(text, console.width)), highlight=False, markup=False, soft_wrap=True)


def say_path(console: Console, text: str) -> None:
    """A line that may hold a path: whole, so that it can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def said_by_joestar(console: Console) -> Iterator[None]:
    """What the package logs within (``logging.getLogger("joestar")``, level INFO) is said, line by line."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for line in record.getMessage().splitlines():
                say(console, line)

    logger, handler = logging.getLogger("joestar"), Said(logging.INFO)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def balanced(text: str, width: int) -> list[str]:
    """Lines of at most ``width``; where the last would hold one word only, all are somewhat shorter."""
    indent = " " * (len(text) - len(text.lstrip()))
    for narrower in range(width, width // 2, -1):
        lines = textwrap.wrap(
            text, narrower, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False
        )
        if len(lines) < 2 or len(lines[-1].split()) > 1:
            return lines
    return lines


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first ``left`` columns flush left, the others right; nothing is cut.

    Columns without a value (empty or ``-``) are left out.
    """
    used = [i for i in range(len(headers)) if any(row[i] not in ("", "-") for row in rows)]
    widths = {i: max(len(line[i]) for line in (headers, *rows)) for i in used}
    lines = []
    for line in (headers, *rows):
        cells = (line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]) for i in used)
        lines.append("  ".join(cells).rstrip())
    return lines


def plain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A ``JoestarError`` becomes one red sentence and exit code 2.

    Ctrl-C and SIGTERM become a word and exit code 130 or 143.
    """

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except JoestarError as error:
            err().print(f"[bold red]Error:[/] [red]{escape(str(error))}[/]", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as interrupt:
            code = exit_code(interrupt)
            err().print(WORDS[code])
            raise typer.Exit(code) from None

    return guarded
