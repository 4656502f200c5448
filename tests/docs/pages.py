"""Pages of the documentation, and how what they print is run."""

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

import joestar
from joestar.cli.main import app
from joestar.runtime import tuning

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "console", "shell")


class Block(NamedTuple):
    """A fenced block: ``language`` and ``mark`` of its first line, the line number of its code, its heading in bold."""

    language: str
    mark: str
    code: str
    line: int

    @property
    def needs(self) -> list[str]:
        """Modules without which a Python block is only parsed: ``python needs dgl``."""
        word, _, names = self.mark.partition(" ")
        return names.split() if word == "needs" else []

    @property
    def runs(self) -> bool:
        """Whether what a Python block needs is installed."""
        return all(importlib.util.find_spec(name) for name in self.needs)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        language, _, mark = match["info"].strip().partition(" ")
        found.append(Block(language, mark.strip(), match["code"], text[: match.start("code")].count("\n") + 1))
    return found


def text_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def commands(code: str) -> Iterator[list[str]]:
    """The words of every ``joestar`` command in a block for a shell."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["joestar"]:
            yield words[1:]


def check_command(words: list[str]) -> None:
    """Fails unless there is such a command of ``joestar``, and all of its flags exist and take such values."""
    group, name, rest = typer.main.get_command(app), "joestar", list(words)
    try:
        context = group.make_context(name, rest, resilient_parsing=True)
        while hasattr(group, "resolve_command"):
            name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            context = group.make_context(name, rest, parent=context)
    except (Exception, SystemExit) as error:  # those of click, which typer may hold within itself
        raise AssertionError(f"joestar {shlex.join(words)}: {getattr(error, 'message', error)!r}") from error


def run_commands(code: str, page: Path) -> None:
    """Runs every line of a block, each a call of ``joestar``."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        assert words[:1] == ["joestar"], f"{page.name}: only commands of joestar can be marked as runnable: {line!r}"
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, f"{page.name}: {line}\n{result.output}"


def run_python(block: Block, names: dict, page: Path) -> str:
    """What a block prints, run in the page's namespace; tracebacks show the page and its line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
    return printed.getvalue()


@contextlib.contextmanager
def quick(folder: Path) -> Iterator[None]:
    """Within ``folder``, ``joestar.compile`` on the eager backend by default, and short timings, so that pages run in
    seconds; a group of one process, where a page begins one."""
    compile = joestar.compile

    @functools.wraps(compile)
    def with_default(*args, **options):
        return compile(*args, **{"backend": "eager", **options})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SPAN", 0.0)
        patch.setattr(joestar, "compile", with_default)
        patch.chdir(folder)
        patch.setenv("JOESTAR_CACHE", str(folder))
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
            patch.setenv(name, str(value))
        yield


def run_page(page: Path, folder: Path, edit: Callable[[Block], Block | None] = lambda block: block) -> list[str]:
    """Runs a page's blocks in order; what each Python block printed (nothing, where it is only parsed).

    Args:
        folder: where the page's files go.
        edit: what is run instead of a block; ``None`` leaves it out.
    """
    module = types.ModuleType(f"joestar_docs_{page.stem}".replace("-", "_"))
    printed = []
    with quick(folder), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # TorchDynamo looks up globals by module name
        for block in filter(None, map(edit, blocks(page))):
            if block.language == "python":
                compile(block.code, str(page), "exec")
                printed.append(run_python(block, vars(module), page) if block.runs else "")
            elif block.language in SHELLS and block.mark == "run":
                run_commands(block.code, page)
            elif block.language in SHELLS:
                for words in commands(block.code):
                    check_command(words)
            elif block.mark and block.language != "text":
                (folder / block.mark).write_text(block.code)
    return printed
