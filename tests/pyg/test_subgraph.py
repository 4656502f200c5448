"""The union of hops against one put together in plain Python, exact and with bounds."""

import pytest
import torch

import joestar
from joestar.graph_api import SamplingContext
from joestar.pyg import SubgraphSampler
from pyg.common import neighbour_batch, toy_graph


class _Model(torch.nn.Module):
    def forward(self, x, edge_index, edge_weight=None):
        return x


def _of(graph, fanouts, seeds, key, sizes=None):
    """(Subgraph, the blocks it was made of, sizes of all sets)."""
    sampler = joestar.NeighborSampler(graph, fanouts)
    context = SamplingContext(torch.tensor(key), sizes)
    (subgraph,) = SubgraphSampler(_Model(), sampler).sample(graph.with_context(context), seeds)
    blocks = sampler.sample(graph.keyed(*key), seeds)
    return subgraph, blocks, context.recorded


SEEDS = {
    "some": [3, 17, 40, 5],
    "twice": [3, 17, 3, 40, 17],
    "alone": [51, 53],  # without in-edges but loops, or none
    "one": [0],
}


@pytest.mark.parametrize("fanouts", [[2], [3, 2], [-1, -1], [2, 4, 3]], ids=str)
@pytest.mark.parametrize("which", SEEDS)
def test_edges_are_those_of_the_hop_in_which_a_node_is_new(fanouts, which):
    graph = toy_graph(("edge_weight",))
    seeds = torch.tensor(SEEDS[which], dtype=graph.indices.dtype)
    subgraph, blocks, _ = _of(graph, fanouts, seeds, (0, 1, 2))
    nodes, edge_index, eids = neighbour_batch(blocks)
    assert torch.equal(subgraph.srcs.long(), nodes)
    assert torch.equal(subgraph.edges().edge_index, edge_index)
    assert torch.equal(subgraph.eids, eids)
    assert torch.equal(subgraph.edata["edge_weight"], graph.edata["edge_weight"][eids])
    if fanouts == [-1, -1] and which != "twice":  # every in-edge of the seeds and of their neighbours, as in PyG
        inner = set(nodes[edge_index[0][edge_index[1] < len(seeds)]].tolist()) | set(seeds.tolist())
        degrees = graph.indptr[1:] - graph.indptr[:-1]
        assert edge_index.shape[1] == int(degrees[sorted(inner)].sum())


@pytest.mark.parametrize("which", SEEDS)
def test_loops(which):
    from torch_geometric.utils import add_self_loops, remove_self_loops

    graph = toy_graph()
    seeds = torch.tensor(SEEDS[which], dtype=graph.indices.dtype)
    subgraph, blocks, _ = _of(graph, [4, 3], seeds, (0, 0, 5))
    _, edge_index, _ = neighbour_batch(blocks)
    free, position = remove_self_loops(edge_index, torch.arange(edge_index.shape[1]))
    ours = subgraph.loop_free()
    assert torch.equal(ours.edge_index, free) and torch.equal(ours.origin, position)
    looped, _ = add_self_loops(free, num_nodes=subgraph.num_src)
    ours = ours.with_loops()
    assert sorted(ours.edge_index.t().tolist()) == sorted(looped.t().tolist())
    assert torch.equal(ours.dst.long(), ours.dst.long().sort().values)
    old = ~ours.loop
    assert torch.equal(ours.edge_index[:, old], free[:, ours.origin[old]])
    assert torch.equal(ours.edge_index[0, ours.loop], torch.arange(subgraph.num_src))


@pytest.mark.parametrize("slack", [0, 7])
def test_bounds_leave_the_valid_part_as_it_is(slack):
    """Ops on the padded hops: counts are what tells rows apart, not sizes."""
    ops = torch.ops.joestar
    graph = toy_graph()
    seeds = torch.tensor(SEEDS["some"], dtype=graph.indices.dtype)
    subgraph, blocks, _ = _of(graph, [4, 3], seeds, (0, 0, 5))
    hops = blocks[::-1]
    padded_indptrs = [torch.cat([hop.indptr, hop.indptr[-1:].expand(slack)]) for hop in hops]
    values = [torch.cat([hop.indices, hop.indices.new_full((slack,), 1)]) for hop in hops]
    nodes = torch.cat([blocks[0].srcs, blocks[0].srcs[:1].expand(slack)])
    starts = [torch.tensor(0), torch.tensor(hops[0].num_dst)]
    size = subgraph.num_edges + slack
    indptr, indices, count = ops.merge_hops(padded_indptrs, values, nodes, starts, size)
    assert int(count) == subgraph.num_edges and indices.shape[0] == size
    assert torch.equal(indptr[: subgraph.num_src + 1], subgraph.indptr)
    assert torch.equal(indices[: int(count)], subgraph.indices) and not indices[int(count) :].any()
    moved, sources, origin, loop = ops.append_loops(indptr, indices, torch.tensor(subgraph.num_src))
    wanted = ops.append_loops(subgraph.indptr, subgraph.indices, torch.tensor(subgraph.num_src))
    valid = int(moved[-1])
    assert valid == subgraph.num_edges + subgraph.num_src == wanted[1].shape[0]
    for ours, theirs in zip((sources, origin, loop), wanted[1:], strict=True):
        assert torch.equal(ours[:valid], theirs) and not ours[valid:].any()
    assert (moved[subgraph.num_src :] == valid).all()


def test_a_bound_that_is_too_small_tells_the_true_number():
    indptr, indices = torch.tensor([0, 2, 5]), torch.arange(5)
    _, cut, count = torch.ops.joestar.merge_hops([indptr], [indices], torch.arange(2), [torch.tensor(0)], 3)
    assert int(count) == 5 and cut.tolist() == [0, 1, 2]


def test_no_edges_at_all():
    empty = torch.zeros(4, dtype=torch.int64)
    indptr, sources, origin, loop = torch.ops.joestar.append_loops(empty, torch.zeros(0).int(), torch.tensor(3))
    assert indptr.tolist() == [0, 1, 2, 3] and sources.tolist() == [0, 1, 2]
    assert not origin.any() and loop.all()
    assert torch.ops.joestar.rows_at(torch.zeros(0, 5), origin).shape == (3, 5)


def test_every_neighbour_gives_what_pygs_loader_gives():
    """``NeighborLoader`` itself samples by pyg-lib or torch-sparse, neither of which is on PyPI."""
    pytest.importorskip("pyg_lib", reason="NeighborLoader needs pyg-lib (or torch-sparse)", exc_type=Exception)
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GCN

    graph, seeds = toy_graph(), torch.tensor([3, 17, 40, 5])
    src, dst, _ = graph.coo()
    data = Data(graph.ndata["x"], torch.stack([src, dst]).long())
    (batch,) = NeighborLoader(data, [-1, -1], seeds, batch_size=4, shuffle=False)
    model = GCN(8, 8, 2, 4).double()
    step = joestar.compile(model, joestar.NeighborSampler(graph, [-1, -1]), backend="eager", warm_up=2)
    torch.testing.assert_close(step(seeds), model(batch.x, batch.edge_index)[: batch.batch_size])
