"""Slices of a graph, weighted and collective sampling, and edge data on the way into blocks."""

import pytest
import torch
from torch.testing import assert_close

from joestar.errors import GraphError, SamplerError
from joestar.graph_api import Block, Graph, fn
from joestar.graph_api import probs as probs_module

EDGES = torch.tensor([[2, 0, 2, 3, 0, 1, 4, 3], [2, 1, 0, 1, 1, 3, 1, 1]])


@pytest.fixture
def graph():
    """Six nodes, the last one isolated; node 1 has the in-neighbours 0, 3, 0, 4, 3."""
    weight = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    ndata = {"x": torch.arange(12.0).view(6, 2), "q": torch.tensor([1.0, 0.0, 2.0, 3.0, 0.5, 1.0])}
    return Graph.from_edge_index(EDGES, 6, ndata, {"w": weight, "n": torch.arange(8)})


def _edges(structure, sources=None) -> list:
    """(source, destination, number) of every edge; sources under their global ids."""
    dst = torch.repeat_interleave(torch.arange(structure.num_dst), structure.in_degrees())
    src = structure.indices if sources is None else sources[structure.indices]
    ends = zip(src.tolist(), structure.dsts[dst].tolist(), strict=True)
    return [(*pair, number) for pair, number in zip(ends, structure.edata["n"].tolist(), strict=True)]


def _of(graph, keep) -> list:
    """Edges of the whole graph for which ``keep(src, dst)``."""
    return [edge for edge in _edges(graph) if keep(*edge[:2])]


# --- slices ---------------------------------------------------------------------------------------------------------


def test_slices_hold_the_edges_between_the_given_nodes(graph):
    srcs, dsts = torch.tensor([3, 0, 5, 0]), torch.tensor([1, 5, 0])
    for part, keep in (
        (graph[:, dsts], lambda u, v: v in (0, 1, 5)),
        (graph[srcs, :], lambda u, v: u in (0, 3, 5)),
        (graph[srcs, dsts], lambda u, v: u in (0, 3, 5) and v in (0, 1, 5)),
        (graph[:, dsts][srcs, :], lambda u, v: u in (0, 3, 5) and v in (0, 1, 5)),
        (graph[:, :], lambda u, v: True),
        (graph[srcs, :][torch.tensor([0]), :], lambda u, v: u == 0),
        (graph[torch.tensor([], dtype=torch.int64), :], lambda u, v: False),
    ):
        assert sorted(_edges(part)) == sorted(_of(graph, keep))
        assert part.num_src == 6
        block = part.compact()
        assert sorted(_edges(block, block.srcs)) == sorted(_of(graph, keep))
        assert torch.equal(block.srcs[: block.num_dst], part.dsts)
        assert torch.equal(block.eids, part.eids)
    assert graph[srcs, :].dsts.tolist() == list(range(6))
    assert graph[:, dsts].dsts.tolist() == [1, 5, 0]


def test_a_slice_is_made_once_and_only_if_it_is_read(graph):
    columns = graph[:, torch.tensor([1])]
    columns.individual_sample(2)
    assert columns._structure is None
    assert columns.indices is columns.indices
    assert "Columns(num_dst=1 of Graph" in repr(columns)


@pytest.mark.parametrize("key", [torch.tensor([1]), (slice(None), torch.tensor([1])), (slice(None),), 3])
def test_slices_are_restricted_by_sources_only(graph, key):
    with pytest.raises(GraphError, match=r"columns\[srcs, :\]"):
        graph[:, torch.tensor([1])][key]


@pytest.mark.parametrize(
    ("srcs", "message"),
    [(["a"], "srcs must hold numbers; got list of dtype <U1"), (torch.tensor([6]), r"srcs\[0\] = 6 is not a node")],
)
def test_sources_that_are_no_nodes(graph, srcs, message):
    with pytest.raises(GraphError, match=message):
        graph[srcs, :]


def test_computing_on_a_slice(graph):
    columns = graph[:, torch.tensor([1, 0])]
    x = graph.ndata["x"]
    assert_close(columns.pull(fn.copy_u(x), "sum"), torch.stack([x[[0, 3, 0, 4, 3]].sum(0), x[2]]))
    assert columns.out_degrees().tolist() == [2, 0, 1, 2, 1, 0]
    assert columns.dstdata["x"].tolist() == x[[1, 0]].tolist()
    assert columns.srcdata["x"] is x
    assert columns.srcdata.keys() == graph.ndata.keys()
    assert columns.edata["w"].tolist() == [2.0, 4.0, 5.0, 7.0, 8.0, 0.0]


