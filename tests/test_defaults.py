"""Nothing of ours takes PyTorch's default device or dtype: scripts that set them must compute the same."""

import ast
from pathlib import Path

import pytest

import joestar

PACKAGE = Path(joestar.__file__).parent
PARTS = (
    "distributed",
    "runtime",
    "kernels",
    "ops",
    "store",
    "lowering",
    "graph_api",
    "sampling",
    "fusion",
    "profile",
    "data",
    "partitioning",
    "pyg",
    "staged",
    "stages",
    "step.py",
    "api.py",
)
"""Left out are layers (``nn``), which take both defaults as those of torch.nn do, and what measures (``bench``)."""
FLOATS = {"zeros", "ones", "empty", "full", "rand", "randn", "normal", "linspace", "logspace", "eye", "empty_strided"}
"""Factories whose dtype is the default one, unless it is given."""
OTHERS = {"arange", "tensor", "as_tensor", "scalar_tensor", "randint", "randperm", "tril_indices", "triu_indices"}
EXCEPTIONS: set[str] = set()
"""Calls, as text, that may do without."""


def _files() -> list[Path]:
    roots = [PACKAGE / part for part in PARTS]
    return [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]


def _missing(call: ast.Call) -> list[str]:
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return []
    if function.value.id != "torch" or function.attr not in FLOATS | OTHERS:
        return []
    wanted = {"device", "dtype"} if function.attr in FLOATS or _is_float(call) else {"device"}
    return sorted(wanted - {keyword.arg for keyword in call.keywords})


def _is_float(call: ast.Call) -> bool:
    """Whether a factory's dtype follows from its arguments, and one of them is written as a float."""
    return any(isinstance(n, ast.Constant) and isinstance(n.value, float) for a in call.args for n in ast.walk(a))


def _within_a_device(tree: ast.AST) -> set[ast.AST]:
    """Calls within ``with torch.device(...)``, which says where they are."""
    blocks = (
        node for node in ast.walk(tree)
        if isinstance(node, ast.With) and any("torch.device(" in ast.unparse(item) for item in node.items)
    )  # fmt: skip
    return {node for block in blocks for line in block.body for node in ast.walk(line)}


@pytest.mark.every(2)
@pytest.mark.parametrize("part", PARTS)
def test_every_new_tensor_says_where_it_is_and_of_what_dtype(part):
    wrong = []
    for file in _files():
        if file.relative_to(PACKAGE).parts[0] != part:
            continue
        tree = ast.parse(file.read_text())
        placed = _within_a_device(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node) in EXCEPTIONS:
                continue
            if missing := [name for name in _missing(node) if name != "device" or node not in placed]:
                wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} lacks {missing}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_the_search_finds_what_is_missing():
    def found(text):
        return _missing(ast.parse(text).body[0].value)

    assert found("torch.zeros(3)") == ["device", "dtype"]
    assert found("torch.arange(3)") == ["device"]
    assert found("torch.arange(3, 0.5)") == ["device", "dtype"]
    assert found("torch.tensor([0.5])") == ["device", "dtype"]
    assert not found("torch.full((), 1, dtype=d, device=e)") and not found("x.new_zeros(3)")
