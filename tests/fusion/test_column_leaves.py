"""Leaves of segment ops that are columns of one matrix: where, the same numbers and gradients, and when not."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

from joestar import fn

from .edge_layers import HEADS, Net, graph
from .graphs import ATEN, JOESTAR, captured, count, only, reasons
from .together import captured_together

PATTERN = "column-leaves"
BASE = ("extract-select", "edge-map-reduce", "softmax-aggregate")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


class Columns(Net):
    """With products of two and three times the width."""

    def __init__(self, layer, layers: int = 1):
        super().__init__(layer, layers)
        self.two, self.three = nn.Linear(NUM_FEATURES, 2 * NUM_FEATURES), nn.Linear(NUM_FEATURES, 3 * NUM_FEATURES)


def film(self, block, h, own, cut=lambda rows: rows.chunk(2, -1)):
    """The second half of the columns is read first."""
    beta, gamma = cut(self.two(own))
    return block.pull(
        lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).relu(), "mean",
        src={"h": h}, dst={"g": gamma, "b": beta},
    )  # fmt: skip


def by_slices(self, block, h, own):
    return film(self, block, h, own, lambda rows: (rows[:, :NUM_FEATURES], rows[:, -NUM_FEATURES:]))


def by_split(self, block, h, own):
    return film(self, block, h, own, lambda rows: rows.split([NUM_FEATURES, NUM_FEATURES], 1))


def keys_and_values(self, block, h, own):
    """Attention: columns of sources' rows, in heads."""
    key, value = (rows.unflatten(1, (HEADS, -1)) for rows in self.two(h).chunk(2, 1))
    query = self.dst(own).unflatten(1, (HEADS, -1))
    score = block.apply_edges(fn.u_add_v(key, query)).tanh().sum(-1)
    return block.pull(fn.u_mul_e(value, block.edge_softmax(score)), "sum").flatten(1)


def three(self, block, h, own):
    """Both ends at once."""
    a, b, c = self.three(h).chunk(3, 1)
    beta, gamma = self.two(own).chunk(2, 1)
    return block.pull(
        lambda edges: (edges.src["c"] * edges.dst["g"] + edges.src["a"]).tanh() * edges.src["b"] + edges.dst["b"],
        "sum", src={"a": a, "b": b, "c": c}, dst={"g": gamma, "b": beta},
    )  # fmt: skip


LAYERS = {
    "film": (film, "dst dst+ src | mul 1 2"),
    "slices": (by_slices, "dst dst+"),
    "split": (by_split, "dst dst+"),
    "keys and values": (keys_and_values, "src src+ dst"),
    "three": (three, "src src+ src+ dst dst+"),
}


@functools.cache
def all_layers():
    models = {name: Columns(layer, 2) for name, (layer, _) in LAYERS.items()}
    return captured_together(models, (3, 2), graph=graph(), disable=ON)


def under(case, disable=ON, gather="stored"):
    """The case after the passes, messages and attention fused, features stored or read by products in place."""
    case = copy.copy(case)
    case.program = case.program.variant(replace(case.program.options, disable_passes=disable, choices={}))
    kinds = {site.kind for site in case.program.sites}
    kind = "softmax" if "softmax" in kinds else "message"
    choices = {site.key: "fused" for site in case.program.sites if site.kind == kind}
    choices |= {site.key: gather for site in case.program.sites if site.kind == "gather"}
    case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def programs(case):
    nodes = case.program.captured.gm.graph.find_nodes(op="call_function", target=JOESTAR.segment.default)
    return [node.args[3] for node in nodes]


@pytest.mark.parametrize("name", LAYERS)
def test_same_numbers(name):
    """Seeds stand twice in a batch; the graph has self-loops, duplicate edges and nodes without any."""
    on, off = (under(all_layers()[name], disable) for disable in (ON, OFF))
    assert len(programs(on)) == 2 and all(LAYERS[name][1] in text for text in programs(on)), programs(on)
    assert len(programs(off)) == 2 and not any("+" in text for text in programs(off))
    gm = on.program.captured.gm
    assert count(gm, ATEN.chunk.default) == count(gm, ATEN.split_with_sizes.default) == 0
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def _read_twice(self, block, h, own):
    beta, gamma = self.two(own).chunk(2, 1)
    return gamma.tanh() + block.pull(
        lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).relu(), "mean",
        src={"h": h}, dst={"g": gamma, "b": beta},
    )  # fmt: skip


def _some_columns(self, block, h, own):
    beta, _, gamma = self.three(own).chunk(3, 1)
    return block.pull(
        lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).relu(), "mean",
        src={"h": h}, dst={"g": gamma, "b": beta},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(_read_twice, "have another reader"), (_some_columns, "the leaves are not all columns of linear")],
)
def test_must_not_fire(layer, reason):
    torch.manual_seed(0)
    case = under(captured(Columns(layer), (3,), graph=graph(), disable=ON))
    assert programs(case) and not any("+" in text for text in programs(case))
    assert any(reason in found for found in reasons(case, PATTERN))


def test_nothing_is_looked_at_without_shared_columns():
    case = under(captured(Columns(lambda self, block, h, own: film(self, block, h, own, lambda rows: (own, own))), (3,),
                          graph=graph(), disable=ON))  # fmt: skip
    assert programs(case) and reasons(case, PATTERN) == []
