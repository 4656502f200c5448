"""Hot nodes: counts, the analytic prior against sampling and against its formula, choices, shares."""

import pytest
import torch

from joestar.errors import ConfigError, GraphError
from joestar.graph_api import Graph
from joestar.graph_api.context import SamplingContext
from joestar.sampling import NeighborSampler
from joestar.store import hot
from joestar.store.hot import blend, choose_hot, count_needed, hit_shares, inclusion_probabilities, sampled_needs


def some_graph(nodes: int = 300, seed: int = 0) -> Graph:
    """Sources are skewed: low ids are popular; every seventh node has no in-edge."""
    random = torch.Generator().manual_seed(seed)
    degree = torch.randint(1, 25, (nodes,), generator=random)
    degree[::7] = 0
    dst = torch.repeat_interleave(torch.arange(nodes), degree)
    src = (torch.rand(dst.numel(), generator=random) ** 3 * nodes).long()
    return Graph.from_edge_index(torch.stack([src, dst]), nodes)


def exact(graph: Graph, fanouts, seeds, batch, replace=False) -> torch.Tensor:
    """The recursion written out, edge by edge, in float64."""
    nodes, indptr, indices = graph.num_nodes, graph.indptr.tolist(), graph.indices.tolist()
    q = torch.zeros(nodes, dtype=torch.float64)
    q[seeds] = batch / seeds.numel()
    for fanout in fanouts:
        missed = 1 - q
        for v in range(nodes):
            degree = indptr[v + 1] - indptr[v]
            for e in range(indptr[v], indptr[v + 1]):
                share = 1.0 if fanout < 0 else min(1.0, fanout / degree)
                if replace:
                    share = 1 - (1 - 1 / degree) ** fanout
                missed[indices[e]] *= 1 - q[v] * share
        q = 1 - missed
    return q


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_the_prior_is_its_formula(native, replace, monkeypatch):
    if not native:
        monkeypatch.setattr(hot, "has_native", lambda: False)
        monkeypatch.setattr(hot, "_EDGES", 100)
    monkeypatch.setattr(hot, "_ROWS", 70)
    graph, seeds = some_graph(), torch.arange(0, 300, 4)
    fanouts = (5, 3) if replace else (5, -1, 3)
    got = inclusion_probabilities(graph.indptr, graph.indices, fanouts, seeds, 9, replace)
    expected = exact(graph, fanouts, seeds, 9, replace)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-7)


def needs(graph: Graph, seeds: torch.Tensor, batch: int):
    """What the outermost block of the user's sampler reads, batch by batch."""
    sampler = NeighborSampler(graph, [4, 3])

    def sample(i: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(i)
        chosen = seeds[torch.randperm(seeds.numel(), generator=random)[:batch]]
        return sampler.sample(graph.with_context(SamplingContext(torch.tensor([7, 0, i]))), chosen)[0].srcs

    return sample


def test_the_prior_agrees_with_what_the_sampler_needs():
    graph, seeds = some_graph(), torch.arange(0, 300, 3)
    counts = count_needed(sampled_needs(needs(graph, seeds, 10), 0, 400), 300)
    prior = inclusion_probabilities(graph.indptr, graph.indices, (4, 3), seeds, 10)
    error = (counts.double() / 400 - prior.double()).abs()
    # seeds of a batch exclude one another, which the product ignores; counts of 400 batches have a noise of 0.025
    assert error.max() < 0.15 and error.mean() < 0.03


def test_counts_take_a_node_once_per_batch_and_go_on():
    counts = count_needed([torch.tensor([3, 3, 1]), torch.tensor([3], dtype=torch.int32)], 5)
    assert counts.tolist() == [0, 1, 0, 2, 0] and counts.dtype == torch.int32
    assert count_needed([torch.tensor([0, 1])], 5, counts).tolist() == [1, 2, 0, 2, 0]
    with pytest.raises(ConfigError, match=r"int32 \[6\]"):
        count_needed([], 6, counts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_hot_nodes_are_the_highest_and_ties_go_to_low_ids(dtype):
    random = torch.Generator().manual_seed(3)
    score = torch.randint(0, 6, (50,), generator=random).to(dtype)
    by_hand = sorted(range(50), key=lambda i: (-score[i].item(), i))
    for count in (0, 1, 7, 25, 50, 80):
        assert choose_hot(score, count).tolist() == sorted(by_hand[:count])
    with pytest.raises(GraphError, match="NaN"):
        choose_hot(torch.tensor([1.0, float("nan")]), 1)


def test_shares_of_what_is_needed():
    score = torch.tensor([5, 1, 4, 0])
    assert hit_shares(score, [0, 1, 2, 3, 9]) == [0, 0.5, 0.9, 1, 1]
    assert hit_shares(score, [1, 2], torch.tensor([1, 1, 0, 2])) == [0.25, 0.25]
    assert hit_shares(torch.zeros(4), [2]) == [0]


def test_shares_are_those_of_sorting():
    random = torch.Generator().manual_seed(4)
    score, needs = torch.rand(5000, generator=random) ** 4, torch.randint(0, 9, (5000,), generator=random)
    order = torch.argsort(score, descending=True)
    sizes = [0, 1, 17, 500, 4999, 5000, 9999]
    exact = [needs[order[:size]].sum().item() / needs.sum().item() for size in sizes]
    batches = [torch.nonzero(needs > i).flatten() for i in range(8)]
    for got in (hit_shares(score, sizes, needs), hit_shares(score, sizes, batches)):
        assert got == pytest.approx(exact, abs=1e-3)
    with pytest.raises(ConfigError, match="scores and needs"):
        hit_shares(score, [1], needs[:5])


def test_a_rough_prior_is_in_about_the_same_order():
    graph, seeds = some_graph(2000), torch.arange(0, 2000, 3)
    fine, rough = (
        inclusion_probabilities(graph.indptr, graph.indices, (5, 4), seeds, 50, every=every) for every in (1, 4)
    )
    hot = choose_hot(fine, 200)
    assert not torch.equal(fine, rough)
    assert torch.isin(choose_hot(rough, 200), hot).sum() > 120
    assert abs(rough.mean() / fine.mean() - 1) < 0.1


def test_a_share_chosen_on_some_batches_holds_on_others():
    graph, seeds = some_graph(), torch.arange(0, 300, 3)
    sample = needs(graph, seeds, 10)
    chosen_by, later = (count_needed(sampled_needs(sample, *ends), 300) for ends in ((0, 60), (100, 400)))
    expected, honest = hit_shares(chosen_by, [40])[0], hit_shares(chosen_by, [40], later)[0]
    held_out = hit_shares(chosen_by, [40], count_needed(sampled_needs(sample, 60, 100), 300))[0]
    assert abs(held_out - honest) < 0.05 <= honest
    assert expected > honest - 0.02 and honest > 40 / 300 * 1.5


def test_few_counts_are_refined_by_the_prior():
    score = blend(torch.tensor([1, 2, 1, 0], dtype=torch.int32), torch.tensor([0.1, 0.0, 0.4, 0.3]))
    assert torch.argsort(score, descending=True).tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("ids", [torch.tensor([True, False, True]), torch.tensor([0.5, 1.5])])
def test_what_is_needed_are_ids(ids):
    indptr, indices = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0])
    for ask in (
        lambda: count_needed([ids], 3),
        lambda: inclusion_probabilities(indptr, indices, [1], ids, 1),
        lambda: hit_shares(torch.ones(3), [1], [ids]),
    ):
        with pytest.raises(GraphError, match="node ids"):
            ask()
