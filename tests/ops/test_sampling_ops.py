"""What the sampling ops promise beyond agreeing with their reference: their definition in integers, and each other."""

import pytest
import torch

from joestar.kernels import cpu
from joestar.ops import hashing, reference

from . import oracle
from .database import BIG_KEY, FLOATS, IDS, KEY, values
from .structures import queries, sampling_graph

ops = torch.ops.joestar
QUERIES = queries()
DRAWS = [(k, replace) for k in (1, 3, 7, 64, 65, 100, -1) for replace in (False, True)]
IMPLEMENTATIONS = pytest.mark.parametrize("ops_of", [cpu, reference], ids=["cpu", "reference"])
EACH_QUERY = pytest.mark.parametrize("query", QUERIES, ids=[q.name for q in QUERIES])
EACH_DRAW = pytest.mark.parametrize(("k", "replace"), DRAWS)


def _columns(query):
    return query.graph.indptr, query.graph.indices, query.dsts, query.count


# --- the hash -------------------------------------------------------------------------------------------------------


def test_hash_is_the_published_one():
    nodes = [0, 1, 2**31 - 1, 2**31, 2**40 + 3, -1]
    for seed, epoch, step, site in [(0, 0, 0, 0), (7, 2, 11, 5), (-(2**40) + 5, 3, 2**34 + 1, 2**20)]:
        state = hashing.key_state(torch.tensor([seed, epoch, step]), site)
        expected = oracle.key_state(seed, epoch, step, site)
        assert tuple(int(word) for word in state) == expected
        a, b = hashing.row_state(state, torch.tensor(nodes))
        rows = [oracle.row_state(expected, node) for node in nodes]
        assert list(zip(a.tolist(), b.tolist(), strict=True)) == rows
        for j in (0, 1, 63, 2**20):
            assert hashing.draw(a, b, j).tolist() == [oracle.draw(row, j) for row in rows]


def test_bounded_covers_its_range_and_nothing_else():
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    assert hashing.bounded(words, 1).tolist() == [0, 0, 0, 0]
    assert hashing.bounded(words, 2**31 - 1).tolist() == [0, 0, 2**30 - 1, 2**31 - 2]


# --- picks ----------------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
@EACH_DRAW
def test_picks_follow_their_definition(ops_of, k, replace):
    for query in QUERIES:
        for key in (KEY, BIG_KEY):
            nodes = query.dsts[: int(query.count)].tolist()
            rows = oracle.sampled_positions(query.graph.indptr.tolist(), nodes, k, replace, key.tolist(), 9)
            flat = [position for row in rows for position in row]
            indptr, picked, count = ops_of.sample_cols(*_columns(query), k, replace, key, 9, len(flat) + 3)
            degrees = [len(row) for row in rows] + [0] * (query.dsts.numel() - len(rows))
            assert (indptr[1:] - indptr[:-1]).tolist() == degrees
            assert int(count) == len(flat)
            assert torch.equal(picked[: len(flat)], query.graph.indices[torch.tensor(flat, dtype=torch.int64)])
            pad = query.dsts[0] if query.dsts.numel() else 0
            assert (picked[len(flat) :] == pad).all()


@IMPLEMENTATIONS
def test_row_ids_of_64_bits_and_their_place_do_not_matter(ops_of):
    graph = sampling_graph()
    ids = torch.arange(graph.num_dst) * (2**57 + 12345) - 2**61
    _, picked, _ = ops_of.rowwise_sample(graph.indptr, graph.indices, ids, 3, False, KEY, 4, -1)
    expected = []
    for row, node in enumerate(ids.tolist()):
        start, end = graph.indptr[row : row + 2].tolist()
        state = oracle.row_state(oracle.key_state(*KEY.tolist(), 4), node)
        expected += [start + pick for pick in oracle.picks(end - start, 3, False, state)]
    assert torch.equal(picked, graph.indices[torch.tensor(expected)])


