"""The reference names everything that is public, and its docstrings have the form that the site reads."""

import builtins
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import joestar
import joestar.data
import joestar.errors
import joestar.metrics
import joestar.nn
import joestar.store
from joestar.profile.ledger import Report
from joestar.runtime.epochs import Epoch
from joestar.runtime.fit_records import EpochRecord, History, StepRecord
from tests.docs.pages import DOCS

SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$")
PARTS = {"joestar": joestar} | {
    f"joestar.{part}": getattr(joestar, part) for part in ("nn", "data", "metrics", "store", "distributed")
}


def reference() -> str:
    """All pages of the reference."""
    return "\n".join(page.read_text() for page in sorted(DOCS.glob("api*.md")))


def functions_of(module: types.ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]


def public() -> Iterator[tuple[str, object]]:
    """Every public class and function with its public methods, by name."""
    found = {f"{part}.{name}": getattr(module, name) for part, module in PARTS.items() for name in module.__all__}
    found |= {f"joestar.fn.{name}": getattr(joestar.fn, name) for name in functions_of(joestar.fn)}
    found |= {f"joestar.errors.{name}": value for name, value in vars(joestar.errors).items() if inspect.isclass(value)}
    found |= {kind.__name__: kind for kind in (Epoch, History, EpochRecord, StepRecord, Report)}
    for name, value in sorted(found.items()):
        if isinstance(value, (types.ModuleType, tuple, dict)):
            continue
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{member}", part) for member, part in _members(value))


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for owner in kind.__mro__:
        if not owner.__module__.startswith("joestar"):
            continue
        for name, value in vars(owner).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if not name.startswith("_") and inspect.isfunction(value):
                yield name, value


PUBLIC = dict(public())


def sections(text: str) -> dict[str, list[str]]:
    """The lines of every section of a docstring, as they are indented below its name."""
    found, current = {}, None
    for line in inspect.cleandoc(text).splitlines():
        match = SECTION.match(line)
        if match:
            current = found.setdefault(match[1], [])
        elif line and not line.startswith(" "):
            current = None
        elif current is not None and line:
            current.append(line)
    return found


def names(lines: list[str]) -> list[str]:
    """The names that begin the items of a section; lines that go on from the one before are indented further."""
    heads = [line.strip() for line in lines if not line.startswith("     ")]
    found = [name for head in heads for name in (head.partition(":")[0] if ":" in head else "?").split(", ")]
    return [name.lstrip("*") for name in found]


def problems(value) -> Iterator[str]:
    """What keeps a docstring from being read as it is meant."""
    text = value.__doc__
    if not text or not text.strip():
        yield "it has no docstring"
        return
    found = sections(text)
    known = {*vars(joestar.errors), *vars(builtins)}
    if "Args" in found:
        parameters = inspect.signature(value).parameters
        yield from (f"Args: {name!r} is no parameter" for name in names(found["Args"]) if name not in parameters)
    odd = [name for name in names(found.get("Attributes", [])) if not name.isidentifier()]
    yield from (f"Attributes: {name!r} is no name" for name in odd)
    yield from (f"Raises: {name!r} is no error" for name in names(found.get("Raises", [])) if name not in known)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_read_as_they_are_meant(name):
    assert not list(problems(PUBLIC[name]))


def test_problems_of_docstrings_are_found():
    def bad(first, second):
        """What it does.

        Args:
            frist, second: a slip,
                and more.
            no colon

        Raises:
            GrahpError: another.
        """

    assert list(problems(bad)) == [
        "Args: 'frist' is no parameter", "Args: '?' is no parameter", "Raises: 'GrahpError' is no error"
    ]  # fmt: skip
    assert list(problems(lambda: None)) == ["it has no docstring"]


def test_the_site_says_of_each_name_what_a_line_says_of_several(monkeypatch):
    pytest.importorskip("griffe")  # with the site's other tools
    monkeypatch.syspath_prepend(DOCS)
    from site_docstrings import one_name_per_item

    text = """A, b: no item.

    Args:
        a, b: first
            goes on. c: third; d: fourth. e: no parameter

    Raises:
        OneError, OtherError: why. ThirdError: because
    """
    expected = """A, b: no item.

    Args:
        a: first
            goes on.
        b: first
            goes on.
        c: third;
        d: fourth. e: no parameter

    Raises:
        OneError: why.
        OtherError: why.
        ThirdError: because
    """
    assert one_name_per_item(inspect.cleandoc(text), {"a", "b", "c", "d"}) == inspect.cleandoc(expected)


def test_every_public_name_is_in_the_reference():
    text = reference()
    listed = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)) | set(re.findall(r"heading: ([\w.]+)", text))
    assert {f"joestar.{name}" for name in joestar.__all__} <= listed
    assert {*PARTS, "joestar.errors"} - {"joestar"} <= listed  # with all that their __all__ names
    source = inspect.getsource(joestar.fn)
    assert all(f"`{name}`" in text or f"\ndef {name}(" in source for name in functions_of(joestar.fn))


def test_every_part_of_the_package_is_there_after_import_joestar():
    root = Path(joestar.__file__).parent
    files = {path.stem for path in root.glob("[a-z]*.py")}
    folders = {path.parent.name for path in root.glob("[a-z]*/__init__.py")}
    assert files | folders == joestar._MODULES  # which are imported when they are first named
