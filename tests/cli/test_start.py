"""What importing and the quick commands load: names of modules, not times."""

import os
import subprocess
import sys

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
    import ast
    from importlib import import_module
    from pathlib import Path

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
