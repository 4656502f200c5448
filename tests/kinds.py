"""Which tests need real captures: those whose programs are of kinds that no other test captures in the real way.

``make test`` traces most programs without TorchDynamo (``captures.py``) and notes, for every test that passes, the
*kinds* of its programs: the Python that a capture follows and all that it can see, but for sizes above 1 and for what
other numbers are, and the ops that come of it. ``JOESTAR_REAL_CAPTURES=kinds`` captures the first of every kind in the
real way too, compares the two, and runs a test once more only if it brings a kind, or was not run on these very
sources. What cannot be described is of a kind of its own. ``make test-all`` captures everything in the real way.
"""

import hashlib
import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import captures
import sympy
import torch
from torch import fx

from joestar.lowering.capture import Captured, is_impure

ROOT = Path(__file__).resolve().parent.parent
NOTES = ROOT / "build" / "kinds"
"""Notes of the last runs, in a folder named by what they ran on."""
READ = ("joestar", "csrc", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "constraints.txt")
MODE = "kinds"
"""Value of JOESTAR_REAL_CAPTURES with which the first of a kind is captured in the real way."""

_notes: dict[str, set[str]] = {}
_captured: set[str] = set()
_left_out: set[str] = set()


def first_only() -> bool:
    """Whether the first of every kind is captured in the real way."""
    return os.environ.get("JOESTAR_REAL_CAPTURES") == MODE


def compared(kinds: list[str | None], quick: Captured, real: Callable[[], Captured]) -> Captured:
    """Notes kinds of a quick trace for the test that runs; gives the real capture, compared, if one is the first such.

    Only what passed the comparison counts as captured, so that ``missing`` tells of it where a test does not.
    """
    if os.environ.get("JOESTAR_REAL_CAPTURES") == "fuzz":  # a test that is none of make test's quick ones
        return quick
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    known = _notes.setdefault(test, set())
    names = []
    for kind in kinds:
        names.append(kind or f"{test}, {len(known)}")
        known.add(names[-1])
    if not first_only() or _captured.issuperset(names):
        return quick
    made = real()
    check_same(quick, made)
    _captured.update(names)
    return made


def kind_of(program, seeds, labels: list[str], gm: fx.GraphModule) -> str | None:
    """The kind of a program, the same in every process; ``None`` if it cannot be described.

    Args:
        gm: its graph, whose ops tell apart what Python decided by sizes.
    """
    try:
        _, key = captures.described(program, seeds, labels)
        return hashlib.sha1(repr((_loosely(key), _ops(gm))).encode()).hexdigest()
    except captures.UnknownError:
        return None


def _ops(gm: fx.GraphModule) -> list[str]:
    return sorted(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def check_same(quick: Captured, real: Captured) -> None:
    """Asserts that two captures of a program are one: the same ops on the same inputs, draws and writes in order."""
    known = {}
    ways = [_numbered(made, known) for made in (quick, real)]
    forms = list(known)
    (_, one), (_, other) = ways
    differ = [f"{how}: {forms[n]}" for how, s in (("quick", one - other), ("real", other - one)) for n in sorted(s)[:3]]
    assert ways[0] == ways[1], "a quick trace is not what the capture gives\n" + "\n".join(differ)


def _numbered(made: Captured, known: dict) -> tuple[tuple, set[int]]:
    """((outputs, calls in order that draw or write), all calls) by numbers: equal calls have the same."""
    numbers, roles, effects, names = {}, iter(made.roles), [], {}

    def form(node: fx.Node) -> tuple:
        if node.op == "placeholder":
            role, value = next(roles), node.meta["val"]
            if isinstance(value, torch.SymInt):
                names[value.node.expr] = sympy.Symbol(role.name)
                return "size", role.name
            return role.kind.name, role.index, id(role.tensor) if role.held else ""
        if node.op == "get_attr":
            value = getattr(made.gm, node.target)
            return "constant", str(value.dtype), tuple(value.shape), str(value.tolist())
        size = _size(node)
        if size is not None and size.free_symbols <= set(names):
            return "size", str(size.xreplace(names))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: f"%{numbers[arg]}")
        return str(node.target), repr(args), repr(sorted(kwargs.items()))

    for node in made.gm.graph.nodes:
        numbers[node] = known.setdefault(form(node), len(known))
        if node.op not in ("placeholder", "output") and is_impure(node):
            effects.append(numbers[node])
    (output,) = made.gm.graph.find_nodes(op="output")
    sizes = {number for form, number in known.items() if form[0] == "size"}
    return (numbers[output], effects), {n for node, n in numbers.items() if node.op != "placeholder"} - sizes


