"""Sample-structural: self-loops and degrees of a block from one op, the same ones, and when not."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import JOESTAR, Model, captured, captured_each, count, mean, only, reasons

PATTERN = "sample-structural"
ON, OFF = only("extract-select", PATTERN), only("extract-select")


def loops_only(m, blocks, x):
    """The degrees are not asked for."""
    return mean(blocks[1], mean(blocks[0].add_self_loops(), x))


def degrees(m, blocks, x):
    for block in blocks:
        looped = block.add_self_loops()
        x = looped.pull(fn.copy_u(x * looped.out_degrees().double()[:, None]), "sum")
        x = x / looped.in_degrees().double()[:, None]
    return x


MODELS = {
    "loops": (lambda: Model(loops_only), 1),
    "degrees": (lambda: Model(degrees), 2),
    "gcn": (lambda: jnn.GCN(NUM_FEATURES, 8, 2, 4, dropout=0.3), 2),
    "gat": (lambda: jnn.GAT(NUM_FEATURES, 8, 2, 4, heads=2, dropout=0.3), 2),
}


@pytest.mark.parametrize(("make", "fired"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.every(2)
def test_same_numbers(make, fired):
    """Seeds stand twice in a batch, and the graph has self-loops and duplicate edges."""
    on, off = captured_each(make(), disables=(ON, OFF))
    assert count(on.program.captured.gm, JOESTAR.block_self_loops.default) == fired
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_before_and_after():
    before, after = (case.trace() for case in captured_each(Model(degrees), disables=(OFF, ON)))
    for op, old, new in (
        ("add_self_loops", 2, 0),
        ("out_degrees", 2, 0),
        ("edge_dst", 2, 0),
        ("block_self_loops", 0, 2),
    ):
        target = getattr(JOESTAR, op).default
        assert (count(before, target), sum(n.target is target and bool(n.users) for n in after.graph.nodes)) == (
            old,
            new,
        )


def test_must_not_fire_on_other_blocks():
    """A block made by hand, from edges that were filtered."""
    graph = small_graph()

    class Filtered:
        def __init__(self):
            self.graph = graph

        def sample(self, graph, seeds):
            block = graph[:, seeds].individual_sample(4)
            return [block.keep_edges(block.indices % 3 > 0).add_self_loops()]

    cases = [captured(Model(lambda m, b, x: m.lin(mean(b[0], x)), lin=nn.Linear(NUM_FEATURES, NUM_FEATURES)),
                      graph=graph, sampler=Filtered(), disable=disable) for disable in (ON, OFF)]  # fmt: skip
    assert reasons(cases[0], PATTERN) == ["the block was not sampled and compacted"]
    same(cases[0].padded(cases[0].seeds(), 0), cases[1].exact(cases[1].seeds(), 0), 1e-12)


def test_the_op_finds_loops_by_global_ids():
    """Node 7 stands twice among the destinations; its edges to itself go, whichever row they are in."""
    indptr, indices = torch.tensor([0, 2, 4, 5]), torch.tensor([0, 2, 0, 3, 2])
    srcs = torch.tensor([7, 7, 9, 5])
    looped, edges, out = JOESTAR.block_self_loops(
        indptr, indices, srcs[indices], srcs[:3], torch.tensor(3), 4
    )  # fmt: skip
    assert looped.tolist() == [0, 2, 4, 5]
    assert edges.tolist()[:5] == [2, 0, 3, 1, 2]
    assert out.tolist() == [1, 1, 2, 1]
