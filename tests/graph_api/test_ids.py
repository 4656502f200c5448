"""Draws are keyed by ``graph.ids``: the same nodes in other slots give the same mini-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relabelling import relabelled

import joestar
from joestar import Graph, LayerDependentSampler, NeighborSampler
from joestar.errors import GraphError

KEY = (3, 1, 2**33 + 5)


class Drawn:
    """A sampler of hops ``draw(graph, dsts) -> block``."""

    def __init__(self, graph, draw):
        self.graph, self.draw = graph, draw

    def sample(self, graph, seeds):
        outer = self.draw(graph, seeds)
        return [self.draw(graph, outer.srcs), outer]


def _of_some_sources(graph, dsts):
    near = graph[:, dsts].individual_sample(2)
    return graph[near.srcs, dsts].individual_sample(3, replace=True)


def _of_a_slice(graph, dsts):
    columns = graph[:, dsts]
    scores = columns.edata["w"] + columns.srcdata["q"].index_select(0, columns.indices)
    return columns.individual_sample(2, slice_probs=scores) if columns.num_edges else columns.compact()


def _sliced_first(graph, dsts):
    columns = graph[:, dsts]
    columns.edata["w"]
    return columns.individual_sample(3)


SAMPLERS = {
    "uniform": lambda g: NeighborSampler(g, [3, 2]),
    "many": lambda g: NeighborSampler(g, [70, 20]),
    "replacement": lambda g: NeighborSampler(g, [3, 70], replace=True),
    "everyone": lambda g: NeighborSampler(g, [-1, 2]),
    "weighted": lambda g: NeighborSampler(g, [2, 3], probs="w"),
    "weighted with replacement": lambda g: NeighborSampler(g, [2, 3], probs="w", replace=True),
    "layers": lambda g: LayerDependentSampler(g, [4, 6]),
    "layers by weight": lambda g: LayerDependentSampler(g, [4, 6], node_probs="q"),
    "of some sources": lambda g: Drawn(g, _of_some_sources),
    "of a slice": lambda g: Drawn(g, _of_a_slice),
    "sliced first": lambda g: Drawn(g, _sliced_first),
    "one layer": lambda g: Drawn(g, lambda graph, dsts: graph[:, dsts].collective_sample(5)),
}


@st.composite
def graphs(draw) -> Graph:
    nodes = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    edges = torch.randint(0, nodes, (2, draw(st.integers(0, 6 * nodes))), generator=generator)
    edges[1, : edges.shape[1] // 3] = 0  # a hub
    graph = Graph.from_edge_index(edges, nodes, {"q": torch.rand(nodes, generator=generator)})
    graph = Graph.from_csc(
        graph.indptr, graph.indices.to(draw(st.sampled_from([torch.int32, torch.int64]))), graph.ndata
    )
    graph.edata["w"] = torch.rand(graph.num_edges, generator=generator)
    return graph


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_blocks_do_not_depend_on_the_slots(name, data):
    graph = data.draw(graphs())
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, graph.num_nodes - 1), min_size=1, max_size=12)))
    copy, slot, edges = relabelled(
        graph, graph.num_nodes + data.draw(st.integers(0, 30)), data.draw(st.integers(0, 99))
    )
    wanted = SAMPLERS[name](graph).sample(graph.keyed(*KEY), seeds)
    blocks = SAMPLERS[name](copy).sample(copy.keyed(*KEY), slot[seeds])
    for block, other in zip(blocks, wanted, strict=True):
        assert torch.equal(block.indptr, other.indptr) and torch.equal(block.indices, other.indices)
        assert torch.equal(block.src_ids, other.srcs) and torch.equal(block.dst_ids, other.dsts)
        assert torch.equal(block.srcs, slot[other.srcs.long()])
        assert torch.equal(edges[block.eids], other.eids) and torch.equal(block.edata["w"], other.edata["w"])


def test_a_graph_without_ids_of_its_own_draws_by_other_numbers():
    """The test above would see it."""
    graph = Graph.from_edge_index(torch.randint(0, 40, (2, 400), generator=torch.Generator().manual_seed(1)), 40)
    copy, slot, _ = relabelled(graph, 60)
    copy.ids = None
    seeds = torch.arange(20)
    wanted = NeighborSampler(graph, [3]).sample(graph.keyed(), seeds)
    assert not torch.equal(NeighborSampler(copy, [3]).sample(copy.keyed(), slot[seeds])[0].srcs, slot[wanted[0].srcs])


def test_the_operator_for_use_by_hand():
    graph = Graph.from_edge_index(torch.randint(0, 40, (2, 400), generator=torch.Generator().manual_seed(1)), 40)
    graph.ndata["x"] = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
    copy, slot, _ = relabelled(graph, 60)
    seeds = torch.arange(20)
    for fanouts in ([3], [3, 2]):
        for replay in ("saved", "recomputed"):
            grads, values = [], []
            for g, nodes in ((graph, seeds), (copy, slot[seeds])):
                x = g.ndata["x"].nan_to_num().requires_grad_()
                values.append(joestar.ops.sample_aggregate(g, x, nodes, fanouts, key=KEY, replay=replay))
                values[-1].square().sum().backward()
                grads.append(x.grad)
            assert torch.equal(*values) and torch.equal(grads[0], grads[1][slot.long()])


def test_ids_are_carried_by_views_and_transformations():
    graph = Graph.from_csc([0, 1, 2, 3], [1, 2, 2])
    graph.ids = torch.tensor([7, 5, 6], dtype=torch.int32).to(graph.indices.dtype)
    for other in (graph.keyed(), graph.reverse(), graph + graph, graph.add_self_loops(), graph.remove_self_loops()):
        assert other.ids is graph.ids
    assert graph.src_ids is graph.ids and graph.ids_of(torch.tensor([2, 0])).tolist() == [6, 7]
    moved = graph.to("meta")
    assert moved.ids.device.type == "meta"
    graph.ids = None
    assert graph.keyed().ids is None and graph.src_ids.tolist() == [0, 1, 2]


def test_wrong_ids_are_refused():
    graph = Graph.from_csc(torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    for wrong, message in (
        (torch.arange(3), r"torch.int64 \[2\] on cpu, like graph.indices; got torch.int64 \[3\]"),
        (torch.arange(2, dtype=torch.int32), "got torch.int32"),
        ([0, 1], "got list"),
        (torch.arange(4)[::2], "contiguous"),
    ):
        with pytest.raises(GraphError, match=message):
            graph.ids = wrong
    assert graph.ids is None
