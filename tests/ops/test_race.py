"""The keys of weighted sampling: their tables, how near they are to the logarithms, and the picks they decide."""

import math
import zlib

import numpy as np
import pytest
import torch

from joestar.kernels import cpu
from joestar.kernels.race import FRACTION, INTERVALS, TABLE, table
from joestar.ops import reference
from joestar.ops.race import NEVER, log2_fixed, log2_weight, race_key

from . import oracle
from .database import BIG_KEY, KEY
from .database_weighted import some_weights
from .structures import queries

LOGS, REST = table()[: INTERVALS + 1], table()[INTERVALS + 1 :]
TABLES = LOGS.tolist(), REST.tolist()
IMPLEMENTATIONS = pytest.mark.parametrize("ops_of", [cpu, reference], ids=["cpu", "reference"])


def _words(number: int = 200_000) -> torch.Tensor:
    """Random words, and the ends of the range."""
    words = torch.randint(0, 2**32, (number,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 1, 2, 3, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 2**20, 2**32 - 2, 2**32 - 1])
    return torch.cat([words, ends])


def _exact_key(words: torch.Tensor) -> np.ndarray:
    """log2 of an exponential variable, up to the constant."""
    v = (2 * words.double().numpy() + 1) / 2.0**33
    return np.log2(-np.log1p(-v) / math.log(2))


# --- tables and logarithms ------------------------------------------------------------------------------------------


def test_the_table_is_this_one():
    """Any other would change every weighted sample that was ever drawn."""
    assert table().shape == (2 * (INTERVALS + 1),) and table().dtype == torch.int64
    assert zlib.crc32(table().numpy().tobytes()) == 3836565461
    assert TABLE is table()


def test_the_table_is_rounded_correctly():
    i = np.arange(INTERVALS + 1)
    exact = np.log2(1 + i / INTERVALS) * 2**FRACTION
    assert np.abs(LOGS.numpy() - exact).max() < 0.5001
    v = np.append(i[1:-1] / INTERVALS, 1 - 2.0**-33)
    exact = np.append(math.log2(1 / math.log(2)), np.log2(-np.log1p(-v) / math.log(2) / v)) * 2**FRACTION
    assert np.abs(REST.numpy() - exact).max() < 0.5001
    assert (LOGS.diff() > 0).all() and (REST.diff() > 0).all()


def test_logarithms_of_integers():
    powers = 2 ** torch.arange(33)
    assert torch.equal(log2_fixed(powers, LOGS), torch.arange(33) << FRACTION)
    x = 2 * _words() + 1
    error = log2_fixed(x, LOGS).numpy() / 2**FRACTION - np.log2(x.double().numpy())
    assert np.abs(error).max() < 2e-7
    ordered = torch.cat([torch.arange(1, 100_000), x]).unique()
    assert (log2_fixed(ordered, LOGS).diff() >= 0).all()


def test_logarithms_of_weights():
    weight = torch.cat([some_weights(20_000), torch.logspace(-37, 38, 999)])
    log, positive = log2_weight(weight, LOGS)
    normal = weight >= torch.finfo(torch.float32).tiny
    assert torch.equal(positive, normal)
    exact = np.log2(weight[normal & weight.isfinite()].double().numpy())
    assert np.abs(log[normal & weight.isfinite()].numpy() / 2**FRACTION - exact).max() < 2e-7
    largest = log2_weight(torch.tensor([torch.finfo(torch.float32).max, math.inf]), LOGS)[0]
    assert largest[0] == largest[1] == log.max()


def test_keys_are_logarithms_of_exponential_variables():
    words = _words()
    key = race_key(words, None)
    error = np.abs(key.numpy() / 2**FRACTION - _exact_key(words))
    early = words.numpy() < 2**32 - 2**20  # in the last of 4096 intervals the curve turns up steeply
    assert error[early].max() < 0.01 and np.median(error) < 1e-7 and error[early].mean() < 1e-5 and error.max() < 1
    ordered = words.sort().values
    assert (race_key(ordered, None).diff() >= 0).all()
    assert torch.equal(race_key(words, torch.full(words.shape, 8.0)), key - (3 << FRACTION))
    assert (race_key(words[:3], torch.tensor([0.0, -1.0, math.nan])) == NEVER).all()


