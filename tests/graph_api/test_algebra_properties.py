"""Graph algebra over random graphs (hypothesis, derandomised): matrices of scipy.sparse are the reference.

Graphs of 1 to 9 nodes with any edges: empty, isolated nodes, loops, duplicates; a hub and two-sided graphs among them.
"""

import numpy as np
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.graph_api import Graph, fn

SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@st.composite
def edge_lists(draw, num_nodes: int):
    """Edges ``[2, E]`` of one of four kinds."""
    kind = draw(st.sampled_from(["any", "hub", "two sides", "empty"]))
    node = st.integers(0, num_nodes - 1)
    src, dst = node, node
    if kind == "hub":
        dst = st.just(draw(node))
    elif kind == "two sides" and num_nodes > 1:
        middle = draw(st.integers(1, num_nodes - 1))
        src, dst = st.integers(0, middle - 1), st.integers(middle, num_nodes - 1)
    edges = draw(st.lists(st.tuples(src, dst), max_size=0 if kind == "empty" else 25))
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()


def make(edges: torch.Tensor, num_nodes: int, ids: torch.dtype) -> Graph:
    """A graph whose edge ``e`` (as listed) has the weight ``e + 1``."""
    weight = torch.arange(1.0, edges.shape[1] + 1, dtype=torch.float64)
    graph = Graph.from_edge_index(edges, num_nodes, edata={"w": weight})
    return Graph.from_csc(graph.indptr, graph.indices.to(ids), edata=dict(graph.edata))


@st.composite
def graphs(draw, number: int = 1):
    """Graphs over the same nodes."""
    num_nodes, ids = draw(st.integers(1, 9)), draw(st.sampled_from([torch.int32, torch.int64]))
    made = [make(draw(edge_lists(num_nodes)), num_nodes, ids) for _ in range(number)]
    return made if number > 1 else made[0]


def matrix(graph, values=None) -> np.ndarray:
    """``A[v, u]`` = number (or total of the values) of the edges u -> v."""
    src, dst, _ = graph.coo()
    values = torch.ones(graph.num_edges) if values is None else values
    shape = (graph.num_nodes, graph.num_nodes)
    return scipy.sparse.coo_array((values.numpy(), (dst.numpy(), src.numpy())), shape=shape).toarray()


def weights(graph) -> np.ndarray:
    """The matrix of total weights."""
    return matrix(graph, graph.edata["w"])


def valid(graph) -> Graph:
    """The graph, once its structure has been validated."""
    Graph.from_csc(graph.indptr, graph.indices, edata=dict(graph.edata))
    return graph


@SETTINGS
@given(graphs(2))
def test_union_is_the_sum(pair):
    left, right = pair
    both = valid(left + right)
    assert np.array_equal(matrix(both), matrix(left) + matrix(right))
    assert np.array_equal(weights(both), weights(left) + weights(right))


@SETTINGS
@given(graphs(2))
def test_difference_is_what_the_other_has_not(pair):
    left, right = pair
    rest, free = valid(left - right), matrix(right) == 0
    assert np.array_equal(matrix(rest), matrix(left) * free)
    assert np.array_equal(weights(rest), weights(left) * free)
    assert ((left + right) - right).num_edges == rest.num_edges


@SETTINGS
@given(graphs())
def test_reverse_is_the_transpose(graph):
    back = valid(graph.reverse())
    assert np.array_equal(matrix(back), matrix(graph).T)
    assert np.array_equal(weights(back), weights(graph).T)


@SETTINGS
@given(graphs())
def test_loops_are_the_diagonal(graph):
    diagonal = np.eye(graph.num_nodes, dtype=bool)
    plain = valid(graph.remove_self_loops())
    assert np.array_equal(weights(plain), np.where(diagonal, 0, weights(graph)))
    assert np.array_equal(matrix(plain), np.where(diagonal, 0, matrix(graph)))
    looped = valid(graph.add_self_loops(fill={"w": 0.5}))
    assert np.array_equal(weights(looped), np.where(diagonal, 0.5, weights(graph)))
    assert np.array_equal(matrix(looped), np.where(diagonal, 1, matrix(graph)))


