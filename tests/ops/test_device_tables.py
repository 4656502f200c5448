"""Ops whose kernels keep tables on the device between calls declare it: nobody may run two of them at once."""

import ast
import pathlib

from torch import ops

import joestar
from joestar.ops.registry import OPS, keeps_tables

KERNELS = pathlib.Path(joestar.__file__).parent / "kernels"
SHARED = {"scratch.current_tables"}
"""Where calls find what others left: of the thread and stream, or of a CUDA graph."""
RANKS = "joestar.ops.step.ranks"
HARMLESS = {"gpu_race._TABLES": "written once, before a capture; only read by kernels"}


CHANGES = ("setdefault", "update", "append", "pop", "add", "clear", "popitem", "extend")


def modules() -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text()) for path in KERNELS.glob("*.py")}


def kept(tree: ast.Module) -> set[str]:
    """Names under which a module keeps something between calls: containers, and functions that remember results."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Dict, ast.List, ast.Set)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
            names.add(node.name)
    return names


def written(tree: ast.Module, name: str) -> bool:
    """Whether a function changes a container: by an index, a method or ``global``; remembering functions always do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is(node.value, name):
            return True
        if isinstance(node, ast.Attribute) and _is(node.value, name) and node.attr in CHANGES:
            return True
    return False


def _is(node, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def users(state: str) -> set[str]:
    """Functions of the kernels that reach a name, directly or through others (by name, whatever the module)."""
    module, name = state.split(".")
    reads = {}
    for stem, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                reads.setdefault(node.name, set()).update(
                    names if stem == module or not name.startswith("_") else names - {name}
                )
    found = {name}
    while more := {function for function, names in reads.items() if names & found} - found:
        found |= more
    return found - {name}


def test_every_state_of_a_kernel_module_is_known():
    """What calls leave for others is in ``scratch``; anything else is harmless, for a reason that is written down."""
    found = {f"{stem}.{name}" for stem, tree in modules().items() if stem.startswith("gpu")
             for name in kept(tree) if written(tree, name)}  # fmt: skip
    assert found == HARMLESS.keys()


def test_ops_that_share_tables_say_so():
    reaching = set().union(*map(users, SHARED)) & OPS.keys()
    keeping = {op.name for op in OPS.values() if op.keeps_tables and op.reference.__module__ != RANKS}
    assert reaching == keeping
    assert keeping == {"compact", "collective_sample"}, "as the ordering of streams is tested for"


def test_ops_that_wait_for_other_ranks_are_ordered_likewise():
    of_ranks = {op.name: op.keeps_tables for op in OPS.values() if op.reference.__module__ == RANKS}
    assert of_ranks.keys() >= {"row_parts", "over_ranks", "over_ranks_grad"}
    assert all(of_ranks.values())


def test_asking_an_op():
    assert keeps_tables(ops.joestar.compact.default)
    assert not keeps_tables(ops.joestar.spmm.default)
    assert not keeps_tables(ops.aten.mm.default)
