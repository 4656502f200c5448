"""Sampling is exactly uniform: statistical tests with fixed keys, hence deterministic.

Every test compares counts with their exact distribution and asks for p > 1e-4.
"""

import math

import pytest
import torch
from scipy import stats

from joestar.graph_api import Graph
from joestar.sampling import NeighborSampler

ALPHA = 1e-4


def _ranks(degree: int, k: int, replace: bool, rows: int, key=(0, 0, 0)) -> torch.Tensor:
    """Picks ``[rows, picks]`` of ``rows`` nodes that all have in-neighbours 0 .. degree - 1: the ranks of the edges."""
    indptr = torch.arange(rows + 1) * degree
    graph = Graph.from_csc(indptr, torch.arange(degree, dtype=torch.int32).repeat(rows))
    sampler = NeighborSampler(graph, [k], replace=replace)
    (block,) = sampler.sample(graph.keyed(*key), torch.arange(rows, dtype=torch.int32))
    return block.srcs[block.indices.long()].reshape(rows, -1).long()


def _goodness(observed: torch.Tensor, cells: int, scale: float = 1.0) -> float:
    """p-value of equal cell probabilities; ``scale`` corrects the variance of draws without replacement."""
    counts = torch.bincount(observed.flatten(), minlength=cells).double()
    assert counts.numel() == cells
    expected = counts.sum() / cells
    return float(stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()) * scale, cells - 1))


def _rank_of_subset(picks: torch.Tensor, degree: int) -> torch.Tensor:
    """Number of the subset of every row among all subsets of its size (combinatorial number system)."""
    ordered = picks.sort(1).values
    table = torch.tensor([[math.comb(n, j) for j in range(picks.shape[1] + 1)] for n in range(degree)])
    return sum(table[ordered[:, j], j + 1] for j in range(picks.shape[1]))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10])
def test_all_neighbours_in_order_up_to_the_fanout(k):
    for degree in {1, k - 1, k} - {0}:
        if degree <= k:
            assert torch.equal(_ranks(degree, k, False, 50), torch.arange(degree).expand(50, degree))


@pytest.mark.parametrize(("k", "degree"), [(k, d) for k in (1, 2, 3, 5, 10) for d in (k + 1, 2 * k, 97) if d > k])
def test_every_neighbour_is_as_likely_without_replacement(k, degree):
    picks = _ranks(degree, k, False, 100_000)
    assert picks.shape == (100_000, k)
    assert (picks.sort(1).values.diff(dim=1) > 0).all(), "a neighbour was picked twice"
    # Inclusion counts of k out of d have (d - k) / (d - 1) of the variance of independent draws.
    assert _goodness(picks, degree, (degree - 1) / (degree - k)) > ALPHA


@pytest.mark.parametrize(("k", "degree"), [(2, 3), (2, 4), (2, 40), (3, 4), (3, 6), (3, 12), (5, 6), (5, 10), (10, 11)])
def test_every_subset_is_as_likely(k, degree):
    """With k = 2 these are the pairs."""
    subsets = math.comb(degree, k)
    picks = _ranks(degree, k, False, 300 * min(subsets, 1000), key=(1, 0, 0))
    assert _goodness(_rank_of_subset(picks, degree), subsets) > ALPHA


@pytest.mark.parametrize(("k", "degree"), [(5, 50), (10, 100), (65, 80), (70, 500)])
def test_every_pair_of_neighbours_is_as_likely(k, degree):
    """Every pair of edges is in a sample with probability k (k - 1) / d (d - 1); no count may be off."""
    rows = 4000
    picks = _ranks(degree, k, False, rows, key=(2, 0, 0))
    member = torch.zeros(rows, degree).scatter_(1, picks, 1.0)
    counts = torch.triu(member.T @ member, 1)[torch.triu(torch.ones(degree, degree), 1) == 1].double()
    chance = k * (k - 1) / (degree * (degree - 1))
    pairs = counts.numel()
    limit = ALPHA / pairs
    assert stats.binom.cdf(counts.min().item(), rows, chance) > limit
    assert stats.binom.sf(counts.max().item() - 1, rows, chance) > limit
    assert abs(counts.mean().item() - rows * chance) < 1e-6 * rows  # as many pairs as k (k - 1) / 2 per row


