"""What is claimed of how large padded slots can be holds: a claim that does not drops a guard against overflow."""

import types

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from joestar.lowering.rules.bounds import _KEEPING, _LIMITS, bound
from joestar.lowering.rules.pointwise_ops import SINGULAR

from .hostile import ROWS
from .samples import SAMPLES

LARGEST = 2.0
"""Magnitude of the operands."""
FURTHER = {
    "steep leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, -3.0),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    "squares": lambda x: x.pow(2).pow(2),
    "cubes": lambda x: x.pow(2).pow(3.0),
    "huge": lambda x: (x.square() * 1e200).pow(2),
    "choices": lambda x: torch.where(x > 0, x * 3, -5.0) + 0,
    "fills": lambda x: x.masked_fill(x > 0, 7.0),
    "joined": lambda x: torch.maximum(torch.cat([x * 2, x]), torch.cat([x, x * 3])),
}


class Claims(fx.Interpreter):
    """Runs a graph and looks at what is claimed of its values, but of those whose operands are guarded first."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.context = types.SimpleNamespace(bounds=dict.fromkeys(gm.graph.find_nodes(op="placeholder"), LARGEST))
        self.wrong, self.claims = [], 0

    def run_node(self, node: fx.Node):
        value = super().run_node(node)
        guarded = node.op == "call_function" and _name(node) in SINGULAR.keys() - {"pow"}
        if guarded or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            self.context.bounds.setdefault(node, float("inf"))
            return value
        claimed = bound(self.context, node)
        self.claims += claimed < float("inf") and node.op == "call_function"
        if value.numel() and value.abs().max() > claimed * (1 + 1e-9):
            self.wrong.append(f"{node.format_node()}: {float(value.abs().max())} > {claimed}")
        return value


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name.partition("::")[2]


def claims(call, values: list) -> Claims:
    gm = make_fx(call)(*values)
    found = Claims(gm)
    found.run(*values)
    return found


def values_of(operands) -> list:
    generator = torch.Generator().manual_seed(0)
    found = []
    for each in operands:
        value = each.valid(0)
        if value.dtype.is_floating_point:
            value = (torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1) * LARGEST
            value.view(-1)[:2] = torch.tensor([LARGEST, -LARGEST])[: value.numel()]
        found.append(value)
    return found


@pytest.mark.parametrize("name", sorted((_LIMITS.keys() | _KEEPING) & SAMPLES.keys()))
def test_of_ops(name):
    for sample in SAMPLES[name]:
        found = claims(sample.call, values_of(sample.operands))
        assert not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("name", FURTHER)
def test_of_chains(name):
    x = torch.linspace(-LARGEST, LARGEST, ROWS * 4, dtype=torch.float64).view(ROWS, 4)
    found = claims(FURTHER[name], [x])
    assert not found.wrong and found.claims, "\n".join(found.wrong)
