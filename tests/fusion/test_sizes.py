"""Sizes that are plain integers: full graphs inside a program, one-row operands, broadcasting, constant destinations.

Every pass compares sizes to find out whether rows are those of the same nodes. In a block all sizes are symbols; of a
full graph they are integers, of which two may be equal by accident, or differ where symbols never would.
"""

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, NUM_NODES, SEEDS, Case, small_graph
from torch import nn

from joestar import fn
from joestar.errors import CaptureError

from .graphs import Model
from .together import cases_together, check_each

BATCHES = (SEEDS, (5,))


def pull(m, b, rows, reduce="sum"):
    return b[0].graph.pull(fn.copy_u(rows), reduce)


def attended(m, b, own):
    """One head of attention over the full graph; ``own`` takes the destinations' rows of the heads."""
    h = m.lin(m.emb).unflatten(-1, (2, 3))
    graph = b[0].graph
    scores = fn.u_add_v((h * m.att).sum(-1), own((h * m.att).sum(-1)))
    alpha = graph.edge_softmax(F.leaky_relu(graph.apply_edges(scores), 0.2))
    return graph.pull(fn.u_mul_e(h, alpha), "sum").flatten(1)


def on_edges(m, b, message, reduce="sum"):
    graph = b[0].graph
    return graph.pull(fn.copy_e(message(graph.apply_edges(fn.copy_u(m.emb)))), reduce)


def wide(m, *parts):
    return F.linear(torch.cat(parts, 1), m.wide.weight[:, : sum(part.shape[1] for part in parts)])


