"""Layers that read rows side by side which differ by a factor per row, and what is asked of their programs."""

import functools
from dataclasses import replace

import torch
from lowering.harness import NUM_FEATURES, SEEDS, small_graph
from torch import nn

import joestar
from joestar import fn

from .graphs import ATEN, Model, mean, only

PATTERN = "row-factors"
CLEAN = "extract-select"
ON, OFF = only(CLEAN, PATTERN), only(CLEAN)
SCALED = {"factors:model_mix_weight": "results"}
FORMS_ON_A_CPU = ("rows", "results", "grouped")
OUT = 3


def pulled(block, x, reduce):
    return block.pull(fn.copy_u(x), reduce)


def factor(block, dtype=torch.float64):
    return (block.in_degrees() + 1).to(dtype).log()[:, None] + 0.5


def own(block, x):
    return x[: block.num_dst]


def pna(block, x):
    """The group of rows is itself made of several."""
    around = torch.cat([pulled(block, x, reduce) for reduce in ("mean", "max", "min")], 1)
    f = factor(block, x.dtype)
    return [own(block, x), around, around * f, around / f]


def turned(block, x):
    """The factor comes first, the rows as they are last."""
    y = mean(block, x)
    return [factor(block) * y, y]


def interleaved(block, x):
    """Two kinds of rows under the same factors: one product for both."""
    y, z, f = mean(block, x), pulled(block, x, "max"), factor(block)
    return [y, y * f, z, own(block, x), z * f]


def unlike(block, x):
    """Rows under different factors: a product each."""
    y, z, f, g = mean(block, x), pulled(block, x, "max"), factor(block), block.in_degrees()[:, None] + 2
    return [y * f, y / g, z * g, z]


def only_scaled(block, x):
    """Nothing occurs as it is."""
    return [mean(block, x) * factor(block), own(block, x) / factor(block)]


def narrow(block, x):
    """Factors in float32, rows in float64."""
    y = mean(block, x)
    return [y, y * factor(block, torch.float32), y / factor(block, torch.float32)]


def some_stay(block, x):
    """Rows that are stored scaled anyway, beside others."""
    y, f = mean(block, x), factor(block)
    scaled = y * f
    return [scaled, scaled.tanh(), y, y / f]


# form -> (products and their columns in terms of the result's, columns of the widest concatenation left)
FORMS = {
    pna: ([1, 3], 3),
    turned: ([2], 0),
    interleaved: ([2, 1], 2),
    unlike: ([2, 2], 0),
    only_scaled: ([1, 1], 0),
    narrow: ([3], 0),
    some_stay: ([1, 2], 2),
}


def layer(m, blocks, x, form):
    """The form in both layers, the same weights."""
    for block in blocks:
        x = m.back(m.mix(torch.cat(form(block, x), 1)).tanh())
    return x


def last(m, blocks, x, form):
    """The form in the last layer, over trained rows."""
    return m.back(m.mix(torch.cat(form(blocks[1], m.first(mean(blocks[0], x))), 1)).tanh())


def model(form, f=layer, out=OUT, bias=True):
    block = joestar.NeighborSampler(small_graph(), [3]).sample(small_graph().keyed(0, 0, 0), torch.tensor(SEEDS))[0]
    width = sum(rows.shape[1] for rows in form(block, torch.zeros(block.num_src, NUM_FEATURES).double()))
    torch.manual_seed(0)
    parts = {"mix": nn.Linear(width, out, bias=bias), "back": nn.Linear(out, NUM_FEATURES)}
    parts |= {"first": nn.Linear(NUM_FEATURES, NUM_FEATURES), "scale": nn.Parameter(torch.rand(48, 1))}
    return Model(functools.partial(f, form=form), **parts).double()


def chosen(case, **choices):
    """The case under these choices."""
    case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def products(case) -> list[int]:
    """Columns that the products with the weights of ``mix`` give, in the order of the graph, first layer."""
    linears = [node for node in case.program.captured.gm.graph.nodes if node.target is ATEN.linear.default]
    return [int(node.meta["val"].shape[1]) for node in linears[: len(linears) // 2]]


def places(case) -> list:
    return [place for place in case.program.places if place.pattern == PATTERN]
