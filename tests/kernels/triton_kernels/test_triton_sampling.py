"""Sampling kernels on random graphs, bit for bit the reference; their many-block paths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import check_close, check_equal
from ops.samples import other_ids

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

import triton
import triton.language as tl

from joestar.kernels import gpu, gpu_compact, gpu_launch, gpu_race, gpu_weighted
from joestar.ops import reference
from joestar.ops.race import race_key

pytestmark = pytest.mark.skipif(not gpu_launch.INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels")

KEY = torch.tensor([-(2**40) + 5, 3, 2**34 + 1])
DTYPES = st.sampled_from([torch.int32, torch.int64])


def agree(name: str, *args) -> tuple:
    """Runs the kernel and checks it against the reference; returns what both gave."""
    ours, expected = getattr(gpu, name)(*args), getattr(reference, name)(*args)
    for position, (a, b) in enumerate(zip(ours, expected, strict=True)):
        check_equal(a, b, f"{name}{list(args)[3:]}, output {position}")
    return ours


@st.composite
def graphs(draw, max_degree: int = 9):
    """(indptr, indices, num_nodes): random degrees, hubs and isolated nodes included."""
    degrees = draw(st.lists(st.integers(0, max_degree), min_size=1, max_size=40))
    degrees[0] *= 5
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    indptr = torch.zeros(len(degrees) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(degrees), 0, out=indptr[1:])
    indices = torch.randint(0, len(degrees), (int(indptr[-1]),), generator=generator)
    return indptr, indices.to(draw(DTYPES)), len(degrees)


def _destinations(draw, graph) -> tuple:
    """(dsts with padding, count): any order, repeats included; the count may exceed the bound."""
    dsts = draw(st.lists(st.integers(0, graph[2] - 1), max_size=50))
    return torch.tensor(dsts, dtype=graph[1].dtype), torch.tensor(draw(st.integers(0, len(dsts) + 3)))


def _other_ids(draw, graph) -> torch.Tensor | None:
    """What nodes hash as, if not as themselves."""
    if draw(st.booleans()):
        return None
    return other_ids(graph[2], graph[1].dtype)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_hop(data):
    """A sample, its edge ids, its relabelling, and a sample of the slice, with bounds that may be too small."""
    graph = data.draw(graphs())
    dsts, count = _destinations(data.draw, graph)
    draws = (data.draw(st.sampled_from([-1, 1, 2, 3, 5])), data.draw(st.booleans()), KEY, data.draw(st.integers(0, 9)))
    demand = int(reference.sample_cols(*graph[:2], dsts, count, *draws, -1)[2])
    bound = data.draw(st.integers(-1, demand + 5))
    ids = _other_ids(data.draw, graph)
    sub, picked, _ = agree("sample_cols", *graph[:2], dsts, count, *draws, bound, ids)
    eids = (graph[0], dsts, count, *draws, bound, ids)
    check_equal(gpu.sample_eids(*eids), reference.sample_eids(*eids), "sample_eids")
    agree("rowwise_sample", sub, picked, dsts, 2, False, KEY, 1, data.draw(st.integers(-1, demand)), ids)
    agree("compact", dsts, count, sub, picked, graph[2], data.draw(st.integers(-1, dsts.numel() + demand + 3)))


def _weights(n: int) -> torch.Tensor:
    """Weights of every kind, those that are never picked among them."""
    choices = torch.tensor([0.0, 1.0, -1.0, 2.5, float("nan"), 1e30, 1e-45, float("inf"), 1e-30])
    return choices[torch.arange(n) * 7 // 3 % 9]


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_weighted_and_collective_samples(data):
    graph = data.draw(graphs(6))
    dsts, count = _destinations(data.draw, graph)
    weight = _weights(graph[1].numel())
    k, replace = data.draw(st.sampled_from([-1, 1, 3, 8])), data.draw(st.booleans())
    demand = int(reference.weighted_sample(graph[0], weight, dsts, count, False, k, replace, KEY, 2, -1)[2])
    bound = data.draw(st.integers(-1, demand + 5))
    ids = _other_ids(data.draw, graph)
    sub, eids, _ = agree("weighted_sample", graph[0], weight, dsts, count, False, k, replace, KEY, 2, bound, ids)
    picked = graph[1][eids] if graph[1].numel() else eids.to(graph[1].dtype)
    agree("weighted_sample", sub, _weights(picked.numel()), dsts, count, True, 2, False, KEY, 3, -1, ids)
    node_weight = data.draw(st.sampled_from([None, torch.rand(graph[2], generator=torch.Generator().manual_seed(1))]))
    most = data.draw(st.integers(0, 9))
    nodes, number = agree("collective_sample", sub, picked, node_weight, graph[2], most, KEY, 4, ids)
    agree("slice_rows", sub, picked, dsts, nodes, number, data.draw(st.integers(-1, demand + 2)))


@triton.jit
def _keys(table, words, weight, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    word, value = tl.load(words + i, i < n, 0).to(tl.uint32), tl.load(weight + i, i < n, 0)
    key, may_win = gpu_race.race_key(table, word, value, i < n)
    tl.store(out + i, tl.where(may_win, key, 1 << 62), i < n)


def test_keys_of_every_word():
    """Words of every length, the last and first of each, and weights of every exponent, next to powers of two too."""
    powers = torch.tensor([1 << bit for bit in range(33)])
    words = torch.cat([torch.zeros(1, dtype=torch.int64), powers - 1, powers[:32], powers[:31] + 1]).repeat(3)
    words = torch.cat([words, torch.randint(0, 2**32, (1750,), generator=torch.Generator().manual_seed(5))])
    bits = torch.arange(words.numel()) * (2**31 // words.numel())
    bits[::5] = bits[::5] & 0x7F800000
    bits[1::5] = bits[1::5] | 0x7FFFFF
    weight = bits.to(torch.int32).view(torch.float32)
    out = torch.empty_like(words)
    _keys[(1,)](gpu_race.race_table(words.device), words, weight, out, words.numel(), BLOCK=4096)
    check_equal(out, race_key(words, weight), "race keys")


@pytest.mark.every(3)
@pytest.mark.parametrize("k", [3, 32, 33], ids=["few", "a lane each", "sorted"])
def test_weighted_samples_of_long_rows(k, monkeypatch):
    """Rows of every kind of chunk, from one program's several rows; the best come last, or are as good as others."""
    launch = {"CHUNK": 32, "ROWS": 4, "num_warps": 1}
    monkeypatch.setattr(gpu_weighted, "pick_few_settings", lambda n: launch)
    degrees = torch.tensor([129, 0, 33, 450, 32, 2])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    rank = torch.arange(int(indptr[-1])) - indptr[:-1].repeat_interleave(degrees)
    weight = torch.exp2((rank * 0.3).clamp(max=100.0))
    weight[rank % 7 == 0] = 0
    rows = torch.tensor([3, 0, 5, 1, 2, 4, 3], dtype=torch.int32)
    agree("weighted_sample", indptr, weight, rows, torch.tensor(6), False, k, False, KEY, 1, 90)


