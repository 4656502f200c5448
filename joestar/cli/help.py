"""Help texts in one style, within the width of the terminal: no boxes, no broken words, types and defaults alike.

A command's docstring is its help text. After a line ``Examples:`` stand commands with a comment each, which are shown
as they are written.
"""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MARGIN = 2
WIDEST = 100
"""Columns that are used at most: longer lines are hard to read."""
FLAGS = 26
"""Columns for the flags of an option; where they need more, the text begins below."""


class Command(TyperCommand):
    """A command whose help this module writes."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(_argument(one) if one.required else f"[{_argument(one)}]" for one in arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join([*_head(self, ctx), *_panels(self, ctx)]) + "\n")


class Group(TyperGroup):
    """A command with commands below it, whose help this module writes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(command.help or "")) for name, command in commands if not command.hidden]
        formatter.write("\n".join([*_head(self, ctx), *_table("Commands", rows), *_panels(self, ctx)]) + "\n")


def option(help: str, *flags: str, metavar: str | None = None, **more: Any) -> Any:
    """``typer.Option`` with a word for what it takes: ``FILE``, ``FOLDER``, a list of choices."""
    return typer.Option(*flags, help=help, metavar=metavar, **more)


def _head(command: Any, ctx: Any) -> list[str]:
    about, _, examples = (command.help or "").partition("\nExamples:\n")
    lines = [f"{_bold('Usage:')} {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}"]
    for paragraph in about.split("\n\n"):
        lines += ["", *_wrapped(" ".join(paragraph.split()), 0)]
    if examples:
        lines += ["", _bold("Examples:")]
        lines += [f"{' ' * MARGIN}{line}" for line in textwrap.dedent(examples).strip("\n").splitlines()]
    return lines


def _panels(command: Any, ctx: Any) -> Iterator[str]:
    """Options under the headings that they name, in the order in which headings first occur; plain ones last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        argument = param.param_type_name == "argument"
        title = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
        panels.setdefault(title, []).append((_argument(param) if argument else _flags(param), _text(param)))
    plain = panels.pop("Options", [])
    for title, rows in [*panels.items(), ("Options", plain)]:
        yield from _table(title, rows)


def _argument(param: Any) -> str:
    return param.metavar or param.name.upper()


def _flags(param: Any) -> str:
    names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
    return names if param.is_flag else f"{names} {param.metavar or _noun(param.default)}"


def _noun(default: Any) -> str:
    """What an option takes that does not say so: as its default."""
    return {int: "N", float: "X"}.get(type(default), "TEXT")


def _text(param: Any) -> str:
    """The help text, and the default where there is one."""
    text = " ".join((getattr(param, "help", None) or "").split())
    shown = getattr(param, "show_default", None)
    if shown is False:
        return text
    default = shown if isinstance(shown, str) else param.default
    if isinstance(default, bool):
        default = None if not param.secondary_opts else "on" if default else "off"
    if default is None or callable(default) or not isinstance(default, str | int | float):
        return text
    return f"{text} Default: {default}."


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    """A heading, and what stands left and right; what is too wide on the left has its text below."""
    if not rows:
        return []
    left = min(FLAGS, max(len(name) for name, _ in rows)) + MARGIN
    lines = ["", _bold(f"{title}:")]
    for name, text in rows:
        below = _wrapped(text, MARGIN + left)
        fits = len(name) + MARGIN <= left
        if fits:
            below = [f"{' ' * MARGIN}{name.ljust(left)}{below[0].lstrip()}", *below[1:]] if below else [" " + name]
        lines += below if fits else [f"{' ' * MARGIN}{name}", *below]
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    space = " " * indent
    return textwrap.wrap(
        text, max(width - 1, indent + 20), initial_indent=space, subsequent_indent=space, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _first_sentence(text: str) -> str:
    sentence = " ".join(text.split("\n\n")[0].split())
    return sentence.partition(". ")[0].rstrip(".") + "."


def _bold(text: str) -> str:
    return typer.style(text, bold=True)