def test_a_slice_writes_nothing_to_the_graph(graph):
    """Its sources are all nodes: what it sets there would be every batch's, and over again in each."""
    before = {name: value.clone() for name, value in graph.ndata.items()}
    with pytest.raises(GraphError, match=r"set it in a block \(block.srcdata\['x'\]"):
        graph.keyed()[:, torch.tensor([1, 0])].srcdata["x"] = before["x"] * 2
    assert graph.ndata.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in graph.ndata.items())


# --- edge data of samples -------------------------------------------------------------------------------------------


def _samples(graph):
    nodes, srcs = torch.tensor([1, 2, 1, 5, 0]), torch.tensor([0, 3, 2])
    view = graph.keyed(3, 1, 4)
    used = view[:, nodes]
    assert used.num_edges == 12
    yield "uniform", view[:, nodes].individual_sample(3)
    yield "uniform, slice read before", used.individual_sample(3)
    yield "uniform, replaced", view[:, nodes].individual_sample(4, replace=True)
    yield "weighted", view[:, nodes].individual_sample(3, probs="w")
    yield "weighted, replaced", view[:, nodes].individual_sample(3, probs="w", replace=True)
    yield "weighted, of the slice", used.individual_sample(2, probs=used.edata["w"] ** 2)
    yield "all", view[:, nodes].individual_sample(-1)
    yield "all of positive weight", view[:, nodes].individual_sample(-1, probs=graph.edata["w"])
    yield "part", view[srcs, nodes].individual_sample(2)
    yield "part, replaced", view[srcs, nodes].individual_sample(3, replace=True)
    yield "part, weighted", view[srcs, nodes].individual_sample(2, probs="w")
    yield "collective", view[:, nodes].collective_sample(2)
    yield "collective, weighted", view[:, nodes].collective_sample(2, node_probs="q")
    yield "without loops", view[:, nodes].individual_sample(3).remove_self_loops()


def test_edge_data_belong_to_the_edges(graph):
    """Every edge of every sample has the number and weight of an edge of the graph between the same nodes."""
    everything = set(_edges(graph))
    for name, block in _samples(graph):
        edges = _edges(block, block.srcs)
        assert edges and set(edges) <= everything, name
        assert torch.equal(block.edata["w"], graph.edata["w"][block.eids]), name
        assert block.edata["w"] is block.edata["w"]
        assert torch.equal(block.srcdata["x"], graph.ndata["x"][block.srcs]), name
        assert torch.equal(block.dstdata["x"], graph.ndata["x"][block.dsts]), name


@pytest.mark.parametrize("replace", [False, True])
def test_a_slice_that_was_read_gives_the_same_sample(graph, replace):
    nodes = torch.tensor([1, 2, 1, 5, 0])
    one, read = graph.keyed(5)[:, nodes], graph.keyed(5)[:, nodes]
    assert read.num_edges == 12
    blocks = [columns.individual_sample(3, replace=replace) for columns in (one, read)]
    assert torch.equal(blocks[0].eids, blocks[1].eids)
    assert torch.equal(blocks[0].indices, blocks[1].indices)


def test_tensors_of_ones_own(graph):
    block = graph[:, torch.tensor([1, 0])].compact()
    h = torch.ones(block.num_src, 3)
    block.srcdata["h"] = h
    assert block.srcdata["h"] is h
    assert "h" in block.srcdata and "x" in block.srcdata and "w" not in block.srcdata
    assert list(block.srcdata) == ["x", "q", "h"] and len(block.edata) == 2
    assert "Gathered(edata: w, n)" in repr(block.edata)
    with pytest.raises(GraphError, match=r"edata\['h'\] needs a tensor with 6 rows; got shape \[2, 3\]"):
        block.edata["h"] = torch.ones(2, 3)
    with pytest.raises(GraphError, match="got list"):
        block.dstdata["h"] = [1, 2]
    with pytest.raises(GraphError, match=r"edata\['v'\]: neither graph nor block has such a tensor; there is: n, w"):
        block.edata["v"]