OPERATIONS = {
    # factor-aggregate, gather-aggregate: a factor per row, or one for all
    "rows times [1, 1]": lambda m, b: pull(m, b, m.emb * m.one),
    "rows times [n, 1]": lambda m, b: pull(m, b, m.emb * m.col),
    "rows times [1, F]": lambda m, b: pull(m, b, m.emb * m.row),
    "rows times [1, 1] slice of [n, 1]": lambda m, b: pull(m, b, m.emb * m.col[:1]),
    "sums times [1, 1]": lambda m, b: pull(m, b, m.emb, "mean") * m.one,
    "sums times [n, 1]": lambda m, b: pull(m, b, m.emb) * m.col,
    "products of sums times [1, 1]": lambda m, b: m.lin(pull(m, b, m.emb)) * m.one,
    "products of sums times [n, 1]": lambda m, b: m.lin(pull(m, b, m.emb)) * m.col,
    "[1, F] times [n, 1]": lambda m, b: pull(m, b, m.row * m.col),
    "constant rows times [1, 1]": lambda m, b: m.lin(pull(m, b, m.data * m.one)),
    "constant rows times [n, 1]": lambda m, b: m.lin(pull(m, b, m.data * m.col)),
    # own-aggregate
    "plus the first row": lambda m, b: pull(m, b, m.emb) + m.emb[:1],
    "plus all rows": lambda m, b: pull(m, b, m.emb) + m.emb[:NUM_NODES],
    "plus a factor times the first row": lambda m, b: pull(m, b, m.emb) + m.emb[:1] * m.one,
    "plus [1, 1, 1] times all rows": lambda m, b: (pull(m, b, m.emb) + m.emb[:NUM_NODES] * m.one[None])[0],
    "plus [1, 1] times all rows": lambda m, b: pull(m, b, m.emb) + m.emb * m.one,
    # aggregate-update
    "products, own of the first row": lambda m, b: m.lin(pull(m, b, m.emb, "mean")) + m.other(m.emb[:1]),
    "products, own of all rows": lambda m, b: m.lin(pull(m, b, m.emb, "mean")) + m.other(m.emb[:NUM_NODES]),
    "products, own of one column": lambda m, b: m.lin(pull(m, b, m.emb, "mean")) + m.single(m.emb[:NUM_NODES]),
    "products, sums of one column": lambda m, b: m.single(pull(m, b, m.emb, "mean")) + m.lin(m.emb[:NUM_NODES]),
    # bias, relu-dropout
    "a row for a bias": lambda m, b: m.plain(pull(m, b, m.emb)) + m.row,
    "a vector for a bias": lambda m, b: m.plain(pull(m, b, m.emb)) + m.vec,
    "one number for a bias": lambda m, b: (m.plain(pull(m, b, m.emb)) + m.vec[:1]).relu(),
    # row-factors
    "side by side, [1, 1] and [n, 1]": lambda m, b: wide(m, m.emb, m.emb * m.col, m.emb / m.col),
    "side by side, factors of the first row": lambda m, b: wide(m, m.emb, m.emb * m.col[:1], m.emb / m.one),
    # spmm-gemm-order
    "product first, the first row too": lambda m, b: pull(m, b, (h := m.plain(m.emb)), "mean") + m.other(h[:1]),
    "product first, scaled by [1, 1]": lambda m, b: pull(m, b, m.plain(m.emb) * m.one, "mean"),
    "product first, scaled by [n, 1]": lambda m, b: pull(m, b, m.plain(m.emb) * m.col, "mean"),
    # attention, gather-attention
    "attention": lambda m, b: attended(m, b, lambda own: own),
    "attention, all rows sliced": lambda m, b: attended(m, b, lambda own: own[:NUM_NODES]),
    # products of a vector, or of rows with heads: no matrices
    "product with a vector": lambda m, b: m.lin(m.emb) * F.linear(pull(m, b, m.emb, "mean"), m.vec)[:, None],
    "sums of products with a vector": lambda m, b: m.lin(m.emb) * pull(m, b, F.linear(m.emb, m.vec))[:, None],
    "products with a vector, side by side": lambda m, b: m.emb * (
        F.linear(pull(m, b, m.emb, "mean"), m.vec) + F.linear(m.emb, m.vec)
    )[:, None],
    "product of heads": lambda m, b: pull(m, b, m.heads(m.emb.view(-1, 2, 3)).flatten(1)),
    "product of heads, weighted": lambda m, b: b[0].graph.pull(
        fn.u_mul_e(m.heads(m.emb.view(-1, 2, 3)), b[0].graph.apply_edges(fn.copy_u(m.emb[:, :2]))), "sum"
    ).flatten(1),
    "heads in two ways": lambda m, b: b[0].graph.pull(
        fn.u_mul_e((h := m.plain(m.emb)).unflatten(-1, (2, 3)), b[0].graph.apply_edges(fn.copy_u(m.emb[:, :2]))), "sum"
    ).flatten(1) + b[0].graph.pull(
        fn.u_mul_e(h.unflatten(-1, (-1, 2)), b[0].graph.apply_edges(fn.copy_u(m.emb[:, :3]))), "sum"
    ).flatten(1),
    "sums of all": lambda m, b: pull(m, b, m.emb) * torch.sum(m.plain(m.emb).unflatten(-1, (2, 3)) * m.att, dim=None),
    # edge-map-reduce
    "edges plus a vector": lambda m, b: on_edges(m, b, lambda e: (e + m.vec).relu()),
    "edges plus a row": lambda m, b: on_edges(m, b, lambda e: (e + m.row).relu(), "mean"),
    "edges plus [1, 1]": lambda m, b: on_edges(m, b, lambda e: (e * m.one + m.one).tanh()),
    "edges plus the first edge": lambda m, b: on_edges(m, b, lambda e: (e + e[:1]).relu()),
    "edges times [E, 1]": lambda m, b: on_edges(m, b, lambda e: (e * e[:, :1]).relu()),
    "edges times one edge's number": lambda m, b: on_edges(m, b, lambda e: (e * e[:1, :1]).relu()),
    "edges in heads": lambda m, b: on_edges(
        m, b, lambda e: (e.unflatten(1, (2, 3)) * m.att + m.vec[:3]).relu().flatten(1)
    ),
    # multi-aggregate, simplify
    "several": lambda m, b: pull(m, b, m.emb, "mean") + pull(m, b, m.emb, "max") * m.one + pull(m, b, m.emb * m.emb),
    "views": lambda m, b: pull(m, b, m.emb[:, :].view(NUM_NODES, 2, 3).reshape(-1, NUM_FEATURES)[:NUM_NODES]),
    "one row": lambda m, b: pull(m, b, m.emb) * pull(m, b, m.emb)[:1] + m.plain(m.row),
}  # fmt: skip
"""Rows ``[num_nodes, F]``."""

IN_BLOCKS = {
    "products": lambda m, b: m.lin(b[0].pull(fn.copy_u(h := b[0].srcdata["x"]), "mean")) + m.other(h[: b[0].num_dst]),
    "plus own rows": lambda m, b: m.lin(b[0].pull(fn.copy_u(h := b[0].srcdata["x"]), "sum") + h[: b[0].num_dst]),
    "products, own of one column": lambda m, b: m.lin(
        b[0].pull(fn.copy_u(m.lin(b[0].srcdata["x"])), "mean")
    ) + m.single(m.lin(b[0].srcdata["x"])[: b[0].num_dst]),
    "one column": lambda m, b: m.one * b[0].pull(fn.copy_u(m.single(b[0].srcdata["x"]) * m.one), "mean") + m.row,
    "rows times [1, 1]": lambda m, b: m.lin(b[0].pull(fn.copy_u(b[0].srcdata["x"] * m.one), "mean")),
    "sums times [1, 1]": lambda m, b: m.lin(b[0].pull(fn.copy_u(b[0].srcdata["x"]), "sum")) * m.one,
    "own times [1, 1, 1]": lambda m, b: (
        b[0].pull(fn.copy_u(h := m.lin(b[0].srcdata["x"])), "sum") + h[: b[0].num_dst] * m.one[None]
    )[0],
}  # fmt: skip
"""Rows ``[num_dst, F]`` of the only block, from operands of one row or one column."""