@IMPLEMENTATIONS
@pytest.mark.parametrize("replace", [False, True])
def test_offsets_and_degrees_past_two_to_the_31st(ops_of, replace):
    degrees = [5, 2**31 - 1, 3, 2**31 - 1, 70, 2**31 - 1]
    indptr = torch.cumsum(torch.tensor([0, *degrees]), 0)
    for k in (4, 66):
        dsts = torch.tensor([5, 0, 3, 1, 4, 2])
        rows = oracle.sampled_positions(indptr.tolist(), dsts.tolist(), k, replace, KEY.tolist(), 1)
        expected = [position for row in rows for position in row]
        assert max(expected) > 2**32
        assert ops_of.sample_eids(indptr, dsts, torch.tensor(6), k, replace, KEY, 1, -1).tolist() == expected


@EACH_DRAW
@EACH_QUERY
def test_slices_then_rows_equal_columns(query, k, replace):
    demand = int(ops.sample_cols(*_columns(query), k, replace, KEY, 3, -1)[2])
    for slice_bound, bound in ((-1, -1), (2000, demand + 5), (2000, demand // 2)):
        fused = ops.sample_cols(*_columns(query), k, replace, KEY, 3, bound)
        sliced, sources, _ = ops.slice_cols(*_columns(query), slice_bound)
        rows = ops.rowwise_sample(sliced, sources, query.dsts, k, replace, KEY, 3, bound)
        for ours, expected in zip(rows, fused, strict=True):
            assert torch.equal(ours, expected)


@EACH_DRAW
@EACH_QUERY
def test_eids_are_the_positions_of_the_sampled_columns(query, k, replace):
    indptr, picked, count = ops.sample_cols(*_columns(query), k, replace, KEY, 3, -1)
    total = int(count)
    eids = ops.sample_eids(query.graph.indptr, query.dsts, query.count, k, replace, KEY, 3, total + 4)
    assert torch.equal(query.graph.indices[eids[:total]], picked)
    assert (eids[total:] == 0).all()
    row = torch.repeat_interleave(query.dsts, indptr[1:] - indptr[:-1])
    assert (eids[:total] >= query.graph.indptr[row]).all()
    assert (eids[:total] < query.graph.indptr[row + 1]).all()
    if not replace:
        place = torch.repeat_interleave(torch.arange(query.dsts.numel()), indptr.diff())
        distinct = torch.stack([place, eids[:total]]).unique(dim=1).shape[1]
        assert distinct == total, "a neighbour was picked twice in one row"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@EACH_QUERY
def test_fused_aggregation_has_the_bits_of_its_parts(query, dtype):
    x = values((query.graph.num_dst, 7), dtype, 1)
    for k, replace in DRAWS:
        for reduce in ("sum", "mean", "max", "min"):
            fused, demand = ops.sample_aggregate(*_columns(query), k, replace, KEY, 3, x, reduce)
            indptr, picked, count = ops.sample_cols(*_columns(query), k, replace, KEY, 3, -1)
            assert torch.equal(fused, ops.spmm(indptr, picked, x, None, reduce)), (k, replace, reduce)
            assert int(demand) == int(count)


# --- bounds ---------------------------------------------------------------------------------------------------------


@IMPLEMENTATIONS
@pytest.mark.parametrize("ids", IDS, ids=str)
def test_overflow_keeps_a_prefix_and_reports_the_demand(ops_of, ids):
    query = next(q for q in QUERIES if q.name == "repeated").to(ids)
    for k, replace in DRAWS:
        full, everything, demand = ops_of.sample_cols(*_columns(query), k, replace, KEY, 3, -1)
        eids = ops_of.sample_eids(query.graph.indptr, query.dsts, query.count, k, replace, KEY, 3, -1)
        for bound in sorted({0, 1, 2, int(demand) // 2, int(demand) - 1, int(demand), int(demand) + 9}):
            indptr, picked, count = ops_of.sample_cols(*_columns(query), k, replace, KEY, 3, bound)
            kept = min(bound, int(demand))
            assert int(count) == int(demand)
            assert picked.numel() == bound
            assert torch.equal(indptr, full.clamp(max=bound))
            assert torch.equal(picked[:kept], everything[:kept])
            assert (picked[kept:] == query.dsts[0]).all()
            cut = ops_of.sample_eids(query.graph.indptr, query.dsts, query.count, k, replace, KEY, 3, bound)
            assert torch.equal(cut[:kept], eids[:kept])


@IMPLEMENTATIONS
def test_too_few_sources_keep_local_ids_in_range(ops_of):
    query = next(q for q in QUERIES if q.name == "padded")
    sub, picked, _ = ops_of.sample_cols(*_columns(query), 5, False, KEY, 3, 120)
    whole, local, demand = ops_of.compact(query.dsts, query.count, sub, picked, query.graph.num_dst, -1)
    for bound in (0, 1, 5, int(query.count), int(demand) - 1):
        srcs, cut, count = ops_of.compact(query.dsts, query.count, sub, picked, query.graph.num_dst, bound)
        assert int(count) == int(demand) == whole.numel()
        assert torch.equal(srcs, whole[:bound])
        assert torch.equal(cut, torch.where(local < bound, local, 0))


@IMPLEMENTATIONS
def test_a_chain_of_overflows_stays_in_bounds(ops_of):
    """A count above the bound goes on to the next hop, which clamps it."""
    graph = sampling_graph()
    dsts, count = torch.arange(12, 20), torch.tensor(8)
    for bounds in ((3, 5), (20, 9), (0, 2)):
        nodes, valid = dsts, count
        for edges in bounds:
            sub, picked, _ = ops_of.sample_cols(graph.indptr, graph.indices, nodes, valid, 4, False, KEY, 0, edges)
            srcs, local, demand = ops_of.compact(nodes, valid, sub, picked, graph.num_dst, nodes.numel() // 2 + 1)
            assert int(demand) > srcs.numel()
            assert int(local.max()) < srcs.numel() if local.numel() else edges == 0
            y = ops_of.spmm(sub, local, values((srcs.numel(), 2), torch.float32, 1), None, "mean")
            assert torch.isfinite(y).all()
            nodes, valid = srcs, demand


# --- relabelling and structure --------------------------------------------------------------------------------------


@IMPLEMENTATIONS
@EACH_QUERY
def test_compact_numbers_destinations_first_then_first_appearances(ops_of, query):
    sub, picked, _ = ops_of.sample_cols(*_columns(query), 5, False, KEY, 3, -1)
    padded = torch.cat([picked, query.dsts[:1].expand(3 if query.dsts.numel() else 0)])
    srcs, local, count = ops_of.compact(query.dsts, query.count, sub, padded, query.graph.num_dst, -1)
    order = query.dsts[: int(query.count)].tolist()
    for node in picked.tolist():
        if node not in order:
            order.append(node)
    assert srcs.tolist() == order
    assert int(count) == len(order)
    assert local[: picked.numel()].tolist() == [order.index(node) for node in picked.tolist()]
    assert (local[picked.numel() :] == 0).all()


@IMPLEMENTATIONS
def test_one_self_loop_per_true_destination(ops_of):
    indptr, indices = torch.tensor([0, 3, 4, 7, 7, 7]), torch.tensor([0, 2, 0, 5, 2, 1, 2, 0, 0])
    new_indptr, new_indices = ops_of.add_self_loops(indptr, indices, torch.tensor(4))
    assert new_indptr.tolist() == [0, 2, 4, 6, 7, 7]
    assert new_indices.tolist() == [2, 0, 5, 1, 1, 2, 3, *[0] * 7]


@IMPLEMENTATIONS
def test_rows_and_out_degrees_count_true_edges_only(ops_of):
    indptr, indices = torch.tensor([0, 0, 3, 4, 4]), torch.tensor([1, 1, 0, 5, 0, 0], dtype=torch.int32)
    row = ops_of.edge_dst(indptr, 6, indices)
    assert row.dtype == torch.int32
    assert row.tolist() == [1, 1, 1, 2, 0, 0]
    assert ops_of.out_degrees(indptr, indices, 7).tolist() == [1, 2, 0, 0, 0, 1, 0]
