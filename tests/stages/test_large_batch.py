"""The large-batch first stage: the union of a sampler's hops, against sets and loops."""

import pytest
import torch

from joestar.graph_api import Graph
from joestar.sampling import LayerDependentSampler, NeighborSampler
from joestar.stages import LargeBatch, check_macro_batch
from stages.support import TwoGraphs, Whole, blocks_of, fields, random_graph, reference

KEY = (7, 3, 2)
SEEDS = torch.tensor([5, 1, 40, 5, 2, 33])


def samplers(graph: Graph) -> dict:
    """Every kind of sampler by name."""
    weight = torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(4))
    return {
        "15,10,5": NeighborSampler(graph, [15, 10, 5]),
        "2,3": NeighborSampler(graph, [2, 3]),
        "replace": NeighborSampler(graph, [4, 3, 9], replace=True),
        "all": NeighborSampler(graph, [-1, -1]),
        "all first": NeighborSampler(graph, [-1, 2]),
        "all last": NeighborSampler(graph, [2, 2, -1]),
        "all between": NeighborSampler(graph, [2, -1, 3], replace=True),
        "many": NeighborSampler(graph, [3, 100]),
        "many in all": NeighborSampler(graph, [30, 30, 30]),
        "one hop": NeighborSampler(graph, [4]),
        "17 hops": NeighborSampler(graph, [1] * 17),
        "weighted": NeighborSampler(graph, [3, 2, 4], probs="w"),
        "weighted, replace": NeighborSampler(graph, [3, 2], replace=True, probs=graph.edata["w"]),
        "weighted, all": NeighborSampler(graph, [2, -1, 3], probs="w"),
        "layers": LayerDependentSampler(graph, [12, 20]),
        "layers, given": LayerDependentSampler(graph, [12, 20], node_probs=weight),
        "user's": TwoGraphs(),
        "by hand": Whole(),
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", samplers(random_graph()))
def test_the_union_of_any_samplers_hops_is_that_of_sets(name, dtype):
    graph = random_graph(dtype=dtype)
    sampler = samplers(graph)[name]
    seeds = SEEDS.unique() if name == "by hand" else SEEDS
    macro = LargeBatch(6).sample(graph, sampler, seeds, KEY)
    assert fields(check_macro_batch(macro, graph)) == reference(graph, blocks_of(graph, sampler, seeds, KEY), seeds)
    assert macro.ids.dtype is dtype and macro.indices.dtype is macro.seeds.dtype is torch.int32
    assert macro.ids[macro.seeds.long()].tolist() == seeds.tolist()
