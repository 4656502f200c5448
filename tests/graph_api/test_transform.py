"""Algebra of whole graphs: edges, data, what is kept and what is refused."""

import numpy as np
import pytest
import torch

from joestar.errors import GraphError
from joestar.graph_api import Graph, transform

EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])


def _graph(edges=EDGES, nodes: int = 5, **edata) -> Graph:
    graph = Graph.from_edge_index(torch.as_tensor(edges), nodes, {"x": torch.arange(nodes)}, edata)
    graph.name, graph.train_idx = "toy", torch.tensor([1])
    return graph


@pytest.fixture
def graph():
    """A loop at 2, a duplicate 0 -> 1, node 4 isolated."""
    return _graph(w=torch.arange(6.0), v=torch.eye(6))


def _edges(graph) -> list:
    src, dst, _ = graph.coo()
    return list(zip(src.tolist(), dst.tolist(), strict=True))


def _weighted(graph, name="w") -> list:
    return sorted((*edge, value) for edge, value in zip(_edges(graph), graph.edata[name].tolist(), strict=True))


def _same_nodes(new: Graph, old: Graph) -> bool:
    columns = all(new.ndata[name] is value for name, value in old.ndata.items())
    return columns and new.name == old.name and new.train_idx is old.train_idx


def test_union_counts_every_copy(graph):
    other = _graph([[0, 4, 2], [1, 4, 0]], w=torch.tensor([7.0, 8.0, 9.0]), u=torch.ones(3))
    both = graph + other
    assert _edges(both) == [(2, 0), (2, 0), (0, 1), (3, 1), (0, 1), (0, 1), (2, 2), (1, 3), (4, 4)]
    assert both.edata["w"].tolist() == [2, 9, 1, 3, 4, 7, 0, 5, 8]
    assert set(both.edata) == {"w"} and _same_nodes(both, graph)
    assert sorted(_edges(other + graph)) == sorted(_edges(both))


def test_data_that_differ_in_kind_are_not_joined(graph):
    assert not (graph + _graph([[0], [1]], w=torch.ones(1, dtype=torch.float64))).edata
    assert not (graph + _graph([[0], [1]], w=torch.ones(1, 2))).edata


def test_difference_removes_all_copies(graph):
    rest = graph - _graph([[0, 2, 4], [1, 2, 4]])
    assert _weighted(rest) == [(1, 3, 5.0), (2, 0, 2.0), (3, 1, 3.0)]
    assert rest.edata["v"].shape == (3, 6) and _same_nodes(rest, graph)
    assert (graph - graph).num_edges == 0
    assert _edges(graph - _graph(torch.empty(2, 0, dtype=torch.int64))) == _edges(graph)


def test_reverse_takes_the_data_along(graph):
    back = graph.reverse()
    assert _weighted(back) == sorted((v, u, w) for u, v, w in _weighted(graph))
    assert _same_nodes(back, graph) and back.indices.dtype == graph.indices.dtype
    assert torch.equal(back.in_degrees(), graph.out_degrees())
    again = back.reverse()
    assert _weighted(again) == _weighted(graph)


def test_loops(graph):
    assert _edges(graph.remove_self_loops()) == [(2, 0), (0, 1), (3, 1), (0, 1), (1, 3)]
    assert graph.remove_self_loops().edata["w"].tolist() == [2, 1, 3, 4, 5]
    looped = graph.add_self_loops(fill={"w": 0.5})
    plain = graph.add_self_loops()
    assert torch.equal(looped.indptr, plain.indptr) and torch.equal(looped.indices, plain.indices)
    assert looped.edata["w"].tolist() == [2, 0.5, 1, 3, 4, 0.5, 0.5, 5, 0.5, 0.5]
    assert set(looped.edata) == {"w"} and _same_nodes(looped, graph) and not plain.edata
    assert torch.equal(graph.add_self_loops(fill={"v": 1.0}).edata["v"][1], torch.ones(6))


