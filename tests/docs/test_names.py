"""What pages name is there: files, attributes and arguments, flags, targets of make, variables, options, passes."""

import ast
import contextlib
import fnmatch
import functools
import importlib
import inspect
import re
import shlex
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import joestar
from joestar.api import SLACK
from joestar.cli.main import app
from joestar.fusion import PASSES
from joestar.fusion.table import BACKEND
from joestar.graph_api.columns import Columns
from joestar.profile.ledger import Report
from joestar.runtime.epochs import Epoch
from joestar.runtime.fit_records import EpochRecord, History
from joestar.staged.step import StagedStep
from tests.docs.pages import DOCS, PAGES, ROOT, SHELLS, blocks, check_command, text_of

CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./<-])[\w*][\w*./-]*\.(?:py|hpp|cpp)\b(?:::\w+)?")
VARIABLE = re.compile(r"\bJOESTAR_[A-Z_]+")
READERS = {"train.py", "squared_norms.py"}
"""Files that readers make."""
OBJECTS = {
    "joestar": joestar, "kernels": joestar.kernels, "locks": joestar.locks, "compile": joestar.compile,
    "fn": joestar.fn, "init": joestar.distributed.init,
    "step": StagedStep, "Step": joestar.Step, "fit": joestar.Step.fit, "evaluate": joestar.Step.evaluate,
    "predict": joestar.Step.predict, "graph": joestar.Graph, "Graph": joestar.Graph, "block": joestar.Block,
    "Block": joestar.Block, "columns": Columns, "history": History, "record": EpochRecord, "epoch": Epoch,
    "report": Report, "Checkpoints": joestar.Checkpoints, "Partitioning": joestar.Partitioning,
    "NeighborSampler": joestar.NeighborSampler, "LargeBatch": joestar.LargeBatch, "Partitions": joestar.Partitions,
    "GCN": joestar.nn.GCN, "LayerNorm": joestar.nn.LayerNorm, "NodeEmbedding": joestar.nn.NodeEmbedding,
}  # fmt: skip
"""What pages call by these names."""
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def spans(page: Path) -> list[str]:
    """What a page has in backquotes; of tables that compare, not the other library's column."""
    text = text_of(page)
    if page.stem.startswith("from-"):
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    return CODE.findall(text)


@functools.cache
def programs() -> dict[str, Path]:
    """All source files, by their paths with a slash in front."""
    folders = [ROOT / folder for folder in ("benchmarks", "csrc", "examples", "joestar", "tests")]
    files = [file for folder in folders for end in ("py", "hpp", "cpp") for file in folder.rglob(f"*.{end}")]
    return {f"/{file.relative_to(ROOT)}": file for file in files}


@functools.cache
def variables() -> set[str]:
    """Variables of the environment, and options of CMake, that a program names."""
    files = [ROOT / "CMakeLists.txt", *programs().values()]
    return {name for file in files for name in VARIABLE.findall(file.read_text())}


def missing_files(text: str) -> Iterator[str]:
    """Programs that a text names by the end of their path, perhaps with a test behind, and that are not there."""
    for match in FILE.finditer(text):
        path, _, test = match[0].partition("::")
        files = [file for name, file in programs().items() if fnmatch.fnmatch(name, f"*/{path}")]
        found = any(f"def {test}(" in file.read_text() for file in files) if test else files
        if not found and Path(path).name not in READERS:
            yield match[0]


def written_out(text: str) -> str:
    """A text whose `::test` has the file that it names last in front."""
    file = ""

    def named(match: re.Match) -> str:
        nonlocal file
        file = match[1] or file
        return f"`{file}::{match[2]}`" if match[2] else match[0]

    return re.sub(r"`([\w*/.-]+\.py)?(?:::(\w+))?`", named, text)


