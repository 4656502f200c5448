"""PyTorch's private API is read in one module, which says what there must be."""

import ast
import re
from pathlib import Path

import pytest
import torch

import joestar
from joestar import torch_private

PACKAGE = Path(joestar.__file__).parent
SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.stem != "torch_private"}
PRIVATE = re.compile(r"torch(\.\w+)*\.(_(?!_)\w*|experimental)(\.|$)")
MAY_LACK = {"driver_version"}
"""What PyTorch's builds for CPUs do not have; who asks for it expects that."""


def private(text: str) -> list[str]:
    """Private modules that a source imports, and private names that it reads from ``torch``."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return sorted({name for name in found if PRIVATE.match(name) and not name.startswith("torch.ops.")})


def test_the_search_finds_them():
    assert private("import torch._inductor.config\nfrom torch.fx.experimental.proxy_tensor import make_fx")
    assert private("import torch\nx = torch._C._set_grad_enabled") and private("from torch.utils import _pytree")
    assert not private("import torch\nx = torch.__version__, torch.ops.aten._to_copy.default, torch.fx.Node")


def test_nobody_else_reads_it():
    found = [f"{path.relative_to(PACKAGE)}: {name}" for path, text in SOURCES.items() for name in private(text)]
    assert not found, f"put these into joestar/torch_private.py: {found}"


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_every_name_is_there_and_used(name):
    assert name in MAY_LACK or getattr(torch_private, name) is not None
    read = re.compile(rf"torch_private(\.| import [^\n]*\b| import \([^)]*\b){name}\b")
    assert any(map(read.search, SOURCES.values())), "nobody reads it any more"


def test_another_name_is_none_of_it():
    with pytest.raises(AttributeError, match="nothing"):
        torch_private.nothing  # noqa: B018
    assert torch_private.OpOverload is type(torch.ops.aten.mm.default)
