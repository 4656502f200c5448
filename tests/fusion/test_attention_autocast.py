"""Attention under autocast, which has scores in float32: both fused forms fire as they do without it.

Not in float16, where products stay in front of sums (``test_float16_range.py``): scores are no products of rows there.
"""

import functools
from dataclasses import replace

import pytest
import torch
from captures import cheaper, cheapest
from lowering.harness import NUM_FEATURES, SEEDS, seeded, small_graph

import joestar
import joestar.nn as jnn
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .graphs import ALL, JOESTAR, count

IN_PLACE, OWN = JOESTAR.gather_attend_linear.default, JOESTAR.attend_own.default
SEEN, KEY = torch.tensor(SEEDS), step_key(0, 0, 0, "cpu")


def traced(floats: torch.dtype) -> Program:
    """Two layers of two heads, products behind sums and the table read in place; no autocast yet."""
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].to(floats)
    model = seeded(jnn.GAT(NUM_FEATURES, 8, 2, 4, heads=2, dropout=0.0)).to(floats)
    program = Program("logits", model, joestar.NeighborSampler(graph, [3, 2]), None, Options("eager", ()))
    with cheaper(cheapest):
        program.trace(SEEN.to(graph.indices.dtype), KEY)
    return program


@functools.cache
def outcome(autocast: torch.dtype | None, passes: bool, floats: torch.dtype = torch.float32):
    """(results, gradients, fused calls) with all passes, under these choices, or without any."""
    first = traced(floats)
    program = first.variant(replace(first.options, autocast=autocast, disable_passes=() if passes else ALL))
    for kind, option in (("order", "aggregate-first"), ("attention", "in-place")) if passes else ():
        new = {site.key: option for site in program.sites if site.kind == kind}
        program = program.variant(replace(program.options, choices={**program.options.choices, **new}))
    y = program.exact(SEEN.to(program.graph.indices.dtype), KEY)[0][0]
    parameters = dict(program.model.named_parameters())
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), list(parameters.values()))
    fused = tuple(count(program.captured.gm, op) for op in (IN_PLACE, OWN))
    return y.detach(), dict(zip(parameters, grads, strict=True)), fused


def off(value: torch.Tensor, exact: torch.Tensor) -> float:
    """As a share of the largest entry, or of 1."""
    return (value.double() - exact).abs().max().item() / max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_fires_and_is_as_exact_as_without_passes(autocast):
    (ours, ours_grads, fused), (plain, plain_grads, none) = outcome(autocast, True), outcome(autocast, False)
    assert (fused, none) == ((0, 0) if autocast is torch.float16 else (1, 1), (0, 0))
    exact, exact_grads, _ = outcome(None, False, torch.float64)
    unit = torch.finfo(autocast or torch.float32).eps
    assert ours.dtype == plain.dtype
    assert off(ours, exact) <= 2 * off(plain, exact) + unit
    for name, grad in exact_grads.items():
        assert ours_grads[name].dtype == plain_grads[name].dtype
        assert off(ours_grads[name], grad) <= 2 * off(plain_grads[name], grad) + 4 * unit, name