def _large(rows: int = 300):
    generator = torch.Generator().manual_seed(1)
    degrees = torch.randint(0, 7, (rows,), generator=generator)
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    return indptr, torch.randint(0, rows, (int(indptr[-1]),), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("most", [2048, 2], ids=["sums added up", "sums scanned"])
def test_many_blocks(monkeypatch, most):
    """Rows and edges over many programs: each adds up the sums before its own, or finds them scanned."""
    monkeypatch.setattr(gpu_launch, "MAX_SUMS", most)
    indptr, indices = _large()
    dsts, count = torch.arange(299, -1, -1, dtype=torch.int32), torch.tensor(290)
    for bound in (-1, 600):
        sub, picked, _ = agree("sample_cols", indptr, indices, dsts, count, 3, False, KEY, 0, bound)
    agree("slice_cols", indptr, indices, dsts, count, 1300)
    agree("compact", dsts, count, sub, picked, 300, 400)
    agree("compact", dsts[:90], torch.tensor(80), sub[:91], picked, 300, -1)
    agree("add_self_loops", indptr, indices, torch.tensor(300))


@pytest.mark.parametrize(
    "layout", [(torch.int32, 24, 127), (torch.int32, 24, 3), (torch.int64, 32, 2**30), (torch.int64, 32, 1)], ids=str
)
def test_claims_of_earlier_calls_lose(monkeypatch, layout):
    """What one call claimed must not show in the next, nor in other ops with the same table, nor once it is cleared."""
    gpu_compact.release_claims()
    monkeypatch.setattr(gpu_compact, "_LAYOUTS", (layout,))
    indptr, indices = _large(90)
    for shift in range(4):
        dsts = (torch.arange(0, 60, 3, dtype=torch.int32) + shift * 20) % 90
        args = (indptr, indices, dsts, torch.tensor(20), 2, False, KEY, shift)
        sub, picked, _ = reference.sample_cols(*args, 40)
        agree("compact", dsts, torch.tensor(20), sub, picked, 90, 60)
        agree("collective_sample", sub, picked, None, 90, 7, KEY, shift)
    table, calls, bits, period = gpu_compact.claims(torch.device("cpu"), 90, 60)
    assert (table.dtype, bits, period) == layout
    assert calls.item() == 8
    largest = torch.iinfo(table.dtype).max
    assert (table.min() >> bits) == (largest >> bits if 8 % period == 0 else period - 1 - 7 % period)
    gpu_compact.release_claims()


def test_large_sets_have_a_table_of_their_own():
    place = torch.device("cpu")
    small, same, large = (gpu_compact.claims(place, 77, size) for size in (5, 2**24, 2**24 + 1))
    assert small.table is same.table and small.table.dtype == torch.int32
    assert large.table.dtype == torch.int64 and large.table.numel() == 77
    gpu_compact.release_claims()


def test_clearing_spreads_over_programs():
    """A table of more entries than the programs of a call take at once."""
    gpu_compact.release_claims()
    nodes = 3 * 2**16 + 5
    found = gpu_compact.claims(torch.device("cpu"), nodes, 10)
    assert gpu_compact.clearing_programs(nodes) == 4
    found.table.fill_(7)
    found.calls.fill_(found.period - 1)
    ids, offsets = torch.tensor([5, nodes - 1, 5, 3]), torch.tensor([0, 2])
    gpu.compact(ids[:1], torch.tensor(1), offsets, ids[1:3], nodes, 4)
    assert (found.table == torch.iinfo(torch.int32).max).all()
    gpu_compact.release_claims()


@pytest.mark.parametrize(("k", "replace"), [(0, False), (1, True), (16, False), (17, False), (18, True), (65, False)])
def test_fanouts_around_what_fits_in_registers(k, replace):
    degrees = torch.tensor([0, 1, 15, 16, 17, 18, 39, 40, 41, 70])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32) % 10
    args = (
        indptr,
        indices,
        torch.tensor([9, 3, 0, 8, 4, 5, 9], dtype=torch.int32),
        torch.tensor(6),
        k,
        replace,
        KEY,
        1,
    )
    agree("sample_cols", *args, 7 * k)
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    y, count = gpu.sample_aggregate(*args, x, "mean")
    expected, demand = reference.sample_aggregate(*args, x.double(), "mean")
    check_close(y, expected, torch.float32, f"k={k}")
    check_equal(count, demand, f"k={k}")
