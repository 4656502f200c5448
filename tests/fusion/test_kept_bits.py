"""Aggregations that store which entries are kept: where, what stays the same, and when they must not."""

import copy
import functools
import operator

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, Case, same
from torch import fx

import joestar.nn as jnn
from joestar.fusion import run_passes

from .graphs import JOESTAR, again, captured, count, only, reasons

PATTERN = "kept-bits"
BASE = ("extract-select", "sample-gather-aggregate", "aggregate-update", "own-aggregate", "relu-dropout",
        "dropout-aggregate", "backward-format")  # fmt: skip
ON, OFF = only(*BASE, PATTERN), only(*BASE)
MODELS = {
    "aggregate_cat": lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 3, 4, dropout=0.5),
    "aggregate_rows": lambda: jnn.GIN(NUM_FEATURES, 8, 3, 4, dropout=0.5),
    "sum": lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 3, 4, dropout=0.5, aggr="sum"),
}
EACH = pytest.mark.parametrize("name", MODELS)


@functools.cache
def known(name: str) -> Case:
    """The traced model."""
    torch.manual_seed(0)
    return captured(MODELS[name]().double(), (3, 2, 2), disable=ON)


def make(name: str, disable=ON, **choices) -> Case:
    """The traced model, under choices ``hop0="stored"``."""
    return again(known(name), disable, {f"mask:{hop}": option for hop, option in choices.items()})


def kept(gm: fx.GraphModule) -> int:
    return sum(count(gm, getattr(JOESTAR, f"aggregate_{form}_kept").default) for form in ("cat", "rows"))


@EACH
def test_before_and_after(name):
    op = "aggregate_rows" if name == "aggregate_rows" else "aggregate_cat"
    before = make(name)
    after = make(name, hop1="stored")
    assert reasons(before, PATTERN).count("recomputed is chosen") == 2
    masks = {site.key: (site.options, site.default) for site in before.program.sites if site.kind == "mask"}
    assert masks == dict.fromkeys(("mask:hop0", "mask:hop1"), (("recomputed", "stored"), "recomputed"))
    plain, stored = getattr(JOESTAR, op).default, getattr(JOESTAR, f"{op}_kept").default
    for case, new in ((before, 0), (after, 1)):
        gm = case.program.captured.gm
        assert count(gm, stored) == new and count(gm, plain) >= 2 - new
    (node,) = (n for n in after.program.captured.gm.graph.nodes if n.target is stored)
    (rows,) = node.users
    assert rows.target is operator.getitem and rows.args[1] == 0


@EACH
def test_same_numbers(name):
    on = make(name, hop0="stored", hop1="stored")
    off = make(name, OFF)
    assert kept(on.program.captured.gm) == 2
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_by_default_on_a_gpu_only():
    case = make("aggregate_cat")
    assert kept(case.program.captured.gm) == 0
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    run_passes(gm, list(case.program.lowered_roles), ON, device="cuda", sizes=case.program.sizes)
    assert kept(gm) == 2


def test_must_not_fire():
    plain = captured(jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4), disable=ON)
    assert "no ReLU and dropout are applied where rows are read" in reasons(plain, PATTERN)
    other = again(known("aggregate_cat"), choices={"backward:hop1": "scatter"}).program
    assert "the backward pass scatter is chosen" in [p.detail for p in other.places if p.pattern == PATTERN]
    assert kept(other.captured.gm) == 0


def test_rows_without_gradients():
    model = MODELS["aggregate_cat"]().double().requires_grad_(False)
    model.convs[-1].requires_grad_(True)
    case = captured(model, (3, 2, 2), disable=ON)
    assert reasons(case, PATTERN).count("no gradient flows to the aggregated rows") == 2


@pytest.mark.parametrize("weighted", [False, True])
def test_the_ops_and_their_gradients(weighted):
    """Against the ops that read the rows again."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(6, 37, dtype=torch.float64, generator=random, requires_grad=True)
    bits = torch.randint(-(2**31), 2**31, (6, 2), generator=random, dtype=torch.int32)
    structure = torch.tensor([0, 2, 2, 5]), torch.tensor([4, 0, 3, 3, 5])
    own = torch.tensor([0.3], dtype=torch.float64), torch.randn(5, dtype=torch.float64, generator=random)
    for reduce in ("sum", "mean"):
        for op, args in (("aggregate_cat", ()), ("aggregate_rows", own[::-1] if weighted else (None, own[0]))):
            rest = (*args, bits, 2.5, reduce)
            expected = getattr(JOESTAR, op)(*structure, x, *rest)
            ours, words = getattr(JOESTAR, f"{op}_kept")(*structure, x, *rest)
            assert torch.equal(ours, expected) and not words.requires_grad
            shape = torch.randn(expected.shape, dtype=torch.float64, generator=random)
            grads = [torch.autograd.grad((rows * shape).sum(), x)[0] for rows in (ours, expected)]
            torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
            assert torch.autograd.gradcheck(
                lambda v, op=op, rest=rest: getattr(JOESTAR, f"{op}_kept")(*structure, v, *rest)[0], x
            )


def test_the_rows_are_not_saved():
    x = torch.randn(3, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda value: value):
        JOESTAR.aggregate_cat_kept(
            torch.tensor([0, 1]), torch.tensor([2]), x, torch.full((3, 1), -1, dtype=torch.int32), 2.0, "sum"
        )
    assert [list(value.shape) for value in saved] == [[2], [1], [3, 1]]
