"""Tensors set in slices and blocks go along with their edges and nodes into whatever is made of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.errors import GraphError, SamplerError
from joestar.graph_api import Block, Graph

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw):
    """(graph whose edges know their number, destinations)."""
    number = draw(st.integers(1, 8))
    node = st.integers(0, number - 1)
    edges = torch.tensor(draw(st.lists(st.tuples(node, node), max_size=25)), dtype=torch.int64).reshape(-1, 2).t()
    data = {"n": torch.arange(edges.shape[1]), "p": torch.ones(edges.shape[1])}
    graph = Graph.from_edge_index(edges, number, {"x": torch.arange(float(number))}, data)
    graph.edata["n"] = torch.arange(graph.num_edges)
    return graph, torch.tensor(draw(st.lists(node, min_size=1, max_size=6)))


def _mark(part, factor: int):
    """Sets values under a name of the graph's and a new one; returns ``part``."""
    number = part.edata["n"].double()
    part.edata["n"] = factor * number
    part.edata["new"] = torch.stack([number, -number], 1)
    part.dstdata["d"] = 2.0 * part.dsts
    return part


def _check(made, graph: Graph, factor: int) -> None:
    assert torch.equal(made.edata["n"], factor * made.eids.double())
    assert torch.equal(made.edata["new"], torch.stack([made.eids.double(), -made.eids.double()], 1))
    assert torch.equal(made.edata["p"], graph.edata["p"][made.eids])
    assert torch.equal(made.dstdata["d"], 2.0 * made.dsts) and "new" in made.edata and "new" in list(made.edata)


PICKS = {
    "all": lambda columns: columns.compact(),
    "all by number": lambda columns: columns.individual_sample(-1),
    "uniform": lambda columns: columns.individual_sample(2),
    "replaced": lambda columns: columns.individual_sample(3, replace=True),
    "weighted": lambda columns: columns.individual_sample(2, edge_probs="p"),
    "weighted, replaced": lambda columns: columns.individual_sample(3, edge_probs="p", replace=True),
    "together": lambda columns: columns.collective_sample(3),
    "of some sources": lambda columns: columns[torch.tensor([0]), :],
}


@pytest.mark.parametrize("pick", PICKS)
@SETTINGS
@given(case=cases())
def test_values_of_a_slice_go_along_with_the_picks(pick, case):
    graph, dsts = case
    made = PICKS[pick](_mark(graph.keyed(3)[:, dsts], 10))
    _check(made, graph, 10)
    without = graph.keyed(3)[:, dsts]
    assert without.num_edges >= 0
    assert torch.equal(made.eids, PICKS[pick](without).eids)  # the same picks, whatever is set


CUTS = {
    "kept": lambda block: block.keep_edges(block.indices % 2 == 0),
    "without loops": lambda block: block.remove_self_loops(),
    "both": lambda block: block.keep_edges(block.indices % 2 == 0).remove_self_loops(),
}


@pytest.mark.parametrize("cut", CUTS)
@SETTINGS
@given(case=cases())
def test_values_of_a_block_stay_with_the_edges_that_are_kept(cut, case):
    graph, dsts = case
    block = _mark(graph.keyed(3)[:, dsts].individual_sample(3), 7)
    block.srcdata["x"] = -block.srcdata["x"]
    made = CUTS[cut](block)
    _check(made, graph, 7)
    assert torch.equal(made.srcdata["x"], -graph.ndata["x"][made.srcs])


@pytest.fixture
def graph():
    edges = torch.tensor([[2, 0, 2, 3, 0, 1, 4, 3], [2, 1, 0, 1, 1, 3, 1, 1]])
    return Graph.from_edge_index(edges, 6, {"x": torch.arange(6.0)}, {"n": torch.arange(8), "w": torch.rand(8)})


def test_what_is_set_later_is_not_carried_back(graph):
    block = graph[:, torch.tensor([1, 2])].compact()
    block.edata["w"] = torch.arange(6.0)
    kept = block.keep_edges(block.edata["w"] > 3)
    block.edata["w"] = torch.zeros(6)
    assert kept.edata["w"].tolist() == [4.0, 5.0]
    kept.edata["w"] = torch.ones(2)
    assert block.edata["w"].tolist() == [0.0] * 6


def test_blocks_put_together_by_hand_carry_what_they_have(graph):
    block = graph[:, torch.tensor([1, 2])].compact()
    block = Block(block.indptr, block.indices, block.srcs, block.dsts, graph)
    block.edata["w"] = torch.arange(6.0)
    kept = block.keep_edges(block.edata["w"] > 3)
    assert kept.edata["w"].tolist() == [4.0, 5.0]
    with pytest.raises(GraphError, match="the edges of this block are not known"):
        kept.edata["n"]