def test_blocks_whose_edges_are_unknown(graph):
    block = graph[:, torch.tensor([1, 0])].compact()
    by_hand = Block(block.indptr, block.indices, block.srcs, block.dsts, graph)
    for unknown in (block.add_self_loops(), by_hand):
        with pytest.raises(GraphError, match="the edges of this block are not known in the graph: it has added self-l"):
            unknown.edata["w"]
    given = Block(block.indptr, block.indices, block.srcs, block.dsts, graph, eids=block.eids)
    assert torch.equal(given.edata["w"], block.edata["w"])


def test_an_edgeless_graph_has_samples():
    empty = Graph.from_csc(
        torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int32), edata={"w": torch.ones(0)}
    )
    nodes = torch.tensor([1, 2])
    for block in (
        empty[:, nodes].individual_sample(2),
        empty[:, nodes].individual_sample(2, probs="w"),
        empty[nodes, nodes].individual_sample(2),
        empty[nodes, nodes].individual_sample(2, probs="w", replace=True),
        empty[:, nodes].collective_sample(2),
    ):
        assert block.srcs.tolist() == [1, 2] and block.num_edges == 0
        assert block.edata["w"].shape == (0,)


def test_kept_edges_of_a_block(graph):
    block = graph[:, torch.tensor([1, 2])].compact()
    kept = block.keep_edges(block.edata["w"] > 4)
    assert kept.edata["n"].tolist() == [4, 6, 7]
    assert kept.indptr.tolist() == [0, 3, 3]
    assert torch.equal(kept.srcs, block.srcs)
    assert block.remove_self_loops().edata["n"].tolist() == [1, 3, 4, 6, 7]


# --- picks ----------------------------------------------------------------------------------------------------------


def test_weighted_picks(graph):
    nodes = torch.tensor([1, 0, 2])
    for seed in range(30):
        view = graph.keyed(seed)
        block = view[:, nodes].individual_sample(2, probs="w")
        assert block.in_degrees().tolist() == [2, 0, 1]  # the only edge of node 0 has weight 0
        assert (block.edata["n"][:2].diff() > 0).all()  # in ascending position
        again = graph.keyed(seed)[:, nodes].individual_sample(2, probs=graph.edata["w"])
        assert torch.equal(again.eids, block.eids)
        replaced = view[:, nodes].individual_sample(7, probs="w", replace=True)
        assert replaced.in_degrees().tolist() == [7, 0, 7]


def test_collective_picks(graph):
    nodes = torch.tensor([1, 3, 0])  # candidates are 0, 1, 2, 3, 4
    for seed in range(30):
        block = graph.keyed(seed)[:, nodes].collective_sample(2)
        assert len(set(block.srcs[block.indices].tolist())) == 2
        block = graph.keyed(seed)[:, nodes].collective_sample(9, node_probs="q")
        assert set(block.srcs[block.indices].tolist()) == {0, 2, 3, 4}  # node 1 has weight 0
    every = graph[:, nodes].collective_sample(9)
    assert torch.equal(every.edata["n"], graph[:, nodes].edata["n"])


def test_a_collective_sample_of_everything_takes_no_memory_of_its_own(graph):
    columns = graph[:, torch.tensor([1, 0, 3])]
    assert torch.equal(columns.collective_sample(2**40).srcs, columns.collective_sample(graph.num_nodes).srcs)


BAD_PROBS = {
    "name": ("v", r"probs='v': graph.edata has no such tensor; it has: w, n"),
    "bool": (True, "probs must be a name in graph.edata.*got bool.*replace=True"),
    "integers": (torch.ones(8, dtype=torch.int64), "one-dimensional and floating-point; got torch.int64"),
    "heads": (torch.ones(8, 2), r"got torch.float32 \[8, 2\]"),
    "rows": (
        torch.ones(7),
        r"must be float32 \[8\] for the graph, or one per edge of the slice; got torch.float32 \[7\]",
    ),
    "double": (torch.ones(8, dtype=torch.float64), r"float32 \[8\].*Convert it once, with .float\(\)"),
    "negative": (torch.tensor([1.0, 1, -2, 1, 1, 1, 1, 1]), r"probs\[2\] = -2.0: weights must be 0 or positive"),
    "nan": (torch.tensor([1.0, 1, 1, 1, 1, 1, 1, float("nan")]), r"probs\[7\] = nan"),
}


