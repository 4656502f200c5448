"""Where the commands print, and how their errors look."""

import functools
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from joestar.errors import JoestarError

INTERRUPTED = 130


def out() -> Console:
    """Standard output as it is now."""
    return Console()


def err() -> Console:
    """Standard error as it is now."""
    return Console(stderr=True)


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


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