def owner_of(kind: type, name: str):
    """What ``kind`` has under a name: a function, or ``None`` for what is known to instances only."""
    if hasattr(kind, name):
        return getattr(kind, name)
    sources = [inspect.getsource(owner) for owner in kind.__mro__ if owner.__module__.startswith("joestar")]
    if any(re.search(rf"\bself\.{name}\b[^\n]*=|^    {name}:", source, re.MULTILINE) for source in sources):
        return None
    raise AttributeError(f"{kind.__name__} has no {name}")


def part_of(module: types.ModuleType, name: str):
    """What a module has under a name, or a module within it."""
    if not hasattr(module, name):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{module.__name__}.{name}")
    return getattr(module, name)


def resolve(node: ast.expr):
    """The object that an expression names, ``None`` where that is not known; its calls have arguments that exist."""
    if isinstance(node, ast.Name):
        return OBJECTS.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        if inspect.isclass(owner):
            return owner_of(owner, node.attr)
        return part_of(owner, node.attr) if inspect.ismodule(owner) else None
    if isinstance(node, ast.Call):
        function = resolve(node.func)
        names = [keyword.arg for keyword in node.keywords if keyword.arg]
        parameters = inspect.signature(function).parameters if callable(function) and names else {}
        if names and parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            wrong = [name for name in names if name not in parameters]
            if wrong:
                raise AttributeError(f"{function.__qualname__} takes no {', '.join(wrong)}")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            resolve(child)
    return None


def wrong_name(code: str) -> str | None:
    """What an expression in backquotes names and is not there."""
    try:
        if not FILE.fullmatch(code):
            resolve(ast.parse(code, mode="eval").body)
    except SyntaxError:  # it is no expression
        return None
    except AttributeError as error:
        return f"{code}: {error}"
    return None


def flags_of(command=None) -> set[str]:
    """Flags of all commands of ``joestar``."""
    command = command or typer.main.get_command(app)
    own = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    return own.union(*map(flags_of, getattr(command, "commands", {}).values()))


def shell_lines(page: Path) -> Iterator[list[str]]:
    """The words of what a page shows for a shell, in blocks or in backquotes."""
    shown = [block.code.replace("\\\n", " ") for block in blocks(page) if block.language in (*SHELLS, "text")]
    for line in [*"\n".join(shown).splitlines(), *spans(page)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        yield words[next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words)) :]


def check_line(words: list[str]) -> None:
    """Fails where a command of ``joestar``, a target of make, a program or one of its flags is not there."""
    match words:
        case ["joestar", name] if not name.startswith("-"):
            assert name in typer.main.get_command(app).commands
        case ["joestar", *rest] if rest and "--help" not in rest and rest != ["--version"]:
            check_command(rest)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"
        case ["python" | "torchrun", *rest] if any(word.startswith(("benchmarks/", "examples/")) for word in rest):
            at = next(i for i, word in enumerate(rest) if word.endswith(".py"))
            flags = [word for word in rest[at:] if word.startswith("--")]
            source = "".join(file.read_text() for file in (ROOT / rest[at]).parent.glob("*.py"))
            assert not [flag for flag in flags if f'"{flag}"' not in source], shlex.join(words)


