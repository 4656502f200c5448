"""Padded ids that belong to no node or edge of the batch: what they would read is NaN, and reaches no result."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar import fn
from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.lowering.rules import lookup
from joestar.sampling import NeighborSampler

from .harness import NUM_CLASSES, NUM_FEATURES, NUM_NODES, SEEDS, Case, same

pytestmark = pytest.mark.usefixtures("quick_captures")
WIDTH = 12


def graph() -> Graph:
    """Node 0 has one edge, the graph's first, from itself; both hold NaN. No batch has them."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.cat(
        [torch.zeros(2, 1, dtype=torch.int64), torch.randint(1, NUM_NODES, (2, 170), generator=generator)], 1
    )
    x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator)
    made = Graph.from_edge_index(edges, NUM_NODES, ndata={"x": x, "y": y})
    made.edata["f"] = torch.randn(171, 10, generator=generator, dtype=torch.float64)
    made.edata["w"] = torch.rand(171, generator=generator) + 0.1
    made.edata["kind"] = torch.arange(171) % 7
    made.edata["partner"] = torch.randint(1, NUM_NODES, (171,), generator=generator)
    made.edata["time"] = torch.randint(1, NUM_NODES, (171,), generator=generator).double()
    made.edata["partner"][0] = made.edata["time"][0] = 0
    made.edata["c"] = torch.complex(*torch.randn(2, 171, 10, generator=generator, dtype=torch.float64))
    assert made.indptr[1] == 1 and made.indices[0] == 0
    made.ndata["x"][0] = made.edata["f"][0] = made.edata["c"][0] = torch.nan
    return made


class Net(nn.Module):
    """``f(self, block, x)`` gives rows ``[num_dst, WIDTH]`` of the only block."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.of_edges, self.gate = nn.Linear(10, WIDTH), nn.Linear(10, WIDTH)
        self.of_nodes, self.of_own = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(NUM_FEATURES, WIDTH)
        self.score = nn.Parameter(torch.zeros(1, 3, 4))
        self.last = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, blocks, x):
        return self.last(self.f(self, blocks[0], x))


def products(m, b, x):
    """Of edge data, two of the same rows."""
    f = b.edata["f"]
    return b.pull(fn.copy_e(m.of_edges(f).tanh() * m.gate(f).sigmoid()), "mean")


def scores(m, b, x):
    """Attention whose scores are those of edge data: a vector per head times a product."""
    edge = (m.of_edges(b.edata["f"]).unflatten(1, (3, 4)) * m.score).sum(-1)
    return b.pull(fn.u_mul_e(m.of_nodes(x).unflatten(1, (3, 4)), b.edge_softmax(edge)), "sum").flatten(1)


def film(m, b, x):
    """A product of sources, which may be made per edge."""
    src, dst = {"h": m.of_nodes(x)}, {"g": m.of_own(x[: b.num_dst])}
    return b.pull(lambda edges: (edges.src["h"] * edges.dst["g"]).tanh(), "sum", src=src, dst=dst)


def found(m, b, x):
    """Rows of the sources of edges, found in the graph by the edges' positions."""
    sources = b.graph.indices[b.eids]
    return b.pull(fn.copy_e(m.of_nodes(b.graph.ndata["x"][sources]).tanh()), "sum")


def partners(m, b, x):
    """Rows of nodes that edges name, one or another by their kind."""
    kind, frame = b.edata["kind"], b.graph.ndata
    named = torch.where(kind > 2, b.edata["partner"], b.edata["time"].long())
    return b.pull(fn.copy_e(m.of_nodes(frame["x"][named]).tanh()), "sum")


def by_degree(m, b, x):
    """Rows of a table by a number that is out of range in padded entries, of a product that may read in place."""
    rows = m.of_own(b.graph.ndata["x"][b.graph_degrees("src").clamp(2, NUM_NODES) - 1])
    return b.pull(fn.copy_u(rows.tanh()), "sum")


def bags(m, b, x):
    """Means of the rows of nodes that edges name."""
    named = torch.stack([b.edata["partner"], b.edata["time"].long()], 1)
    mean, largest = (F.embedding_bag(named, b.graph.ndata["x"], mode=mode) for mode in ("mean", "max"))
    return b.pull(fn.copy_e((m.of_nodes(mean) + m.of_own(largest)).tanh()), "sum")


def complex_numbers(m, b, x):
    """Of edges."""
    return b.pull(fn.copy_e(m.of_edges(b.edata["c"].abs()).tanh()), "mean")


FORMS = {
    "products of edge data": products, "scores of edge data": scores, "film": film, "found in the graph": found,
    "partners": partners, "by degree": by_degree, "bags": bags, "complex numbers": complex_numbers,
}  # fmt: skip


def every_way(case: Case):
    """(choices, the case) under every combination of choices; one opens places for others, or takes them away."""
    case.trace()
    known, waiting = set(), [{}]
    while waiting:
        choices = waiting.pop()
        try:
            case.program = case.program.variant(replace(case.program.options, choices=choices), texts=False)
        except ConfigError:
            continue
        sites = case.program.sites
        yield choices, case
        for site in sites:
            for option in set(site.options) - {site.taken}:
                more = {**choices, site.key: option}
                if frozenset(more.items()) not in known:
                    known.add(frozenset(more.items()))
                    waiting.append(more)


def differences(name: str, **options) -> list[str]:
    held = graph()
    case = Case(Net(FORMS[name]), graph=held, sampler=NeighborSampler(held, [3], **options))
    expected, wrong = case.eager(case.seeds(SEEDS), 0), []
    assert all(value.isfinite().all() for value in (expected.loss, *expected.grads.values()))
    for how, each in every_way(case):
        try:
            same(each.padded(each.seeds(SEEDS), 0), expected, 1e-10)
        except AssertionError as error:
            wrong.append(f"{how}: {error}")
    return wrong


@pytest.mark.parametrize("probs", [None, "w"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.each("name")
def test_nothing_of_them_is_read(name, probs):
    wrong = differences(name, probs=probs)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "probs"), [("products of edge data", None), ("scores of edge data", None), ("film", "w"),
                        ("found in the graph", None), ("partners", None), ("bags", None), ("complex numbers", None)],
)  # fmt: skip
def test_the_test_can_tell(name, probs, monkeypatch):
    """Without the rules for such ids, some way of running reads NaN."""
    for rule in ("_of_strangers", "_out_of_range"):
        monkeypatch.setattr(lookup, rule, lambda index: False)
    assert any("finite" in text or "nan" in text for text in differences(name, probs=probs))
