import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import IDS, same

from joestar.kernels import cpu
from joestar.ops import reference


def naive(dsts, count, indices, num_src):
    srcs = dsts.tolist()[:count]
    number = {}
    for i, node in enumerate(srcs):
        number.setdefault(node, i)
    local = []
    for node in indices.tolist():
        if node not in number:
            number[node] = len(srcs)
            srcs.append(node)
        local.append(number[node])
    total = len(srcs)
    size = total if num_src < 0 else num_src
    pad = srcs[0] if srcs else 0
    return [*srcs[:size], *[pad] * (size - total)], [n if n < size else 0 for n in local], total


def check(dsts, count, indices, tail, num_nodes, num_src, run=lambda f: f()):
    dtype = dsts.dtype
    sub_indptr = torch.tensor([0] * dsts.numel() + [indices.numel()])
    padded = torch.cat([indices, torch.full((tail,), num_nodes - 1, dtype=dtype)])
    args = (dsts, torch.tensor(count), sub_indptr, padded, num_nodes, num_src)
    srcs, local, total = run(lambda: cpu.compact(*args))
    expected = naive(dsts, min(count, dsts.numel()), indices, num_src)
    assert (srcs.tolist(), local.tolist(), int(total)) == (expected[0], expected[1] + [0] * tail, expected[2])
    assert srcs.dtype == local.dtype == dtype
    assert same((srcs, local, total), reference.compact(*args))


@pytest.mark.parametrize("dtype", IDS, ids=str)
@pytest.mark.parametrize("num_src", [-1, 0, 3, 40, 4000])
def test_destinations_first_then_first_appearance(dtype, num_src, any_threads):
    generator = torch.Generator().manual_seed(1)
    dsts = torch.randint(0, 500, (33,), dtype=dtype, generator=generator)  # with duplicates
    indices = torch.randint(0, 500, (900,), dtype=dtype, generator=generator)
    for count in (0, 1, 20, 33, 100):
        check(dsts, count, indices, 7, 500, num_src, any_threads)


@pytest.mark.parametrize("dtype", IDS, ids=str)
@pytest.mark.parametrize("num_src", [-1, 5, 1000, 60_000])
def test_many_edges_take_the_parallel_path(dtype, num_src, any_threads):
    generator = torch.Generator().manual_seed(2)
    dsts = torch.randperm(50_000, generator=generator)[:3000].to(dtype)
    indices = torch.randint(0, 50_000, (200_000,), dtype=dtype, generator=generator)
    check(dsts, 2900, indices, 3, 50_000, num_src, any_threads)


@settings(max_examples=60, deadline=None)
@given(
    dsts=st.lists(st.integers(0, 9), max_size=6),
    indices=st.lists(st.integers(0, 9), max_size=20),
    count=st.integers(0, 8),
    num_src=st.integers(-1, 25),
)
def test_small_cases(dsts, indices, count, num_src):
    as_ids = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    check(as_ids(dsts), count, as_ids(indices), 0, 10, num_src)


def test_calls_leave_no_trace():
    dsts, indices = torch.tensor([4]), torch.tensor([7, 4, 8, 7])
    sub_indptr = torch.tensor([0, 4])
    first = cpu.compact(dsts, torch.tensor(1), sub_indptr, indices, 10, -1)
    for node in range(10):
        cpu.compact(torch.tensor([node]), torch.tensor(1), sub_indptr, indices, 10, -1)
    assert same(cpu.compact(dsts, torch.tensor(1), sub_indptr, indices, 10, -1), first)


def test_ids_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="node ids of one dtype"):
        cpu.compact(torch.tensor([1]), torch.tensor(1), torch.tensor([0, 1]), torch.tensor([2]).int(), 5, -1)