def test_whether_there_are_loops(graph):
    assert graph.has_self_loops() and graph.add_self_loops().has_self_loops()
    assert not graph.remove_self_loops().has_self_loops()
    late = Graph.from_edge_index(torch.tensor([[0, 6], [1, 6]]), 7)
    assert all(transform.has_self_loops(late, rows) for rows in (1, 2, 3, 7, 100))
    assert not any(transform.has_self_loops(late.remove_self_loops(), rows) for rows in (1, 2, 3, 7, 100))


def test_both_directions_once(graph):
    both = graph.to_bidirected()
    assert _edges(both) == [(1, 0), (2, 0), (0, 1), (3, 1), (0, 2), (2, 2), (1, 3)]
    assert not both.edata and _same_nodes(both, graph)
    assert _edges(both.to_bidirected()) == _edges(both) == _edges(both.reverse())


def test_kept_edges(graph):
    kept = graph.keep_edges(graph.edata["w"] >= 2)
    assert _weighted(kept) == [(0, 1, 4.0), (1, 3, 5.0), (2, 0, 2.0), (3, 1, 3.0)]
    assert kept.indptr.tolist() == [0, 1, 3, 3, 4, 4]
    for wrong in (torch.ones(5, dtype=torch.bool), torch.ones(6)):
        with pytest.raises(GraphError, match=r"keep_edges needs bool \[6\]"):
            graph.keep_edges(wrong)


def test_results_are_whole_graphs(graph):
    for made in (graph + graph, graph - graph, graph.reverse(), graph.remove_self_loops(), graph.to_bidirected()):
        Graph.from_csc(made.indptr, made.indices)  # validates
        with pytest.raises(GraphError, match=f"{made.num_edges} edges"):
            made.edata["z"] = torch.ones(99)


def test_a_view_keeps_its_key(graph):
    view = graph.keyed(3, 1, 4)
    for made in (view + graph, view - graph, view.reverse(), view.remove_self_loops(), view.to_bidirected()):
        assert made.context is view.context


def test_what_does_not_fit(graph):
    for other, words in (
        (_graph([[0], [1]], 6), "5 nodes, torch.int32 ids on cpu and 6 nodes"),
        (Graph.from_csc(graph.indptr, graph.indices.long()), "5 nodes, torch.int64"),
    ):
        for operate in (lambda a, b: a + b, lambda a, b: a - b):
            with pytest.raises(GraphError, match=f"both need the same nodes; got .*{words}"):
                operate(graph, other)
    for wrong in (3, None, [graph]):
        with pytest.raises(TypeError):
            graph + wrong
        with pytest.raises(TypeError):
            graph - wrong
    with pytest.raises(GraphError, match=r"fill names 'z', which graph\.edata has not; it has: w, v"):
        graph.add_self_loops(fill={"z": 1.0})


def test_whole_graphs_are_not_transformed_in_a_program(graph):
    @torch.compile(backend="eager", fullgraph=True)
    def program(x):
        return x + graph.remove_self_loops().num_edges

    with pytest.raises(Exception, match="whole graphs are transformed once, before"):
        program(torch.zeros(1))


def test_ids_of_a_graph(graph):
    assert graph.nodes.tolist() == graph.srcs.tolist() == graph.dsts.tolist() == [0, 1, 2, 3, 4]
    assert graph.nodes.dtype == graph.indices.dtype
    assert graph.eids.tolist() == list(range(6))
    assert graph.srcdata is graph.dstdata is graph.ndata


@pytest.mark.parametrize(
    "change",
    [
        Graph.reverse, Graph.remove_self_loops, Graph.add_self_loops, Graph.to_bidirected, lambda g: g + g,
        lambda g: g - g, lambda g: g.keep_edges(torch.ones(g.num_edges, dtype=torch.bool)),
        lambda g: g.add_self_loops(fill={"w": 1.0}),
    ],
)  # fmt: skip
def test_a_changed_graph_has_columns_of_its_own(graph, change):
    """Tensors are shared; ``reverse().ndata["deg"] = ...`` replaced the first graph's column."""
    graph.ndata["deg"] = graph.in_degrees()
    other = change(graph)
    assert other.ndata["deg"] is graph.ndata["deg"]
    other.ndata["deg"] = torch.zeros(5)
    other.ndata["more"] = torch.zeros(5)
    assert graph.ndata["deg"].tolist() == graph.in_degrees().tolist() and "more" not in graph.ndata