def tables(page: str, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    text = (DOCS / page).read_text().partition(f"# {heading}\n")[2]
    rows = re.search(r"^\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


@by_page
def test_files_are_there(page):
    assert not list(missing_files(written_out(page.read_text())))


@by_page
def test_folders_are_there(page):
    named = re.findall(r"`((?:joestar|tests|csrc|benchmarks|docs|examples)/[\w/-]+)`", text_of(page))
    below = re.findall(r"\| `([a-z_]+/)`", text_of(page)) if page.stem == "reliability" else []
    assert not [folder for folder in named if not (ROOT / folder).is_dir()]
    assert not [folder for folder in below if not (ROOT / "tests" / folder).is_dir()]


@by_page
def test_variables_are_read_by_something(page):
    assert set(VARIABLE.findall(page.read_text())) <= variables()


@by_page
def test_attributes_and_arguments_are_there(page):
    assert not list(filter(None, map(wrong_name, spans(page))))


@by_page
def test_commands_targets_and_flags_are_there(page):
    for words in shell_lines(page):
        check_line(words)
    known = "".join(file.read_text() for file in (ROOT / "benchmarks").glob("*.py"))
    flags = {words[0] for words in map(str.split, spans(page)) if words and words[0].startswith("--")} - {"--help"}
    assert not [flag for flag in flags - flags_of() if f'"{flag}"' not in known]


def test_options_of_compile_are_in_the_quickstart_with_their_defaults():
    parameters = inspect.signature(joestar.compile).parameters
    shown = {name: default for cell, default, *_ in tables("quickstart.md", "Options of `compile`")
             for name in CODE.findall(cell)}  # fmt: skip
    others = {"model", "sampler", "loss_fn", "optimizer"}
    staged = {name for cell, *_ in tables("larger-than-the-gpu.md", "Choices") for name in re.findall(r"^`(\w+)", cell)}
    assert shown.keys() | staged | others == parameters.keys()
    for name, default in shown.items():
        is_value = isinstance(parameters[name].default, (int, float, str)) and parameters[name].default is not False
        assert default == (f'`"{parameters[name].default}"`' if isinstance(parameters[name].default, str)
                           else str(parameters[name].default)) or not is_value, name  # fmt: skip


def test_the_slack_is_said_as_it_is():
    assert f"else {SLACK}." in joestar.compile.__doc__
    (shown,) = (default for cell, default, *_ in tables("quickstart.md", "Options of `compile`") if cell == "`slack`")
    assert shown.startswith(f"{SLACK},")


def test_the_table_of_passes_is_that_of_the_compiler():
    listed = [name for cell, *_ in tables("passes.md", "Passes") for name in CODE.findall(cell)]
    assert listed == [*(row.name for row in PASSES), *BACKEND]


def test_the_architecture_names_every_folder_and_header():
    page = (DOCS / "architecture.md").read_text()
    house = page.partition("## The house")[2].partition("\n## ")[0]
    folders = {file.parent.name for file in (ROOT / "joestar").glob("*/__init__.py")}
    assert {name for name in folders if f"`joestar/{name}`" not in house} == set()
    passes = {file.parent.name for file in (ROOT / "joestar" / "fusion").glob("*/__init__.py")} - {"match"}
    assert {name for name in passes if f"`{name}`" not in house} == set()
    kernels = page.partition("csrc/include/joestar/          ")[2].partition("csrc/tests/")[0]
    listed = {
        name for names in re.findall(r"^    (\w+(?:, \w+)*) {2,}", kernels, re.MULTILINE) for name in names.split(", ")
    }
    assert listed == {file.stem for file in (ROOT / "csrc" / "include" / "joestar").glob("*.hpp")}


def test_kinds_of_choices_are_those_that_passes_ask_for():
    sources = "".join(file.read_text() for name, file in programs().items() if name.startswith("/joestar/fusion/"))
    listed = {
        name for cell, *_ in tables("tuning.md", "Tuning a training step") for name in re.findall(r"`(\w+):", cell)
    }
    assert listed == set(re.findall(r'\.choose\(\s*"(\w+)"', sources)) | {"own", "beside"}


def test_what_is_not_there_is_found():
    assert list(missing_files("`fuzz/test_none.py`, `joestar/api.py`, `table.py`")) == ["fuzz/test_none.py"]
    named = written_out("`docs/test_names.py::tables`, `::written_out`, `::none`")
    assert list(missing_files(named)) == ["docs/test_names.py::none"]
    assert wrong_name("step.evaluates(x)") and wrong_name("joestar.nn.GraphSage") and wrong_name("compile(wram_up=3)")
    assert wrong_name("joestar.data.from_csv(x)") and wrong_name("print(step.raport())")
    assert wrong_name("step.traffic.alone") is None and wrong_name("compile(..., warm_up=3)") is None
    for line in ("make trian", "joestar profil", "joestar train --batchsize 3", "python examples/own_loop.py --none"):
        with pytest.raises(AssertionError):
            check_line(line.split())
