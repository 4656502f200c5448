"""Infinities in padded rows, and sets without a row: neither makes a gradient NaN that is finite in plain PyTorch."""

import math

import pytest
import torch
from torch import nn

from joestar import fn
from joestar.graph_api import Graph

from .harness import BATCHES, NUM_CLASSES, NUM_FEATURES, NUM_NODES, WIDTH, Case, Rows, check, curved, same, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")

LINEAR = nn.Linear(WIDTH, WIDTH)


def everywhere() -> Graph:
    """Every node has an edge from itself."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.cat(
        [torch.randint(0, NUM_NODES, (2, 100), generator=generator), torch.arange(NUM_NODES).expand(2, -1)], 1
    )
    x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator)
    return Graph.from_edge_index(edges, NUM_NODES, ndata={"x": x, "y": y})


def pooled(m, b, h):
    """Edges weighted by a softmax over all of the batch's."""
    rows = b.apply_edges(fn.copy_u(h))
    return h + (rows[:, :1].softmax(0) * m.linear(rows)).sum(0)


def largest(m, b, h):
    """A maximum of each destination's edges, by hand."""
    places = b.apply_edges(fn.copy_v(torch.arange(b.num_dst, dtype=h.dtype)[:, None])).long()
    empty = torch.full((b.num_dst, WIDTH), -math.inf, dtype=h.dtype)
    rows = empty.scatter_reduce(0, places.expand(-1, WIDTH), b.apply_edges(fn.copy_u(h)), "amax")
    return h + m.linear(rows).sum(0)


def test_a_batch_without_edges_has_a_softmax_of_nothing():
    graph = small_graph(isolated=10)
    check(Rows(pooled, linear=LINEAR), ((3, 9, 22), (40, 41)), loss=curved, graph=graph)


@pytest.mark.parametrize("full", [False, True])
def test_a_maximum_by_hand_begins_with_minus_infinity(full):
    more = {"factor": 1.0, "extra": 0, "tight": True} if full else {}
    check(Rows(largest, linear=LINEAR), BATCHES, loss=curved, graph=everywhere(), **more)


class Near(nn.Module):
    """Destinations attend to others, rows of zeros to such rows alone: padding to none of the real ones."""

    def __init__(self, additive: bool):
        super().__init__()
        self.first, self.values, self.last = (nn.Linear(*s) for s in ((NUM_FEATURES, 4), (4, 4), (4, NUM_CLASSES)))
        self.additive = additive

    def forward(self, blocks, x):
        rows = blocks[0].pull(fn.copy_u(self.first(x)), "mean")
        nothing = (rows == 0).all(1)
        far = nothing[:, None] != nothing[None, :]
        scores = rows @ rows.T
        masked = scores.masked_fill(far, -math.inf)
        scores = scores + torch.where(far, -math.inf, 0.0) if self.additive else masked
        return self.last(scores.softmax(-1) @ self.values(rows)) + scores.logsumexp(-1)[:, None]


@pytest.mark.parametrize("additive", [False, True])
def test_attention_among_rows_of_a_batch(additive):
    graph = everywhere()
    case = Case(Near(additive), graph=graph)
    for step, batch in enumerate(BATCHES):
        seeds = case.seeds(batch)
        same(case.padded(seeds, step), case.eager(seeds, step), 1e-10)


INFINITE = {
    "where": lambda m, has, h: torch.where(has, h, -math.inf),
    "of the condition": lambda m, has, h: torch.where(~has, math.inf, h),
    "a filled mask": lambda m, has, h: h.masked_fill(~has, -math.inf),
    "not a number": lambda m, has, h: h.masked_fill(~has, math.nan),
    "in place": lambda m, has, h: h.clone().masked_fill_(~has, -math.inf),
    "added": lambda m, has, h: h + torch.where(has, 0.0, -math.inf),
    "a factor": lambda m, has, h: h * torch.where(has, 1.0, math.inf),
    "filled": lambda m, has, h: torch.where(has, h, torch.full_like(h, -math.inf)),
    "a begun maximum": lambda m, has, h: torch.where(has, h, h.new_full((h.shape[0], WIDTH), -math.inf)),
    "a number in a buffer": lambda m, has, h: torch.where(has, h, m.zero.log()),
    "a mask of one": lambda m, has, h: h.masked_fill(~has, m.zero.log()),
    "a row in a buffer": lambda m, has, h: torch.where(has, h, m.zeros.log()),
    "of its own": lambda m, has, h: torch.where(has, h, torch.tensor(-math.inf, dtype=h.dtype)),
    "added from a buffer": lambda m, has, h: h + torch.where(has, m.zeros, m.zeros.log()),
}


@pytest.mark.parametrize("how", INFINITE)
def test_fills_of_infinity_stay_out_of_gradients_of_weights(how):
    """Padded rows have no edges: what is not a number there must not reach the weights behind it."""

    def operation(m, b, h):
        has = b.pull(fn.copy_u(torch.ones(b.num_src, WIDTH, dtype=h.dtype)), "sum") > 0
        return h + m.linear(INFINITE[how](m, has, b.pull(fn.copy_u(h), "mean"))).sum(0)

    parts = {"zero": torch.zeros((), dtype=torch.float64), "zeros": torch.zeros(WIDTH, dtype=torch.float64)}
    check(Rows(operation, linear=LINEAR, **parts), BATCHES, loss=curved, graph=everywhere())
