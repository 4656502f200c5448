"""Where the commands print, and how their errors look."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from joestar.errors import JoestarError
from joestar.profile.numbers import human_bytes

__all__ = ["columns", "err", "human_bytes", "out", "plain_errors"]

INTERRUPTED = 130


def out() -> Console:
    """Standard output as it is now."""
    return Console()


def err() -> Console:
    """Standard error as it is now."""
    return Console(stderr=True)


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
    """A ``JoestarError`` becomes one red sentence and exit code 2; Ctrl-C becomes a word and exit code 130."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except JoestarError as error:
            err().print(f"[bold red]Error:[/] [red]{escape(str(error))}[/]", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err().print("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None

    return guarded
