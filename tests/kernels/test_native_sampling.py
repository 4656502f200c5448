import pytest
import torch
from native_support import IDS, KEY, random_csc, same, sampled_positions

from joestar.kernels import cpu
from joestar.ops import reference


def count_of(value):
    return torch.tensor(value)


@pytest.fixture(params=IDS, ids=str)
def graph(request):
    indptr, indices = random_csc(400, 400, mean=20, dtype=request.param)
    dsts = ((torch.arange(137) * 53) % 400).to(request.param)
    return indptr, indices, dsts


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("k", [-1, 0, 1, 2, 15, 64, 65, 300])
def test_picks_follow_the_definition(graph, k, replace, any_threads):
    indptr, indices, dsts = graph
    rows = sampled_positions(indptr, dsts, 130, k, replace, KEY, 9)
    offsets, ids, count = any_threads(
        lambda: cpu.sample_cols(indptr, indices, dsts, count_of(130), k, replace, KEY, 9, -1)
    )
    flat = [position for row in rows for position in row]
    assert (offsets[1:] - offsets[:-1]).tolist() == [len(row) for row in rows]
    assert ids.tolist() == indices[flat].tolist() if flat else ids.numel() == 0
    assert int(count) == len(flat)
    assert offsets.dtype == count.dtype == torch.int64
    assert ids.dtype == dsts.dtype
    eids = cpu.sample_eids(indptr, dsts, count_of(130), k, replace, KEY, 9, -1)
    assert eids.dtype == torch.int64
    assert eids.tolist() == flat


@pytest.mark.parametrize("k", [-1, 0, 7, 64, 65])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("bound", [-1, 0, 11, 900, 5000])
@pytest.mark.every(2)
def test_equals_the_reference(graph, k, replace, bound, any_threads):
    indptr, indices, dsts = graph
    for count in (0, 50, 137, 1000):
        args = (dsts, count_of(count), k, replace, KEY, 2, bound)
        assert same(any_threads(lambda args=args: cpu.sample_cols(indptr, indices, *args)),
                    reference.sample_cols(indptr, indices, *args))  # fmt: skip
        assert same(cpu.sample_eids(indptr, *args), reference.sample_eids(indptr, *args))


def test_an_overflow_is_reported_and_cut(graph):
    indptr, indices, dsts = graph
    whole = cpu.sample_cols(indptr, indices, dsts, count_of(137), 5, False, KEY, 0, -1)
    needed = int(whole[2])
    for bound in (0, 1, needed - 1, needed, needed + 30):
        offsets, ids, count = cpu.sample_cols(indptr, indices, dsts, count_of(137), 5, False, KEY, 0, bound)
        assert int(count) == needed
        assert int(offsets[-1]) == min(bound, needed)
        assert ids.numel() == bound
        kept = min(bound, needed)
        assert torch.equal(ids[:kept], whole[1][:kept])
        assert (ids[kept:] == dsts[0]).all()


def test_slicing_then_sampling_rows_is_sampling_columns(graph):
    indptr, indices, dsts = graph
    offsets, ids, count = cpu.slice_cols(indptr, indices, dsts, count_of(137), -1)
    assert same((offsets, ids, count), reference.slice_cols(indptr, indices, dsts, count_of(137), -1))
    for replace in (False, True):
        rows = cpu.rowwise_sample(offsets, ids, dsts, 6, replace, KEY, 4, -1)
        assert same(rows, cpu.sample_cols(indptr, indices, dsts, count_of(137), 6, replace, KEY, 4, -1))
        assert same(rows, reference.rowwise_sample(offsets, ids, dsts, 6, replace, KEY, 4, -1))


@pytest.mark.parametrize("dtype", IDS, ids=str)
def test_empty_graphs_and_no_destinations(dtype):
    indptr, indices = torch.zeros(6, dtype=torch.int64), torch.empty(0, dtype=dtype)
    dsts = torch.tensor([3, 1], dtype=dtype)
    offsets, ids, count = cpu.sample_cols(indptr, indices, dsts, count_of(2), 5, True, KEY, 0, -1)
    assert offsets.tolist() == [0, 0, 0]
    assert ids.numel() == int(count) == 0
    assert cpu.sample_cols(indptr, indices, dsts, count_of(2), 5, True, KEY, 0, 4)[1].tolist() == [3, 3, 3, 3]
    none = torch.empty(0, dtype=dtype)
    offsets, ids, count = cpu.sample_cols(indptr, indices, none, count_of(0), 5, False, KEY, 0, 3)
    assert offsets.tolist() == [0]
    assert ids.tolist() == [0, 0, 0]
    assert int(count) == 0


def test_large_node_ids_and_offsets_hash_by_both_words():
    # Rows are sliced before, so that ids past 2^32 need no indptr of that length.
    row_ids = torch.tensor([5, 5 + 2**32, 2**40 + 5])
    indptr, indices = torch.tensor([0, 100, 200, 300]), torch.arange(300)
    offsets, ids, _ = cpu.rowwise_sample(indptr, indices, row_ids, 10, False, KEY, 0, -1)
    assert same((offsets, ids), reference.rowwise_sample(indptr, indices, row_ids, 10, False, KEY, 0, -1)[:2])
    rows = [(ids[10 * i : 10 * i + 10] - 100 * i).tolist() for i in range(3)]
    assert rows[0] != rows[1] != rows[2] != rows[0]


def test_every_part_of_the_key_matters(graph):
    indptr, indices, dsts = graph
    results = set()
    keys = [[1, 2, 3], [1 + 2**32, 2, 3], [2, 2, 3], [1, 3, 3], [1, 2, 4], [1, 2, 3 + 2**32]]
    for key, site in [(key, 0) for key in keys] + [(keys[0], 1)]:
        ids = cpu.sample_cols(indptr, indices, dsts, count_of(137), 5, False, torch.tensor(key), site, -1)[1]
        results.add(tuple(ids.tolist()))
    assert len(results) == 7


def test_picks_of_a_row_are_uniform():
    indptr, indices = torch.tensor([0, 12]), torch.arange(12)
    seen = torch.zeros(12)
    steps = 3000
    for step in range(steps):
        key = torch.tensor([0, 0, step])
        ids = cpu.sample_cols(indptr, indices, torch.tensor([0]), count_of(1), 4, False, key, 0, -1)[1]
        assert ids.unique().numel() == 4
        seen[ids] += 1
    expected = steps * 4 / 12
    assert float(((seen - expected) ** 2 / expected).sum()) < 31.3  # chi-square, 11 degrees of freedom, 0.1 %


def test_mistakes_are_named(graph):
    indptr, indices, dsts = graph
    other = torch.int64 if dsts.dtype == torch.int32 else torch.int32
    with pytest.raises(ValueError, match="node ids of one dtype"):
        cpu.sample_cols(indptr, indices, dsts.to(other), count_of(1), 5, False, KEY, 0, -1)
    with pytest.raises(ValueError, match="expected indptr int64"):
        cpu.sample_cols(indptr.int(), indices, dsts, count_of(1), 5, False, KEY, 0, -1)
    with pytest.raises(ValueError, match="dsts int32 or int64"):
        cpu.sample_eids(indptr, dsts.float(), count_of(1), 5, False, KEY, 0, -1)
    with pytest.raises(ValueError, match="seed, epoch, step"):
        cpu.sample_cols(indptr, indices, dsts, count_of(1), 5, False, KEY[:2], 0, -1)
    with pytest.raises(ValueError, match="one row id per row"):
        cpu.rowwise_sample(indptr, indices, dsts, 5, False, KEY, 0, -1)
