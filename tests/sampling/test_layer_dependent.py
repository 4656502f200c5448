"""The layer-dependent sampler, and weights in the neighbour sampler."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

import joestar
from joestar.errors import SamplerError
from joestar.graph_api import Graph
from joestar.sampling import LayerDependentSampler, NeighborSampler


@pytest.fixture(scope="module")
def graph():
    """40 nodes, 300 edges; the last two nodes have none."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 38, (2, 300), generator=generator)
    graph = Graph.from_edge_index(edges, 40, {"q": torch.rand(40, generator=generator)})
    graph.edata["w"] = torch.rand(300, generator=generator)
    return graph


SEEDS = torch.tensor([5, 39, 1, 5], dtype=torch.int32)


@pytest.mark.parametrize("probs", [None, "q"])
def test_layers_grow_by_at_most_their_size(graph, probs):
    sampler = LayerDependentSampler(graph, [6, 4, 60], node_probs=probs, seed=3)
    blocks = sampler.sample(graph, SEEDS)
    assert torch.equal(blocks[-1].dsts, SEEDS)
    for block, after in itertools.pairwise(blocks):
        assert torch.equal(block.dsts, after.srcs)
    for block, size in zip(blocks[::-1], (6, 4, 60), strict=True):
        picked = block.srcs[block.indices].unique()
        candidates = graph[:, block.dsts].indices.unique()
        assert picked.numel() == min(size, candidates.numel())
        everything = graph[picked, block.dsts]
        assert torch.equal(block.eids, everything.eids)  # every edge between the picked nodes and the destinations


def test_the_key_decides(graph):
    sampler = LayerDependentSampler(graph, [6, 6], seed=3)
    one, same, other = (sampler.sample(g, SEEDS)[0].srcs for g in (graph, graph.keyed(3), graph.keyed(4)))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_importance_is_that_of_ladies(graph):
    """A single pick follows the squared norms of the columns of the row-normalised slice."""
    dsts = torch.arange(0, 12, dtype=torch.int32)
    sampler = LayerDependentSampler(graph, [1])
    laplacian = np.zeros((12, 40))
    src, dst, _ = graph.coo()
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        if v < 12:
            laplacian[v, u] = 1 / int(graph.in_degrees()[v])  # an edge that stands twice counts as two
    counts = torch.zeros(40)
    for step in range(3000):
        (block,) = sampler.sample(graph.keyed(1, 0, step), dsts)
        counts[block.srcs[block.indices].unique()] += 1
    copies = np.zeros((12, 40))
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        if v < 12:
            copies[v, u] += 1
    importance = (copies * laplacian**2).sum(0)
    assert counts[importance == 0].sum() == 0
    likely = importance > 0
    expected = importance[likely] / importance.sum() * 3000
    assert stats.chisquare(counts.numpy()[likely], expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([], {}, r"layer_sizes must be a list, .* got \[\]"),
        (5, {}, "layer_sizes must be a list"),
        ([4, 0], {}, r"layer_sizes\[1\] = 0: expected a positive number of nodes"),
        ([4, -1], {}, r"layer_sizes\[1\] = -1"),
        ([True], {}, r"layer_sizes\[0\] = True"),
        ([4], {"node_probs": "z"}, "graph.ndata has no such tensor; it has: q"),
        ([4], {"node_probs": torch.ones(3)}, r"float32 \[40\]"),
    ],
)
def test_settings_that_cannot_be(graph, sizes, options, message):
    with pytest.raises(SamplerError, match=message):
        LayerDependentSampler(graph, sizes, **options)


def test_something_else_than_a_graph():
    with pytest.raises(SamplerError, match=r"LayerDependentSampler needs a joestar\.Graph; got str"):
        LayerDependentSampler("cora", [5])


def test_repr(graph):
    assert repr(LayerDependentSampler(graph, [5, 4])) == "LayerDependentSampler(layer_sizes=[5, 4], seed=0)"
    assert repr(NeighborSampler(graph, [5], probs="w")).endswith("replace=False, seed=0, probs='w')")
    assert repr(NeighborSampler(graph, [5], probs=graph.edata["w"])).endswith("seed=0, weighted)")
    assert joestar.LayerDependentSampler is LayerDependentSampler


# --- weights of the neighbour sampler -------------------------------------------------------------------------------


def test_weighted_hops(graph):
    only = (torch.arange(300) % 3 == 0).float()
    for probs in ("only", only):
        graph.edata["only"] = only
        blocks = NeighborSampler(graph, [4, 3], probs=probs, seed=2).sample(graph, SEEDS)
        for block in blocks:
            assert (block.eids % 3 == 0).all()
        assert torch.equal(blocks[0].dsts, blocks[1].srcs)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ("z", "graph.edata has no such tensor"),
        (torch.ones(4), r"float32 \[300\]"),
        (-torch.ones(300), r"probs\[0\] = -1.0"),
    ],
)
def test_bad_weights_are_found_at_once(graph, probs, message):
    with pytest.raises(SamplerError, match=message):
        NeighborSampler(graph, [4], probs=probs)
