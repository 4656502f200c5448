"""What importing and the quick commands load: names of modules, not times."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import joestar

SLOW = ("torch", "triton", "sympy", "numpy", "scipy", "jinja2")


def loaded(code: str, *arguments: str, **environment: str) -> set[str]:
    """Modules that a new interpreter has loaded after ``code``, which may end the process."""
    report = "import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr)); "
    done = subprocess.run(
        [sys.executable, "-c", report + code, *arguments], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return set(done.stderr.rpartition("LOADED ")[2].split())


COMMAND = "from joestar.cli.entry import main; main()"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["bench", "step", "--help"], ["info"], ["tran"]],
    ids=" ".join,
)  # fmt: skip
def test_quick_commands_load_nothing_slow(arguments):
    assert not loaded(COMMAND, *arguments) & set(SLOW)


def test_completion_loads_nothing_slow():
    asked = {"_JOESTAR_COMPLETE": "complete_bash", "COMP_WORDS": "joestar tr", "COMP_CWORD": "1"}
    assert not loaded(COMMAND, **asked) & set(SLOW)


def test_a_program_loads_what_it_uses():
    """One process: the package adds itself only, graphs and their ops do without the compiler."""
    code = (
        "import torch; before = set(sys.modules); import joestar; "
        "assert set(sys.modules) - before == {'joestar'}, set(sys.modules) - before; "
        "joestar.load('cora'); joestar.nn.GraphSAGE; joestar.NeighborSampler; joestar.Block; joestar.fn; "
        "assert torch.ops.joestar.spmm.default"
    )
    assert not loaded(code) & {"torch._dynamo", "torch._inductor"}


@pytest.mark.parametrize("name", joestar.__all__)
def test_every_public_name_is_there_and_stays(name):
    value = getattr(joestar, name)
    assert getattr(joestar, name) is value and vars(joestar)[name] is value
    assert name in dir(joestar)


def test_names_for_type_checkers_are_those_that_are_there():
    tree = ast.parse(Path(joestar.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {}
    for statement in block.body:
        for alias in statement.names:
            typed[alias.asname or alias.name] = (statement.module, alias.name)
    assert set(typed) == set(joestar.__all__)
    for name, (module, there) in typed.items():
        assert getattr(import_module(module), there) is getattr(joestar, name), name
    assert Path(joestar.__file__).with_name("py.typed").exists()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'joestar' has no attribute 'compil'"):
        joestar.compil  # noqa: B018


def test_the_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "joestar", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"joestar {joestar.__version__}\n")


FORKS = """
import importlib, os, sys
import torch, torch._dynamo, torch._inductor.compile_fx, scipy.special, rich.console, typer, numpy
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    os.wait()
"""


PACKAGE = Path(joestar.__file__).parent


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def looks_up_an_op(tree: ast.Module) -> bool:
    """Whether ``torch.ops`` is read when the module is imported, not in a function."""
    waiting, functions = list(tree.body), (ast.FunctionDef, ast.Lambda)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.aten":
            continue  # PyTorch's own are always there
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops":
            return True
        if not isinstance(node, functions):
            waiting += ast.iter_child_nodes(node)
    return False


def test_who_looks_up_an_op_imports_what_registers_it():
    registers = ("joestar.ops", "joestar.lowering", "joestar.fusion", "joestar.graph_api", "joestar.runtime")
    found = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    users = {name for name, tree in found.items() if looks_up_an_op(tree)}
    assert len(users) > 20
    for name in users:
        imported = {node.module for node in ast.walk(found[name]) if isinstance(node, ast.ImportFrom)}
        assert name.startswith(registers) or any((module or "").startswith(registers) for module in imported), name


@pytest.mark.slow
def test_any_module_may_be_the_first():
    """Whatever looks up an op must have it registered, also where nothing else was imported before."""
    names = [name_of(path) for path in sorted(PACKAGE.rglob("*.py")) if "torch.ops" in path.read_text()]
    done = subprocess.run([sys.executable, "-c", FORKS, *names], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_compile_imports_inductor_when_it_is_needed():
    """It takes seconds, and is imported while other things are waited for, with care of Ctrl-C."""
    assert not loaded("import joestar; joestar.compile") & {"torch._inductor.pattern_matcher", "networkx"}