@pytest.mark.parametrize(
    ("k", "degree"), [(k, d) for k in (1, 2, 5, 70) for d in (2, k - 1, k, k + 1, 2 * k, 97) if d > 1]
)
def test_every_neighbour_is_as_likely_in_every_slot_with_replacement(k, degree):
    picks = _ranks(degree, k, True, 60_000 if k < 70 else 5000, key=(3, 0, 0))
    assert picks.shape[1] == k
    assert _goodness(picks, degree) > ALPHA
    for slot in {0, k // 2, k - 1}:
        assert _goodness(picks[:, slot], degree) > ALPHA / 3


@pytest.mark.parametrize("slots", [(0, 1), (0, 4), (3, 4)])
def test_slots_are_independent_with_replacement(slots):
    picks = _ranks(7, 5, True, 100_000, key=(4, 0, 0))
    assert _goodness(picks[:, slots[0]] * 7 + picks[:, slots[1]], 49) > ALPHA


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256, 4096])
def test_nodes_are_independent(lag):
    """The picks of node v and node v + lag, jointly; fanout 1 of 8, then all pairs of 5."""
    one = _ranks(8, 1, False, 100_000, key=(5, 1, 1)).flatten()
    assert _goodness(one[lag:] * 8 + one[:-lag], 64) > ALPHA
    pairs = _rank_of_subset(_ranks(5, 2, False, 100_000, key=(5, 1, 1)), 5)
    assert _goodness(pairs[lag:] * 10 + pairs[:-lag], 100) > ALPHA


KEYS = {
    "step": [(1, 2, 3), (1, 2, 4)],
    "step, far": [(1, 2, 3), (1, 2, 3 + 2**32)],
    "epoch": [(1, 2, 3), (1, 3, 3)],
    "seed": [(1, 2, 3), (2, 2, 3)],
    "seed, far": [(1, 2, 3), (1 + 2**32, 2, 3)],
    "words swapped": [(1, 2, 3), (3, 2, 1)],
    "one up, one down": [(1, 2, 3), (1, 3, 2)],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())
def test_keys_are_independent(keys):
    """The picks of one node under two keys, jointly: of 9 neighbours and of all pairs of 5."""
    first, second = (_ranks(9, 1, False, 100_000, key).flatten() for key in keys)
    assert _goodness(first * 9 + second, 81) > ALPHA
    first, second = (_rank_of_subset(_ranks(5, 2, False, 100_000, key), 5) for key in keys)
    assert _goodness(first * 10 + second, 100) > ALPHA


def test_steps_of_one_node_are_uniform_and_independent():
    """One node over 4,000 consecutive steps of a run, as in training."""
    graph = Graph.from_csc(torch.tensor([0, 6, *[6] * 5]), torch.arange(6, dtype=torch.int32))
    sampler, seed = NeighborSampler(graph, [1]), torch.zeros(1, dtype=torch.int32)
    picks = []
    for step in range(4000):
        (block,) = sampler.sample(graph.keyed(7, 0, step), seed)
        picks.append(int(block.srcs[block.indices[0]]))
    picks = torch.tensor(picks)
    assert _goodness(picks, 6) > ALPHA
    assert _goodness(picks[1:] * 6 + picks[:-1], 36) > ALPHA


def test_hops_are_independent():
    """A node that is its own neighbour is sampled at both hops: jointly uniform over the pairs of ranks."""
    degree, rows = 6, 100_000
    indptr = torch.arange(rows + 1) * degree
    indices = torch.arange(degree, dtype=torch.int32).repeat(rows)
    graph = Graph.from_csc(indptr, indices)
    nodes = torch.arange(rows, dtype=torch.int32)
    outer, inner = NeighborSampler(graph, [1, 1]).sample(graph.keyed(8), nodes)
    first = inner.srcs[inner.indices.long()].long()
    second = outer.srcs[outer.indices.long()][:rows].long()
    assert _goodness(first * degree + second, degree * degree) > ALPHA


def test_a_bias_would_show():
    """Every 50th pick replaced by neighbour 0, and Floyd's algorithm drawing from a range that is too short by one."""
    picks = _ranks(10, 1, False, 100_000).flatten()
    biased = torch.where(_ranks(50, 1, False, 100_000, key=(9, 0, 0)).flatten() == 0, 0, picks)
    assert _goodness(picks, 10) > ALPHA
    assert _goodness(biased, 10) < ALPHA
    first = _ranks(8, 1, False, 100_000, key=(10, 0, 0)).flatten()  # of 10, 2 picks: should draw from 9, then from 10
    second = _ranks(9, 1, False, 100_000, key=(11, 0, 0)).flatten()
    subsets = torch.stack([first, torch.where(second == first, 9, second)], 1)
    assert _goodness(_rank_of_subset(subsets, 10), 45) < ALPHA
