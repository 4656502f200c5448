"""Code in folders that are called as packages are: it is the user's all the same, and asked and watched as such."""

import importlib.util
import os
import sys

import pytest
import torch

import joestar
from joestar.lowering.origin import is_framework, is_installed, is_own, is_user
from joestar.runtime.code_names import is_foreign

from .harness import NUM_CLASSES, NUM_FEATURES, small_graph

FOLDERS = ("torch", "torch/nn", "importlib", "my-packages", "torch/.venv/lib/python3.12/site-packages/theirs")
SOURCE = f"""
import torch
from torch import nn


class OneRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear({NUM_FEATURES}, {NUM_CLASSES})

    def forward(self, blocks, x):
        h = self.last(x)
        if x.size(0) <= 1:
            return h * 2
        return h[: blocks[-1].num_dst]


class Counting(OneRow):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, blocks, x):
        self.calls += 1
        return super().forward(blocks, x)


class Numbered(OneRow):
    def forward(self, blocks, x):
        block = blocks[-1].add_self_loops()
        weight = torch.arange(block.num_edges, dtype=x.dtype)[:, None]
        from joestar import fn

        return block.pull(fn.copy_e(block.apply_edges(fn.copy_u(self.last(x))) * weight), "sum")
"""
REFUSED = {"OneRow": r"num_src .* > 1", "Counting": "changes model.calls", "Numbered": "arange"}


@pytest.fixture(params=FOLDERS)
def theirs(request, tmp_path, monkeypatch):
    file = tmp_path / request.param / "of_a_user.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("of_a_user", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_for_some_batches_is_refused(theirs, name):
    model = getattr(theirs, name)().double()
    step = joestar.compile(model, joestar.NeighborSampler(small_graph(), [3]), backend="eager", warm_up=1)
    with pytest.raises(joestar.errors.CaptureError, match=REFUSED[name]) as caught:
        step(torch.tensor([3, 4]))
    assert "of_a_user.py" in str(caught.value)


def test_whose_code_it_is(theirs):
    file = theirs.__file__
    assert is_user(file) and not is_framework(file)
    installed = "site-packages" in file
    assert is_installed(file) == is_foreign(theirs.OneRow) == installed and is_own(file) != installed


@pytest.mark.parametrize("file", [torch.__file__, torch.nn.Linear.forward.__code__.co_filename, joestar.__file__])
def test_pytorch_and_joestar_are_none_of_users(file):
    assert is_framework(file) and not is_user(file) and not is_own(file)


def test_neither_is_python():
    assert not is_user(os.__file__) and not is_own(os.__file__) and not is_user(importlib.util.__file__)
