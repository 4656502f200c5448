"""Where the commands print, and how their errors look."""

import functools
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from joestar.errors import JoestarError
from joestar.profile.numbers import human_bytes

__all__ = ["err", "human_bytes", "out", "plain_errors"]

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