@pytest.mark.parametrize(("probs", "message"), BAD_PROBS.values(), ids=BAD_PROBS.keys())
def test_bad_weights_of_edges(graph, probs, message):
    with pytest.raises(SamplerError, match=message):
        graph[:, torch.tensor([1])].individual_sample(2, probs)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ("w", "probs='w': graph.ndata has no such tensor"),
        (torch.ones(5), r"node_probs must be float32 \[6\]; got torch.float32 \[5\]"),
        (3, "node_probs must be a name in graph.ndata"),
        (-torch.ones(6), r"node_probs\[0\] = -1.0"),
    ],
)
def test_bad_weights_of_nodes(graph, probs, message):
    with pytest.raises(SamplerError, match=message):
        graph[:, torch.tensor([1])].collective_sample(2, probs)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, None])
def test_impossible_numbers_of_nodes(graph, k):
    with pytest.raises(SamplerError, match="collective_sample: k must be a positive integer"):
        graph[:, torch.tensor([1])].collective_sample(k)


def test_contents_are_read_once(graph, monkeypatch):
    reads = []
    nonzero = torch.nonzero
    monkeypatch.setattr(probs_module.torch, "nonzero", lambda x: reads.append(x) or nonzero(x))
    columns = graph[:, torch.tensor([1])]
    for _ in range(3):
        columns.individual_sample(2, probs="w")
    assert len(reads) == 1
    graph.edata["w"][0] = -1.0
    with pytest.raises(SamplerError, match=r"probs\[0\] = -1.0"):
        columns.individual_sample(2, probs="w")


WEIGHTS_ONCE = {
    "names its tensor": (lambda c, bias: {"edge_probs": "v"}, r"edge_probs='v': graph.edata has no such tensor"),
    "of the graph": (lambda c, bias: {"edge_probs": bias[:7]}, r"edge_probs must be float32 \[8\] for the graph; got"),
    "of the slice": (lambda c, bias: {"slice_probs": bias[:7]}, "slice_probs has 7 entries and the slice 8 edges"),
    "no name of the slice": (lambda c, bias: {"slice_probs": "w"}, "slice_probs must be a tensor"),
    "twice": (lambda c, bias: {"probs": "w", "slice_probs": bias}, "probs and slice_probs were given"),
    "both": (lambda c, bias: {"edge_probs": "w", "slice_probs": bias}, "edge_probs and slice_probs were given"),
    "neither": (lambda c, bias: {"probs": bias}, "Write edge_probs=.* slice_probs=.* computed on the slice"),
}


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_weights_of_a_slice_as_large_as_the_graph(graph, read):
    """All nodes in another order: what weights are of is said, or an error, whatever was read before."""
    columns = graph[:, torch.arange(5, -1, -1)]
    assert not read or columns.num_edges == graph.num_edges
    picked = graph[:, torch.arange(5, -1, -1)].edata["n"] == 1
    bias, of_graph = picked.float(), (graph.edata["n"] == 1).float()
    for choice, message in WEIGHTS_ONCE.values():
        with pytest.raises(SamplerError, match=message):
            columns.individual_sample(-1, **choice(columns, bias))
    graph.edata["one"] = of_graph
    for weights in ({"slice_probs": bias}, {"edge_probs": of_graph}, {"edge_probs": "one"}, {"probs": "one"},
                    {"probs": graph.edata["one"]}):  # fmt: skip
        assert columns.individual_sample(-1, **weights).edata["n"].tolist() == [1], weights


def test_weights_tell_by_their_number(graph):
    """Not as many as the graph's edges: computed on the slice; the whole graph in its order: the same either way."""
    columns = graph[:, torch.tensor([1, 3])]
    bias = (columns.edata["n"] == columns.edata["n"][0]).float()
    assert columns.individual_sample(-1, probs=bias).edata["n"].tolist() == columns.edata["n"][:1].tolist()
    of_graph = (graph.edata["n"] == 1).float()
    for read in (False, True):
        columns = graph[:, torch.arange(6)]
        assert not read or columns.num_edges == 8
        assert columns.individual_sample(-1, probs=of_graph).edata["n"].tolist() == [1]
