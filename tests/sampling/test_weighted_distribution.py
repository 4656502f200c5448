"""Weighted picks have the probabilities of sequential sampling: chi-square tests with fixed keys, hence deterministic.

Without replacement, picks are those of drawing one edge after the other in proportion to weight (Efraimidis and
Spirakis 2006): P(i, then j) = w_i / W * w_j / (W - w_i). Every test asks for p > 1e-4.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from joestar.graph_api import Graph
from joestar.sampling import NeighborSampler

ALPHA = 1e-4
ROWS = 60_000
WEIGHTS = {
    "even": [1.0, 1.0, 1.0, 1.0, 1.0],
    "steps": [1.0, 2.0, 3.0, 4.0, 10.0],
    "one heavy": [1.0, 1.0, 1.0, 1.0, 500.0],
    "with zeros": [0.0, 2.0, 0.0, 1.0, 0.3],
    "tiny": [1e-30, 3e-30, 2e-30, 7e-30, 1e-30],
}
EACH = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())


def _ranks(weights: list, k: int, replace: bool, rows: int = ROWS, key=(0, 0, 0)) -> torch.Tensor:
    """Picks ``[rows, picks]`` of nodes that all have edges of these weights: the ranks of the edges."""
    degree = len(weights)
    indptr = torch.arange(rows + 1) * degree
    weight = torch.tensor(weights).repeat(rows)
    graph = Graph.from_csc(indptr, torch.arange(degree, dtype=torch.int32).repeat(rows), edata={"w": weight})
    sampler = NeighborSampler(graph, [k], replace=replace, probs="w")
    (block,) = sampler.sample(graph.keyed(*key), torch.arange(rows, dtype=torch.int32))
    return block.srcs[block.indices.long()].reshape(rows, -1).long()


def _subsets(weights: list, k: int) -> dict[tuple, float]:
    """Probability of every set of ``k`` edges under sequential sampling."""
    chances: dict[tuple, float] = {}
    for order in itertools.permutations(range(len(weights)), k):
        left, chance = sum(weights), 1.0
        for edge in order:
            chance *= weights[edge] / left if left else 0.0
            left -= weights[edge]
        chances[tuple(sorted(order))] = chances.get(tuple(sorted(order)), 0.0) + chance
    return chances


def _p_value(counts, chances) -> float:
    """Chi-square p-value; cells that are expected less than five times are taken together."""
    counts = np.asarray(counts, float)
    expected = np.asarray(chances, float) * counts.sum()
    assert counts[expected == 0].sum() == 0, "an edge of weight 0 was picked"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return stats.chisquare(observed[keep], expected[keep]).pvalue if keep.sum() > 1 else 1.0


def _p_of_subsets(picks: torch.Tensor, chances: dict[tuple, float]) -> float:
    found, counts = picks.sort(1).values.unique(dim=0, return_counts=True)
    seen = dict(zip(map(tuple, found.tolist()), counts.tolist(), strict=True))
    assert seen.keys() <= chances.keys()
    return _p_value([seen.get(subset, 0) for subset in chances], list(chances.values()))


@EACH
def test_single_picks(weights):
    picks = _ranks(weights, 1, False)
    assert _p_of_subsets(picks, _subsets(weights, 1)) > ALPHA


@EACH
@pytest.mark.parametrize("k", [2, 3])
def test_pairs_and_triples(weights, k):
    picks = _ranks(weights, k, False, key=(1, 0, 0))
    assert picks.shape[1] == k and (picks.diff(dim=1) > 0).all()
    assert _p_of_subsets(picks, _subsets(weights, k)) > ALPHA


@EACH
def test_picks_with_replacement(weights):
    picks = _ranks(weights, 3, True, key=(2, 0, 0))
    chance = np.array(weights) / sum(weights)
    for slot in range(3):
        assert _p_value(torch.bincount(picks[:, slot], minlength=5), chance) > ALPHA
    for one, other in ((0, 1), (1, 2)):
        joint = torch.bincount(picks[:, one] * 5 + picks[:, other], minlength=25)
        assert _p_value(joint, np.outer(chance, chance).ravel()) > ALPHA


def test_many_edges_of_one_node():
    """A hub of 2,000 edges whose weights span six magnitudes."""
    weights = torch.logspace(-3, 3, 2000).tolist()
    picks = _ranks(weights, 1, False, rows=2000).flatten()
    counts = torch.bincount(picks, minlength=2000).reshape(-1, 20).sum(1)
    chance = np.array(weights).reshape(-1, 20).sum(1) / sum(weights)
    assert _p_value(counts, chance) > ALPHA


@pytest.mark.parametrize("lag", [1, 7, 256])
def test_nodes_are_independent(lag):
    weights = WEIGHTS["steps"]
    picks = _ranks(weights, 1, False, key=(5, 1, 1)).flatten()
    chance = np.array(weights) / sum(weights)
    joint = torch.bincount(picks[lag:] * 5 + picks[:-lag], minlength=25)
    assert _p_value(joint, np.outer(chance, chance).ravel()) > ALPHA


@pytest.mark.parametrize("other", [(4, 2, 3), (3, 3, 3), (3, 2, 4)], ids=["seed", "epoch", "step"])
def test_keys_are_independent(other):
    weights = WEIGHTS["steps"]
    first, second = (_ranks(weights, 1, False, key=key).flatten() for key in ((3, 2, 3), other))
    chance = np.array(weights) / sum(weights)
    joint = torch.bincount(first * 5 + second, minlength=25)
    assert _p_value(joint, np.outer(chance, chance).ravel()) > ALPHA


def test_a_bias_would_show():
    weights = WEIGHTS["steps"]
    picks = _ranks(weights, 1, False)
    assert _p_of_subsets(picks, _subsets([1.0, 2.0, 3.0, 4.0, 10.6], 1)) < ALPHA
    assert _p_of_subsets(_ranks(weights, 2, False), _subsets([1.0, 2.0, 3.2, 4.0, 10.0], 2)) < ALPHA


# --- collective -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0, 10.0], [0.0, 5.0, 1.0, 0.5, 0.5]])
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.fuzz), 2, pytest.param(3, marks=pytest.mark.fuzz)])
def test_collective_picks(weights, k):
    """Five candidates, reached by edges in numbers that do not matter; one draw per step of a run."""
    steps, nodes = 4000, torch.tensor([5, 6])
    edges = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 4, 4], [5, 6, 5, 5, 5, 6, 6, 5, 5]])
    probs = None if weights is None else torch.tensor([*weights, 1.0, 1.0])
    graph = Graph.from_edge_index(edges, 7)
    chances = _subsets(weights or [1.0] * 5, k)
    counts = dict.fromkeys(chances, 0)
    for step in range(steps):
        block = graph.keyed(2, 0, step)[:, nodes].collective_sample(k, node_probs=probs)
        counts[tuple(sorted(set(block.srcs[block.indices].tolist())))] += 1
    assert _p_value(list(counts.values()), list(chances.values())) > ALPHA
