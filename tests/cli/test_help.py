"""Help texts and tables at the widths of terminals: whole words, nothing cut."""

import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import joestar
from joestar.cli import doctor
from joestar.cli import info as facts
from joestar.cli.config import FIELDS
from joestar.cli.console import balanced
from joestar.cli.main import app

COMMANDS = [
    (), ("train",), ("evaluate",), ("predict",), ("profile",), ("info",), ("doctor",), ("partition",), ("plan",),
    ("bench",), ("bench", "step"), ("bench", "user"), ("bench", "inference"), ("bench", "epoch"), ("bench", "kernels"),
    ("bench", "passes"),
    ("generate",), ("convert",),
]  # fmt: skip
WIDTHS = (80, 120)


def shown(width, *arguments):
    done = CliRunner().invoke(
        app, list(arguments), env={"COLUMNS": str(width), "NO_COLOR": "1"}, catch_exceptions=False
    )
    return done.output


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "joestar")
def test_help_fits_and_says_every_word_whole(command, width):
    lines = shown(width, *command, "--help").splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line or "[default" in line or "<" in line]
    examples = [line for line in lines if line.startswith("  joestar ")]
    assert bool(examples) == (command != ("bench",))
    comments = {line.index("#") for line in examples if "#" in line}
    assert len(comments) <= 1, "comments stand below each other"
    words = set(re.findall(r"[a-z]+", " ".join(shown(1000, *command, "--help").split())))
    assert set(re.findall(r"[a-z]+", " ".join(lines))) == words


def test_every_command_is_tested():
    def names(group, prefix=()):
        for name, command in group.commands.items():
            yield (*prefix, name)
            yield from names(command, (*prefix, name)) if hasattr(command, "commands") else ()

    import typer

    assert {(), *names(typer.main.get_command(app))} == set(COMMANDS)


def test_types_and_defaults_are_in_one_style():
    text = "\n".join(shown(120, *command, "--help") for command in COMMANDS)
    takes = {line.split()[1] for line in text.splitlines() if re.match(r"  --[a-z-]+ \S+( |$)", line)}
    allowed = re.compile(
        r"N|X|TEXT|FILE|FOLDER|DATASET|NAMES?|SIZE|REGEX|N,N,\.\.\.|[a-z0-9]+(\|[a-z0-9]+)+|[A-Z][a-z]+\b.*"
    )
    assert all(allowed.fullmatch(word) for word in takes if not word.startswith("--")), takes
    train = " ".join(shown(80, "train", "--help").split())
    for name, spec in FIELDS.items():
        if spec.default is not None and not isinstance(spec.default, bool):
            assert f"Default: {spec.default}." in train, name
    assert "--deterministic, --no-deterministic" in train


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_are_not_cut(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    long = "word " * 60
    console = Console(record=True, width=width, force_terminal=False)
    doctor.print_table([doctor.Check("a long name of a check", "warn", long, long), *doctor.examine()], console)
    described = facts.describe(joestar.load("cora")) | {"name": "a-name-of-a-dataset" * 9}
    facts.print_table(described, console)
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert text.count("word") == 120


def test_no_line_ends_with_a_word_alone():
    text = "program 'train': simplify 2x, extract-select 2x; padding up to 39%; made in 1.0 s"
    for width in range(24, 100):
        lines = balanced(text, width)
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == text
        assert len(lines) == 1 or len(lines[-1].split()) > 1, (width, lines)


def test_flags_are_lower_case():
    """Typer 0.27 took a metavar for the name of a flag."""

    def flags(command, path=()):
        for name, inner in getattr(command, "commands", {}).items():
            yield from flags(inner, (*path, name))
        yield from ((path, flag) for param in command.params for flag in param.opts if flag.startswith("-"))

    found = list(flags(typer.main.get_command(app)))
    assert len(found) > 100 and [each for each in found if each[1] != each[1].lower()] == []