@SETTINGS
@given(graphs())
def test_both_directions_are_the_symmetric_pattern(graph):
    pattern = (matrix(graph) + matrix(graph).T) > 0
    assert np.array_equal(matrix(valid(graph.to_bidirected())), pattern)


@SETTINGS
@given(graphs(), st.data())
def test_kept_edges_are_those_of_the_mask(graph, data):
    kept = data.draw(st.lists(st.booleans(), min_size=graph.num_edges, max_size=graph.num_edges))
    mask = torch.tensor(kept, dtype=torch.bool)
    assert np.array_equal(matrix(valid(graph.keep_edges(mask))), matrix(graph, mask.double()))


@SETTINGS
@given(graphs(), st.data())
def test_slices_are_rows_and_columns(graph, data):
    nodes = st.lists(st.integers(0, graph.num_nodes - 1), max_size=6)
    srcs, dsts = (torch.tensor(data.draw(nodes), dtype=graph.indices.dtype) for _ in range(2))
    from_srcs = np.isin(np.arange(graph.num_nodes), srcs.numpy())
    x = torch.arange(1.0, graph.num_nodes + 1, dtype=torch.float64) ** 2
    for part, rows in ((graph[srcs, dsts], dsts.numpy()), (graph[srcs, :], np.arange(graph.num_nodes))):
        expected = (weights(graph) * from_srcs)[rows] @ x.numpy()
        pulled = part.pull(fn.u_mul_e(x, part.edata["w"]), "sum")
        assert np.array_equal(pulled.numpy(), expected)
        block = part.compact()
        pulled = block.pull(fn.u_mul_e(x[block.srcs.long()], block.edata["w"]), "sum")
        assert np.array_equal(pulled.numpy(), expected)


@SETTINGS
@given(graphs(), st.integers(1, 5), st.booleans(), st.integers(-(2**62), 2**62))
def test_weighted_samples_are_parts_of_rows(graph, k, replace, seed):
    odd = (graph.edata["w"] % 2).float()  # every other edge has weight 0
    block = graph.keyed(seed)[:, graph.nodes].individual_sample(k, probs=odd, replace=replace)
    allowed = torch.from_numpy(matrix(graph, odd).sum(1)).long()
    assert torch.equal(block.in_degrees(), (allowed > 0) * k if replace else allowed.clamp(max=k))
    assert (block.edata["w"] % 2 == 1).all()
    assert torch.equal(graph.indices[block.eids], block.srcs[block.indices])
    row = torch.repeat_interleave(torch.arange(graph.num_nodes), block.in_degrees())
    assert ((block.eids >= graph.indptr[row]) & (block.eids < graph.indptr[row + 1])).all()
    assert replace or block.eids.unique().numel() == block.num_edges


@SETTINGS
@given(graphs(), st.integers(1, 9), st.integers(-(2**62), 2**62), st.data())
def test_collective_samples_are_whole_rows_of_the_matrix(graph, k, seed, data):
    dsts = torch.tensor(data.draw(st.lists(st.integers(0, graph.num_nodes - 1), max_size=6)), dtype=graph.indices.dtype)
    odd = (graph.nodes % 2).float()
    for probs, allowed in ((None, torch.ones_like(odd)), (odd, odd)):
        block = graph.keyed(seed)[:, dsts].collective_sample(k, node_probs=probs)
        candidates = {int(u) for u in graph[:, dsts].indices if allowed[u]}
        picked = set(block.srcs[block.indices].tolist())
        assert picked <= candidates and len(picked) == min(k, len(candidates))
        again = graph[torch.tensor(sorted(picked), dtype=torch.int64), dsts]
        assert torch.equal(again.eids, block.eids)