def test_gradients_flow_through_values_that_are_carried(graph):
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    columns = graph.keyed()[:, torch.tensor([1, 2])]
    columns.edata["w"] = weight
    block = columns.individual_sample(4)
    kept = block.remove_self_loops()
    (kept.edata["w"] ** 2).sum().backward()
    wanted = torch.zeros(6, dtype=torch.float64)
    found = {number: i for i, number in enumerate(columns.eids.tolist())}
    for number in kept.eids.tolist():
        wanted[found[number]] = 2 * weight.detach()[found[number]]
    assert torch.equal(weight.grad, wanted) and (wanted > 0).any()


def test_added_loops_have_no_value_of_ones_own(graph):
    block = graph[:, torch.tensor([1, 2])].compact()
    block.edata["w"], block.edata["new"] = torch.zeros(6), torch.ones(6)
    block.srcdata["x"] = -block.srcdata["x"]
    block.dstdata["h"] = torch.ones(2, 3)
    for looped in (block.add_self_loops(), block.add_self_loops().remove_self_loops()):
        for name in ("w", "new"):
            with pytest.raises(GraphError, match=rf"edata\['{name}'\] was set before add_self_loops, and the loops"):
                looped.edata[name]
        assert torch.equal(looped.srcdata["x"], -graph.ndata["x"][block.srcs])
        assert looped.dstdata["h"] is block.dstdata["h"]
    looped = block.add_self_loops()
    looped.edata["w"] = torch.arange(7.0)
    assert looped.keep_edges(looped.edata["w"] > 4).edata["w"].tolist() == [5.0, 6.0]


MASKS = {
    "of the graph's edges": (lambda b, g: g.edata["w"] >= 0, r"one value per edge of the block, \[6\]; got \[8\]"),
    "of sources": (lambda b, g: b.srcs > 2, r"per edge of the block, \[6\]; got \[5\]"),
    "two columns": (lambda b, g: torch.ones(6, 1, dtype=torch.bool), r"got \[6, 1\]"),
    "positions": (lambda b, g: torch.arange(6), "needs a bool tensor .* got torch.int64"),
    "list": (lambda b, g: [True] * 6, "needs a bool tensor .* got list. Compute it on the block"),
    "array": (lambda b, g: (b.indices > 0).numpy(), "got ndarray"),
}


@pytest.mark.parametrize(("mask", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_are_not_of_the_edges(graph, mask, message):
    block = graph[:, torch.tensor([1, 2])].compact()
    assert block.num_edges == 6 and block.num_src == 5
    with pytest.raises(GraphError, match=message):
        block.keep_edges(mask(block, graph))


@pytest.mark.parametrize("side", ["source", "dsts", "", None])
def test_degrees_of_unknown_sides(graph, side):
    with pytest.raises(GraphError, match='graph_degrees: side must be "src" or "dst"; got '):
        graph[:, torch.tensor([1, 2])].compact().graph_degrees(side)
    with pytest.raises(GraphError, match='graph_degrees: side must be "src" or "dst"; got '):
        graph.graph_degrees(side)


@pytest.mark.parametrize("argument", ["probs", "edge_probs"])
@SETTINGS
@given(case=cases(), double=st.booleans(), some=st.booleans())
def test_weights_by_name_are_those_that_were_set_in_the_slice(argument, case, double, some):
    graph, dsts = case
    picked = []
    for name in ("p", "new", None):
        columns = graph.keyed(3)[:, dsts]
        columns = columns[torch.arange(0, graph.num_nodes, 2), :] if some else columns
        weight = (columns.edata["n"] % 3).to(torch.float64 if double else torch.float32)
        if name:
            columns.edata[name] = weight
        block = columns.individual_sample(2, **({argument: name} if name else {"slice_probs": weight}))
        picked.append(block.eids)
        assert (block.edata["n"] % 3 > 0).all() and (not name or torch.equal(block.edata[name], block.edata["n"] % 3))
    assert torch.equal(picked[0], picked[2]) and torch.equal(picked[1], picked[2])


def test_own_values_that_are_no_weights(graph):
    columns = graph.keyed(3)[:, torch.tensor([1, 2])]
    for value, words in (
        (torch.ones(6, 2), r"torch.float32 \[6, 2\]"),
        (torch.ones(6, dtype=torch.int64), "torch.int64"),
    ):
        columns.edata["w"] = value
        with pytest.raises(SamplerError, match=rf"columns.edata\['w'\] must be one-dimensional and .* got {words}"):
            columns.individual_sample(2, edge_probs="w")
