"""What tests for a GPU, and benchmarks, name of Joestar is there: they are not run where there is none."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("tests/gpu/*.py"), *ROOT.glob("benchmarks/*.py")])
_PATCHES = {"setattr", "delattr", "object"}
"""``monkeypatch.setattr`` and ``mock.patch.object``: of a thing and a name."""


def imported(tree: ast.Module) -> dict:
    """Name in a file -> what of Joestar it is."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names if alias.name.split(".")[0] == "joestar"]
            for name, other in names:
                module = importlib.import_module(name)
                found[other or "joestar"] = module if other else importlib.import_module("joestar")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "joestar":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def resolved(node: ast.expr, names: dict) -> tuple[object, str]:
    """(what an expression is, what it lacks); ``None`` where it is no module or class."""
    if isinstance(node, ast.Name):
        return names.get(node.id), ""
    if not isinstance(node, ast.Attribute):
        return None, ""
    owner, lacks = resolved(node.value, names)
    if lacks or not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return None, lacks
    there = hasattr(owner, node.attr)
    return (getattr(owner, node.attr), "") if there else (None, f"{owner.__name__}.{node.attr}")


def lacking(tree: ast.Module) -> list[str]:
    """What a file names that is not there."""
    names, found = imported(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.append(resolved(node, names)[1])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PATCHES:
            owner = resolved(node.args[0], names)[0] if len(node.args) > 1 else None
            name = getattr(node.args[1], "value", None) if owner is not None else None
            if (
                isinstance(name, str)
                and (inspect.ismodule(owner) or inspect.isclass(owner))
                and not hasattr(owner, name)
            ):
                found.append(f"{owner.__name__}.{name}")
    return sorted({each for each in found if each})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_of_it_is_there(path):
    assert not lacking(ast.parse(path.read_text()))


def test_what_is_gone_is_found():
    text = """
import joestar
from joestar.runtime import runner
from joestar.runtime.runner import StepRunner as Runner

def f(monkeypatch):
    joestar.compile, joestar.compiled, runner.StepRunner._gone, Runner.take.anything
    monkeypatch.setattr(Runner, "_lost", None)
    monkeypatch.setattr(runner, "Whole", None)
"""
    names = {name.rpartition(".")[2] for name in lacking(ast.parse(text))}
    assert names == {"compiled", "_gone", "_lost"}
