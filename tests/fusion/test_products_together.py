"""Products of the same rows that a segment op reads: one product, the same numbers and gradients, and when not."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import nn

from joestar import fn

from .edge_layers import HEADS, Net, graph
from .graphs import ATEN, JOESTAR, captured, count, only, reasons
from .test_column_leaves import programs, under
from .together import captured_together

PATTERN = "products-together"
BASE = ("extract-select", "gather-update", "edge-map-reduce", "softmax-aggregate", "column-leaves")
ON, OFF = only(*BASE, PATTERN), only(*BASE)


class Several(Net):
    """With four products of the features' width, the third without a bias, and one of half the width."""

    def __init__(self, layer, layers: int = 1):
        super().__init__(layer, layers)
        wide = [nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=place != 2) for place in range(4)]
        self.a, self.b, self.c, self.d = wide
        self.half = nn.Linear(NUM_FEATURES, NUM_FEATURES // 2)


def gates(self, block, h, own):
    return block.pull(
        lambda edges: torch.sigmoid(edges.dst["k"] + edges.src["q"]) * edges.src["v"], "sum",
        src={"q": self.a(h), "v": self.b(h)}, dst={"k": self.d(own)},
    )  # fmt: skip


def one_without_bias(self, block, h, own):
    """The first that is read has none."""
    return block.pull(
        lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": self.c(h), "v": self.b(h)}
    )


def no_bias(self, block, h, own):
    """A product with itself as well: read twice, it is one."""
    rows = nn.functional.linear(h, self.a.weight), nn.functional.linear(h, self.b.weight)
    return block.pull(
        lambda edges: edges.src["q"].tanh() * edges.src["v"] + edges.src["q"], "sum",
        src={"q": rows[0], "v": rows[1]},
    )  # fmt: skip


def both_ends(self, block, h, own):
    """Three products of sources, two of destinations, read in another order than they are made."""
    one, two, three, four, five = self.a(h), self.b(own), self.c(h), self.d(own), self.b(h)
    return block.pull(
        lambda edges: (edges.src["3"] * edges.dst["4"] + edges.src["1"]).tanh() * edges.src["5"] + edges.dst["2"],
        "sum", src={"1": one, "3": three, "5": five}, dst={"2": two, "4": four},
    )  # fmt: skip


def keys_and_values(self, block, h, own):
    key, value, query = (lin(rows).unflatten(1, (HEADS, -1)) for lin, rows in ((self.a, h), (self.b, h), (self.d, own)))
    score = block.apply_edges(fn.u_add_v(key, query)).tanh().sum(-1)
    return block.pull(fn.u_mul_e(value, block.edge_softmax(score)), "sum").flatten(1)


LAYERS = {
    "gates": (gates, "dst src src+", 1),
    "one without bias": (one_without_bias, "src src+", 1),
    "no bias": (no_bias, "src src+", 1),
    "both ends": (both_ends, "src src+ src+ dst dst+", 2),
    "keys and values": (keys_and_values, "src src+ dst", 1),
}


@functools.cache
def all_layers():
    models = {name: Several(layer, 2) for name, (layer, _, _) in LAYERS.items()}
    return captured_together(models, (3, 2), graph=graph(), disable=ON)


def products(case) -> int:
    gm = case.program.captured.gm
    return count(gm, ATEN.linear.default) + count(gm, JOESTAR.gather_linear.default)


@pytest.mark.parametrize("gather", ["stored", "in-place"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.each("name")
def test_same_numbers(name, gather):
    """Seeds stand twice in a batch; the graph has self-loops, duplicate edges and nodes without any."""
    on, off = (under(all_layers()[name], disable, gather) for disable in (ON, OFF))
    _, text, groups = LAYERS[name]
    assert len(programs(on)) == 2 and all(set(text.split()) <= set(found.split()) for found in programs(on))
    assert not any("+" in found.partition("|")[0] for found in programs(off))
    assert count(on.program.captured.gm, ATEN.slice.Tensor) == count(off.program.captured.gm, ATEN.slice.Tensor)
    fewer = products(off) - products(on)
    assert fewer == 2 * (3 if name == "both ends" else groups)
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = on.eager(on.seeds(batch), step)
        same(off.exact(off.seeds(batch), step), expected, 1e-11)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


def _read_twice(self, block, h, own):
    q, v = self.a(h), self.b(h)
    y = block.pull(lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": q, "v": v})
    return y + q[: block.num_dst].tanh()


def _two_ends(self, block, h, own):
    """Of other rows, and as other kinds of leaves."""
    return block.pull(
        lambda edges: (edges.src["q"] * edges.dst["v"]).tanh(), "mean", src={"q": self.a(h)}, dst={"v": self.b(own)}
    )


def _of_other_widths(self, block, h, own):
    """A number per source is another kind of leaf."""
    rows = nn.functional.linear(h, self.a.weight[:1])
    return block.pull(
        lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": rows, "v": self.b(h)}
    )  # fmt: skip


def _computed_later(self, block, h, own):
    q = self.a(h)
    v = nn.functional.linear(h, self.b.weight * q.mean().tanh())
    return block.pull(lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": q, "v": v})


def _weight_behind(self, block, h, own):
    """The second weight is made behind the first product, of no product's result."""
    q = self.a(h)
    v = nn.functional.linear(h, (self.b.weight * 2).tanh())
    return block.pull(lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": q, "v": v})


def _result_written(self, block, h, own):
    q, v = self.a(h), self.b(h)
    v.tanh_()
    return block.pull(lambda edges: edges.src["q"].tanh() * edges.src["v"], "mean", src={"q": q, "v": v})


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (_result_written, None),
        (_read_twice, "has another reader"),
        (_two_ends, None),
        (_of_other_widths, None),
        (_computed_later, "has another reader"),
        (_weight_behind, "is computed behind"),
    ],
)
def test_must_not_fire(layer, reason):
    torch.manual_seed(0)
    known = captured(Several(layer), (3,), graph=graph(), disable=ON)
    on, off = under(known, ON), under(known, OFF)
    assert programs(on) and not any("+" in text.partition("|")[0] for text in programs(on))
    found = reasons(on, PATTERN)
    assert found == [] if reason is None else any(reason in text for text in found), found
    same(on.exact(on.seeds(), 0), on.eager(on.seeds(), 0), 1e-11)
    same(off.exact(off.seeds(), 0), on.eager(on.seeds(), 0), 1e-11)