@pytest.mark.parametrize("write", ["in place", "assigned", "offsets"])
def test_what_is_derived_of_edges_follows_them(graph, write):
    """``csr``, ``coo``, and what is made of them, were of the edges before."""
    before = _edges(graph)
    graph.csr(), graph.reverse(), graph.keyed(1).csr()
    indices = graph.indices.flip(0)
    if write == "in place":
        graph.indices.copy_(indices)
    elif write == "assigned":
        graph.indices = indices
    else:
        graph.indptr = torch.tensor([0, 3, 3, 6, 6, 6])
    fresh = Graph.from_csc(graph.indptr.clone(), graph.indices.clone())
    assert _edges(graph) == _edges(fresh) != before
    assert all(map(torch.equal, graph.csr(), fresh.csr())) and all(map(torch.equal, graph.keyed(1).csr(), fresh.csr()))
    assert sorted(_edges(graph.reverse())) == sorted(_edges(fresh.reverse()))
    assert graph.csr()[0] is graph.csr()[0], "derived once"


def test_edges_are_kept_by_arrays_and_lists(graph):
    kept = [True, False, True, True, False, True]
    wanted = _weighted(graph.keep_edges(torch.tensor(kept)))
    for form in (kept, np.array(kept)):
        assert _weighted(graph.keep_edges(form)) == wanted
    for wrong in ([0, 1], np.ones(6, np.uint8), [True]):
        with pytest.raises(GraphError, match=r"keep_edges needs bool \[6\]"):
            graph.keep_edges(wrong)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        (torch.int64, 2, True), (torch.int64, 2.0, True), (torch.int64, 0.5, False), (torch.int64, float("nan"), False),
        (torch.int8, 300, False), (torch.uint8, -1, False), (torch.bool, 1, True), (torch.bool, 2, False),
        (torch.float32, 0.1, True), (torch.float32, 1e300, False), (torch.float32, float("nan"), True),
        (torch.float64, 0.1, True), (torch.float32, torch.tensor(1j), False), (torch.float16, np.float64(0.1), True),
    ],
)  # fmt: skip
def test_loops_are_filled_with_what_the_dtype_can_hold(dtype, value, fits):
    graph = _graph(w=torch.ones(6).to(dtype))
    if not fits:
        with pytest.raises(GraphError, match=rf"fill\['w'\] = .* is no {str(dtype).removeprefix('torch.')}"):
            graph.add_self_loops({"w": value})
        return
    made = graph.add_self_loops({"w": value})
    loops = made.edata["w"][made.indices == made.coo()[1]]
    torch.testing.assert_close(loops, torch.full((5,), value, dtype=dtype), rtol=0, atol=0, equal_nan=True)


def test_loops_are_filled_with_rows(graph):
    graph.edata["a"] = torch.rand(6, 2, dtype=torch.float64)
    for row in ([0.1, 2], np.array([0.1, 2]), torch.tensor([0.1, 2], dtype=torch.float64)):
        made = graph.add_self_loops({"a": row, "w": 3})
        loops = made.indices == made.coo()[1]
        assert made.edata["a"][loops].tolist() == [[0.1, 2]] * 5 and made.edata["w"][loops].tolist() == [3] * 5
    for wrong in (["a"], 1.0, 0.0, torch.ones(6)):
        with pytest.raises(GraphError, match="fill maps names of edge data"):
            graph.add_self_loops(wrong)
    for wrong, words in (([1.0, 2, 3], r"of shape \[2\].*got \[3\]"), ("mean", "list of numbers; got str")):
        with pytest.raises(GraphError, match=words):
            graph.add_self_loops({"a": wrong})
    assert not graph.add_self_loops({}).edata
