"""The snippets of README and docs run as they are printed.

Marked blocks only: ``python run`` (the blocks of a page share their names), ``sh run`` (commands of ``joestar``), and
``toml NAME``, which is written to that file. Programs run on the eager backend unless a snippet says otherwise.
"""

import functools
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import joestar
from joestar.cli.main import app
from joestar.runtime import tuning

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(info string, code, line of the first code line) of every fenced block."""
    text = page.read_text()
    return [(m["info"].strip(), m["code"], text[: m.start("code")].count("\n") + 1) for m in FENCE.finditer(text)]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def run_commands(code: str, page: Path) -> None:
    """Runs every line, each a call of ``joestar``."""
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "joestar", f"{page.name}: only commands of joestar can be marked as runnable, not {line!r}"
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, f"{page.name}: {line}\n{result.output}"


def run_python(code: str, names: dict, page: Path, line: int) -> None:
    """Executes a block in the page's namespace; tracebacks show the page and its line."""
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


@pytest.fixture
def eager(monkeypatch):
    """``joestar.compile`` on the eager backend by default, and short timings, so that pages run in seconds."""
    compile = joestar.compile
    monkeypatch.setattr(tuning, "SPAN", 0.0)

    @functools.wraps(compile)
    def with_default(*args, **options):
        return compile(*args, **{"backend": "eager", **options})

    monkeypatch.setattr(joestar, "compile", with_default)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marked_snippets_run(page, eager, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    module = types.ModuleType(f"joestar_docs_{page.stem}".replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # TorchDynamo looks up globals by module name
    for info, code, line in blocks(page):
        language, _, mark = info.partition(" ")
        if language == "toml" and mark:
            Path(mark).write_text(code)
        elif info == "sh run":
            run_commands(code, page)
        elif info == "python run":
            run_python(code, vars(module), page, line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_is_marked_or_a_fragment(page):
    for info, code, line in blocks(page):
        assert info != "python", f"{page.name}:{line}: mark the block `python run`, or `text` if it cannot run:\n{code}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in LINK.finditer(FENCE.sub("", page.read_text())):
        target = page if not link["file"] else (page.parent / link["file"]).resolve()
        assert target.exists(), f"{page.name} links to {link['file']}, which is not there"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{page.name} links to #{link['anchor']} of {target.name}"