def _size(node: fx.Node) -> sympy.Expr | None:
    """The size that a node computes: TorchDynamo adds up what others ask a tensor for."""
    if node.target is torch.ops.aten.sym_size.int:
        value = node.args[0].meta["val"].shape[node.args[1]]
    elif node.target is torch.sym_sum:
        value = sum(fx.map_arg(node.args[0], lambda arg: arg.meta["val"]))
    else:
        return None
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _loosely(value):
    """Sizes are 0, 1 or more, and other numbers are not told apart but for 0 and 1; code goes by its place."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value if value in (0, 1, -1) else type(value).__name__
    if isinstance(value, (list, tuple)):
        return tuple(_loosely(entry) for entry in value)
    if isinstance(value, types.CodeType):
        return value.co_filename, value.co_firstlineno, value.co_name, value.co_code.hex()
    if isinstance(value, type):
        return _class(value)
    if isinstance(value, types.BuiltinFunctionType):
        return value.__module__, value.__qualname__
    return str(value)


def _class(made: type) -> tuple:
    """Its name, and what the functions of a class that a function made hold on to."""
    name = made.__module__, made.__qualname__
    if "<locals>" not in made.__qualname__:
        return name
    functions = [(key, value) for key, value in vars(made).items() if isinstance(value, types.FunctionType)]
    bases = [base for base in made.__mro__[1:] if "<locals>" in base.__qualname__]
    held = [(key, _loosely(captures._function(_unbound(value), [], None))) for key, value in functions]
    return *name, *held, *map(_class, bases)


def _unbound(function: types.FunctionType) -> types.FunctionType:
    """Without the cell of ``super()``, which holds the class itself."""
    names = function.__code__.co_freevars
    if "__class__" not in names:
        return function
    cells = [cell for name, cell in zip(names, function.__closure__, strict=True) if name != "__class__"]
    code = function.__code__.replace(co_freevars=tuple(name for name in names if name != "__class__"))
    return types.FunctionType(code, function.__globals__, closure=tuple(cells))


# --- notes, from one run to the next ---


def sources() -> str:
    """Names all that tests run on."""
    found = hashlib.sha1(f"{torch.__version__} {sys.version}".encode())
    for name in READ:
        place = ROOT / name
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        for path in files:
            if "__pycache__" not in path.parts and path.suffix != ".so":
                found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()


def keep(passed: set[str]) -> None:
    """Writes what this process noted of tests that passed, and forgets what was noted on other sources."""
    folder = NOTES / sources()
    for other in NOTES.glob("*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    lines = {test: sorted(_notes.get(test, ())) for test in sorted(passed)}
    part = folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(lines))
    part.replace(part.with_suffix(".json"))


def noted() -> dict[str, set[str]]:
    """The kinds of every test that passed on these sources."""
    found = {}
    for path in sorted((NOTES / sources()).glob("*.json")):
        for test, kinds in json.loads(path.read_text()).items():
            found.setdefault(test, set()).update(kinds)
    return found


def without_twins(items: list) -> list:
    """The tests that bring a kind, or of which nothing is noted, in order."""
    known, seen, kept = noted(), set(), []
    for item in items:
        kinds = known.get(item.nodeid)
        if kinds is None or not kinds <= seen:
            kept.append(item)
            seen |= kinds or set()
        else:
            _left_out.update(kinds)
    return kept


def found() -> tuple[list[str], list[str]]:
    """(kinds of tests that this process ran or left out, those of them that it captured in the real way)."""
    return sorted(_left_out.union(*_notes.values())), sorted(_captured)


def missing(processes: list[tuple[list[str], list[str]]]) -> set[str]:
    """Kinds that no process captured in the real way and found to be what the quick trace is."""
    wanted, captured = (set().union(*sets) for sets in zip(*processes, strict=True))
    return wanted - captured


def tests_of(kinds: set[str]) -> list[str]:
    """Tests that are noted to bring one of these kinds, or that brought one in this process."""
    known = noted()
    return sorted({test for test, brought in [*known.items(), *_notes.items()] if brought & kinds})