def test_keys_are_those_of_their_definition():
    words, weight = _words(3000), some_weights(3011, 7)
    expected = [oracle.race_key(word, w, *TABLES) for word, w in zip(words.tolist(), weight.tolist(), strict=True)]
    assert race_key(words, weight).tolist() == [NEVER if key is None else key for key in expected]


# --- picks ----------------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
@pytest.mark.parametrize(("k", "replace"), [(1, False), (3, False), (64, False), (2, True), (7, True), (-1, False)])
def test_weighted_picks_follow_their_definition(ops_of, k, replace):
    for query in queries():
        indptr = query.graph.indptr
        weight = some_weights(int(indptr[-1]), 3)
        state = oracle.key_state(*BIG_KEY.tolist(), 9)
        rows = []
        for node in query.dsts[: int(query.count)].tolist():
            start, end = indptr[node : node + 2].tolist()
            picks = oracle.weighted_picks(weight[start:end].tolist(), k, replace, oracle.row_state(state, node), TABLES)
            rows.append([start + pick for pick in picks])
        sub, eids, count = ops_of.weighted_sample(
            indptr, weight, query.dsts, query.count, False, k, replace, BIG_KEY, 9, -1
        )
        assert eids.tolist() == [position for row in rows for position in row]
        degrees = [len(row) for row in rows] + [0] * (query.dsts.numel() - len(rows))
        assert sub.diff().tolist() == degrees and int(count) == sum(degrees)


@IMPLEMENTATIONS
def test_infinite_weights_count_as_the_largest_finite_one(ops_of):
    indptr, weight = torch.tensor([0, 2]), torch.tensor([math.inf, torch.finfo(torch.float32).max])
    rows, one = torch.tensor([0]), torch.tensor(1)
    for site in range(20):
        as_one = ops_of.weighted_sample(indptr, weight, rows, one, False, 1, False, KEY, site, -1)[1]
        as_ones = ops_of.weighted_sample(indptr, torch.ones(2), rows, one, False, 1, False, KEY, site, -1)[1]
        assert torch.equal(as_one, as_ones)


@IMPLEMENTATIONS
def test_a_slice_is_sampled_like_the_columns_it_came_from(ops_of):
    for query in queries():
        graph = query.graph
        everything = reference.sample_eids(graph.indptr, query.dsts, query.count, -1, False, KEY, 0, -1)
        sub, _, _ = reference.slice_cols(graph.indptr, graph.indices, query.dsts, query.count, -1)
        weight = some_weights(graph.edges, 5)
        draws = (3, False, KEY, 2, -1)
        whole = ops_of.weighted_sample(graph.indptr, weight, query.dsts, query.count, False, *draws)
        part = ops_of.weighted_sample(sub, weight[everything], query.dsts, query.count, True, *draws)
        assert torch.equal(everything[part[1]], whole[1]) and torch.equal(part[0], whole[0])


@IMPLEMENTATIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_collective_picks_follow_their_definition(ops_of, weighted):
    indptr, indices = torch.tensor([0, 4, 4, 9]), torch.tensor([7, 2, 2, 9, 11, 0, 7, 5, 2, 3], dtype=torch.int32)
    weight = torch.tensor([0.0, 1, 2, 1, 1, 5, 1, 0.5, 1, 3, 1, float("nan")]) if weighted else None
    state = oracle.key_state(*KEY.tolist(), 4)
    candidates = [0, 2, 5, 7, 9, 11]  # 3 stands behind the last valid edge
    keys = []
    for node in candidates:
        word = oracle.draw(oracle.row_state(state, node), 0)
        keys.append((oracle.race_key(word, float(weight[node]) if weighted else 1.0, *TABLES), node))
    ranked = [node for key, node in sorted(pair for pair in keys if pair[0] is not None)]
    for k in (1, 2, 3, 6, 8):
        nodes, count = ops_of.collective_sample(indptr, indices, weight, 12, k, KEY, 4)
        chosen = sorted(ranked[:k])
        assert int(count) == len(chosen) and nodes.dtype == torch.int32
        assert nodes.tolist() == chosen + chosen[:1] * (k - len(chosen))
