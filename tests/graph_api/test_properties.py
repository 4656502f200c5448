"""Properties over random graphs (hypothesis, derandomised): scipy.sparse is the reference."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from joestar.graph_api import Graph, fn

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def graphs(draw):
    """A graph of 1 to 9 nodes with any edges (loops and duplicates too), either id dtype, and its edge_index."""
    num_nodes = draw(st.integers(1, 9))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=25))
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    values = draw(st.lists(st.integers(-8, 8), min_size=len(edges), max_size=len(edges)))
    weight = torch.tensor(values, dtype=torch.float64)
    graph = Graph.from_edge_index(edge_index, num_nodes, edata={"w": weight})
    ids = draw(st.sampled_from([torch.int32, torch.int64]))
    return Graph.from_csc(graph.indptr, graph.indices.to(ids), edata=dict(graph.edata)), edge_index, weight


def _adjacency(edge_index, weight, num_nodes):
    """``A[v, u]`` = total weight of the edges u -> v."""
    return scipy.sparse.coo_array(
        (weight.numpy(), (edge_index[1].numpy(), edge_index[0].numpy())), shape=(num_nodes, num_nodes)
    ).tocsr()


def _features(num_nodes: int, columns: int = 3) -> torch.Tensor:
    """Small integers: sums are exact in any order."""
    return torch.randint(-9, 10, (num_nodes, columns), generator=torch.Generator().manual_seed(num_nodes)).double()


@SETTINGS
@given(graphs())
def test_products_are_those_of_scipy(case):
    graph, edge_index, weight = case
    x = _features(graph.num_nodes)
    ones = _adjacency(edge_index, torch.ones_like(weight), graph.num_nodes)
    weighted = _adjacency(edge_index, weight, graph.num_nodes)
    assert np.array_equal(graph.pull(fn.copy_u(x), "sum").numpy(), ones @ x.numpy())
    assert np.array_equal(graph.pull(fn.u_mul_e(x, graph.edata["w"]), "sum").numpy(), weighted @ x.numpy())
    degrees = np.asarray(ones.sum(1)).ravel()
    assert graph.in_degrees().tolist() == degrees.tolist()
    assert graph.out_degrees().tolist() == np.asarray(ones.sum(0)).ravel().tolist()
    mean = (ones @ x.numpy()) / np.maximum(degrees, 1)[:, None]
    assert_close(graph.pull(fn.copy_u(x), "mean"), torch.from_numpy(mean))


@SETTINGS
@given(graphs())
def test_extrema_bound_every_message(case):
    graph, edge_index, _ = case
    x = _features(graph.num_nodes)
    largest, smallest = (graph.pull(fn.copy_u(x), reduce) for reduce in ("max", "min"))
    for v in range(graph.num_nodes):
        sources = edge_index[0, edge_index[1] == v]
        if sources.numel():
            assert torch.equal(largest[v], x[sources].amax(0))
            assert torch.equal(smallest[v], x[sources].amin(0))
        else:
            assert not largest[v].any()
            assert not smallest[v].any()


@SETTINGS
@given(graphs())
def test_gradients_are_products_with_the_transpose(case):
    graph, edge_index, weight = case
    x = _features(graph.num_nodes).requires_grad_()
    w = graph.edata["w"].clone().requires_grad_()
    cotangent = _features(graph.num_nodes).flip(0)
    graph.pull(fn.u_mul_e(x, w), "sum").backward(cotangent)
    transposed = _adjacency(edge_index, weight, graph.num_nodes).T
    assert np.array_equal(x.grad.numpy(), transposed @ cotangent.numpy())
    src, dst, _ = graph.coo()
    assert torch.equal(w.grad, (x.detach()[src.long()] * cotangent[dst.long()]).sum(1))


@pytest.mark.filterwarnings("ignore:.*float64:joestar.errors.JoestarWarning")
@SETTINGS
@given(graphs())
def test_formats_hold_the_given_edges(case):
    graph, edge_index, weight = case
    given_edges = sorted(zip(edge_index[0].tolist(), edge_index[1].tolist(), weight.tolist(), strict=True))
    src, dst, eid = graph.coo()
    assert sorted(zip(src.tolist(), dst.tolist(), graph.edata["w"][eid].tolist(), strict=True)) == given_edges
    assert (dst.diff() >= 0).all()
    indptr, neighbours, position = graph.csr()
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), indptr.diff())
    triples = zip(rows.tolist(), neighbours.tolist(), graph.edata["w"][position].tolist(), strict=True)
    assert sorted(triples) == given_edges
    again = Graph.from_scipy(_adjacency(edge_index, weight, graph.num_nodes).T)
    assert np.array_equal(
        _adjacency(torch.stack(again.coo()[:2]).long(), again.edata["w"], graph.num_nodes).toarray(),
        _adjacency(edge_index, weight, graph.num_nodes).toarray(),
    )


@SETTINGS
@given(graphs())
def test_self_loops_set_the_diagonal_to_one(case):
    graph, edge_index, weight = case
    looped = graph.add_self_loops()
    dense = _adjacency(edge_index, torch.ones_like(weight), graph.num_nodes).toarray()
    np.fill_diagonal(dense, 1)
    src, dst, _ = looped.coo()
    ones = torch.ones(looped.num_edges, dtype=torch.float64)
    assert np.array_equal(_adjacency(torch.stack([src, dst]).long(), ones, graph.num_nodes).toarray(), dense)
    assert torch.equal(looped.indices[looped.indptr[1:] - 1].long(), torch.arange(graph.num_nodes))


@SETTINGS
@given(graphs(), st.data())
def test_a_whole_slice_is_the_rows_of_the_matrix(case, data):
    graph, edge_index, weight = case
    nodes = st.lists(st.integers(0, graph.num_nodes - 1), max_size=6)
    dsts = torch.tensor(data.draw(nodes), dtype=graph.indices.dtype)
    block = graph[:, dsts].individual_sample(-1)
    x = _features(graph.num_nodes)
    ones = _adjacency(edge_index, torch.ones_like(weight), graph.num_nodes)
    pulled = block.pull(fn.copy_u(x[block.srcs.long()]), "sum")
    assert np.array_equal(pulled.numpy(), (ones @ x.numpy())[dsts.numpy()].reshape(-1, 3))
    assert torch.equal(block.srcs[: block.num_dst], dsts)
    assert torch.equal(block.in_degrees(), graph.in_degrees_of(dsts))


@SETTINGS
@given(graphs(), st.integers(1, 4), st.booleans(), st.integers(-(2**62), 2**62))
def test_a_sample_is_a_part_of_every_row(case, k, replace, seed):
    graph, _, _ = case
    everyone = torch.arange(graph.num_nodes, dtype=graph.indices.dtype)
    block = graph.keyed(seed)[:, everyone].individual_sample(k, replace=replace)
    assert torch.equal(block.srcs, everyone)
    degrees = graph.in_degrees()
    expected = (degrees > 0) * k if replace else degrees.clamp(max=k)
    assert torch.equal(block.in_degrees(), expected)
    for node in range(graph.num_nodes):
        picked = block.indices[block.indptr[node] : block.indptr[node + 1]].tolist()
        neighbours = graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()
        limit = len(picked) if replace else 0
        assert all(picked.count(source) <= max(neighbours.count(source), limit) for source in set(picked))
        assert set(picked) <= set(neighbours)