def around(operation, full_graph: bool = True):
    """A model around rows of all nodes, or of the destinations."""

    def rows(m, b, x):
        h = operation(m, b)
        return torch.index_select(h, 0, b[-1].dsts) if full_graph else h

    generator = torch.Generator().manual_seed(8)

    def constant(*shape):
        return nn.Buffer(torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5)

    n, width = NUM_NODES, NUM_FEATURES
    return Model(
        rows, emb=nn.Parameter(torch.zeros(n, width)), data=constant(n, width), one=constant(1, 1), col=constant(n, 1),
        row=nn.Parameter(torch.zeros(1, width)), vec=nn.Parameter(torch.zeros(width)),
        att=nn.Parameter(torch.zeros(1, 2, 3)), lin=nn.Linear(width, width), other=nn.Linear(width, width),
        plain=nn.Linear(width, width, bias=False), heads=nn.Linear(3, 3, bias=False),
        single=nn.Linear(width, 1), wide=nn.Linear(3 * width, width),
    )  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.fuzz)])
def test_full_graphs_inside_a_program(half):
    """Equal to plain Python: exactly, padded, and whatever passes choose."""
    models = {name: around(operation) for name, operation in list(OPERATIONS.items())[half::2]}
    if not half:
        models |= {f"block, {name}": around(operation, full_graph=False) for name, operation in IN_BLOCKS.items()}
    cases = cases_together(models, fanouts=(3,))
    wrong = check_each(cases, BATCHES)
    assert not wrong, "\n".join(wrong)
    fired = {place.pattern for case in cases.values() for place in case.program.places if place.fired}
    blocks = set() if half else {"own-aggregate", "aggregate-update"}
    assert {"factor-aggregate", "spmm-gemm-order", "attention"} | blocks <= fired


def test_dropout_of_a_full_graphs_rows():
    """Masks are keyed by the node; aggregations apply them where rows are read."""
    models = {
        "rows": around(lambda m, b: pull(m, b, F.dropout(m.lin(m.emb), 0.5))),
        "activated": around(lambda m, b: pull(m, b, F.dropout(m.lin(m.emb).relu(), 0.5))),
        "and the first row": around(
            lambda m, b: pull(m, b, (h := F.dropout(m.lin(m.emb).relu(), 0.5))) + m.other(h[:1])
        ),
    }
    wrong = check_each(cases_together(models, fanouts=(-1,)), BATCHES, plain=False)
    assert not wrong, "\n".join(wrong)


class Anchored:
    """Every step samples around the same few nodes, too: destinations whose number is a constant."""

    def __init__(self, graph):
        self.graph, self.anchors = graph, torch.arange(8, dtype=graph.indices.dtype)

    def sample(self, graph, seeds):
        anchor = graph[:, self.anchors].individual_sample(3)
        block = graph[:, seeds].individual_sample(3)
        block.anchor = anchor
        return [block]


def test_constant_destinations():
    """Rows around constants are aggregated like any others; their own rows are found by id, not by position."""

    def rows(m, b, x):
        anchor = b[0].anchor
        table = anchor.graph.ndata["x"]
        sums = anchor.pull(fn.copy_u(torch.index_select(table, 0, anchor.srcs)), "mean")
        summary = (m.lin(sums) + torch.index_select(table, 0, anchor.dsts)).mean(0)
        return b[0].pull(fn.copy_u(x), "mean") + summary

    def first_rows(m, b, x):
        anchor = b[0].anchor
        own = torch.index_select(anchor.graph.ndata["x"], 0, anchor.srcs)[: anchor.num_dst]
        return b[0].pull(fn.copy_u(x), "mean") + own.mean(0)

    graph = small_graph()
    case = Case(Model(rows, lin=nn.Linear(NUM_FEATURES, NUM_FEATURES)), sampler=Anchored(graph), graph=graph)
    assert not check_each({"constant": case}, BATCHES)
    with pytest.raises(CaptureError, match=r"holds only for some sizes of sampled sets.*num_src"):
        Case(Model(first_rows), sampler=Anchored(graph), graph=graph).trace()
