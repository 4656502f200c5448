import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import IDS, KEY, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference

ODD = [0.0, -1.0, float("nan"), float("inf"), 1e-42, 3.4e38, 1.2e-38, -float("inf")]


def make_weights(edges, seed=0, odd=True):
    """Positive weights, a third of them 0, and every odd one at the front."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(edges, generator=generator) * 10
    weight[torch.rand(edges, generator=generator) < 0.3] = 0
    if odd:
        weight[: len(ODD)] = torch.tensor(ODD)[:edges]
    return weight


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("k", [-1, 0, 1, 5, 24, 25, 100])
@pytest.mark.every(2)
def test_weighted_sample_has_the_bits_of_the_reference(ids, replace, k, any_threads):
    indptr, _ = random_csc(120, 90, mean=9)
    weight = make_weights(int(indptr[-1]))
    nodes = ((torch.arange(130) * 37) % 120).to(ids)
    for sliced, rows in ((False, nodes), (True, nodes[:120] * 3)):
        for count in (0, 50, 120):
            args = (indptr, weight, rows, torch.tensor(count), sliced, k, replace, KEY, 3)
            demand = int(reference.weighted_sample(*args, -1)[2])
            for bound in (-1, demand + 3, demand // 2):
                got = any_threads(lambda args=args, bound=bound: cpu.weighted_sample(*args, bound))
                assert same(got, reference.weighted_sample(*args, bound))


@settings(max_examples=60, deadline=None)
@given(
    degrees=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    k=st.integers(1, 6),
    replace=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_a_part_of_the_edges_that_holds_the_picks_has_the_same_ones(degrees, k, replace, seed):
    """Drawn by their positions in all of them."""
    indptr = torch.cumsum(torch.tensor([0, *degrees]), 0)
    weight, rows, count = make_weights(int(indptr[-1]), seed), torch.arange(len(degrees)), torch.tensor(len(degrees))
    sub, picked, _ = reference.weighted_sample(indptr, weight, rows, count, False, k, replace, KEY, seed, -1)
    kept = torch.rand(weight.numel(), generator=torch.Generator().manual_seed(seed)) < 0.3
    kept[picked] = True
    ranks = torch.cat([torch.arange(degree) for degree in degrees]).to(torch.int32)[kept]
    before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    args = (before[indptr], weight[kept], rows, count, False, k, replace, KEY, seed, -1, None, ranks)
    for sample in (cpu.weighted_sample, reference.weighted_sample):
        again, found, _ = sample(*args)
        assert torch.equal(again, sub) and torch.equal(torch.nonzero(kept).flatten()[found], picked)


def test_equal_weights_and_a_hub(any_threads):
    indptr, _ = random_csc(40, 90, mean=200)
    nodes = torch.arange(40)
    for weight in (torch.ones(int(indptr[-1])), make_weights(int(indptr[-1]), 3)):
        for k in (7, 60):
            args = (indptr, weight, nodes, torch.tensor(40), False, k, False, KEY, 0, -1)
            assert same(any_threads(lambda args=args: cpu.weighted_sample(*args)), reference.weighted_sample(*args))


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("mean", [6, 600])
def test_collective_sample_has_the_bits_of_the_reference(ids, mean, any_threads):
    indptr, indices = random_csc(150, 5000, mean=mean, dtype=ids, tail=4)
    for weight in (None, make_weights(5000)):
        for k in (0, 1, 30, 5001):
            args = (indptr, indices, weight, 5000, k, KEY, 2)
            assert same(any_threads(lambda args=args: cpu.collective_sample(*args)), reference.collective_sample(*args))


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("mean", [6, 300])
def test_slice_rows_has_the_bits_of_the_reference(ids, mean, any_threads):
    indptr, indices = random_csc(150, 400, mean=mean, dtype=ids, tail=4)
    srcs, rows = torch.randperm(400, generator=torch.Generator().manual_seed(1)).to(ids), torch.arange(150)
    for count in (0, 1, 100, 400, 500):
        for bound in (-1, 0, 90, int(indptr[-1]) + 5):
            args = (indptr, indices, rows, srcs, torch.tensor(count), bound)
            assert same(any_threads(lambda args=args: cpu.slice_rows(*args)), reference.slice_rows(*args))


@settings(max_examples=60, deadline=None)
@given(
    degrees=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    values=st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0, 1.0]), min_size=96, max_size=96),
    k=st.integers(-1, 14),
    replace=st.booleans(),
    site=st.integers(0, 2**32),
)
def test_any_weights(degrees, values, k, replace, site):
    indptr = torch.cumsum(torch.tensor([0, *degrees]), 0)
    weight = torch.tensor(values[: int(indptr[-1])], dtype=torch.float32)
    rows = torch.arange(len(degrees))
    args = (indptr, weight, rows, torch.tensor(len(degrees)), False, k, replace, KEY, site, -1)
    assert same(cpu.weighted_sample(*args), reference.weighted_sample(*args))


def test_wrong_inputs_are_refused():
    indptr, one, node = torch.tensor([0, 2]), torch.tensor(1), torch.tensor([0])
    weight = torch.ones(2)
    draws = (1, False, KEY, 0, -1)
    with pytest.raises(ValueError, match="float32"):
        cpu.weighted_sample(indptr, weight.double(), node, one, False, *draws)
    with pytest.raises(ValueError, match="one number per edge, got 1"):
        cpu.weighted_sample(indptr, weight[:1], node, one, False, *draws)
    with pytest.raises(ValueError, match="one row id per row"):
        cpu.weighted_sample(indptr, weight, torch.tensor([0, 1]), one, True, *draws)
    with pytest.raises(ValueError, match=r"ranks int32 \[2\], got torch.int32 \[1\]"):
        cpu.weighted_sample(indptr, weight, node, one, False, *draws, None, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="one weight per node, 3"):
        cpu.collective_sample(indptr, torch.tensor([0, 1]), weight, 3, 1, KEY, 0)
    with pytest.raises(ValueError, match="node ids of one dtype"):
        cpu.slice_rows(indptr, torch.tensor([0, 1]), node, node.int(), one, -1)
    with pytest.raises(ValueError, match=r"at least indptr\[-1\] = 2 ids, got 1"):
        cpu.slice_rows(indptr, torch.tensor([0]), node, node, one, -1)
