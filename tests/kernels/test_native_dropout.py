import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import IDS, KEY, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference

RATES = [0.0, 0.1, 0.5, 0.75, 1e-9, 0.9999999]


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("columns", [0, 1, 32, 33, 128])
@pytest.mark.parametrize("p", RATES)
def test_rows_and_edges_have_the_bits_of_the_reference(ids, columns, p, any_threads):
    nodes = ((torch.arange(203) * 7919) % 100_003).to(ids)
    args = (nodes, KEY, 5, p, columns)
    assert same(any_threads(lambda: cpu.dropout_bits(*args)), reference.dropout_bits(*args))
    indptr, _ = random_csc(203, 50, mean=4)
    for edges in (int(indptr[-1]), int(indptr[-1]) + 70, 0):
        args = (indptr, edges, nodes, KEY, 5, p, columns)
        assert same(any_threads(lambda args=args: cpu.edge_dropout_bits(*args)), reference.edge_dropout_bits(*args))


def test_many_rows_and_a_hub(any_threads):
    nodes = torch.arange(40_000, dtype=torch.int32)
    bits = any_threads(lambda: cpu.dropout_bits(nodes, KEY, 0, 0.3, 96))
    assert same(bits, reference.dropout_bits(nodes, KEY, 0, 0.3, 96))
    indptr, _ = random_csc(3000, 50, mean=30)
    args = (indptr, int(indptr[-1]), nodes[:3000], KEY, 0, 0.5, 8)
    assert same(any_threads(lambda: cpu.edge_dropout_bits(*args)), reference.edge_dropout_bits(*args))


@settings(max_examples=40, deadline=None)
@given(
    p=st.floats(0, 1, exclude_max=True),
    columns=st.integers(1, 70),
    nodes=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=80),
    site=st.integers(0, 2**20 - 1),
)
def test_any_rate_and_any_ids(p, columns, nodes, site):
    args = (torch.tensor(nodes), KEY, site, p, columns)
    assert same(cpu.dropout_bits(*args), reference.dropout_bits(*args))


def test_edges_without_rows_and_wrong_shapes():
    none = torch.empty(0, dtype=torch.int64)
    assert cpu.edge_dropout_bits(torch.tensor([0]), 3, none, KEY, 0, 0.5, 40).tolist() == [[0, 0]] * 3
    with pytest.raises(ValueError, match="one id per row, 2, got 1"):
        cpu.edge_dropout_bits(torch.tensor([0, 1, 2]), 2, torch.tensor([5]), KEY, 0, 0.5, 4)
    with pytest.raises(ValueError, match="ids int32 or int64"):
        cpu.dropout_bits(torch.tensor([0.5]), KEY, 0, 0.5, 4)


WIDTHS = [1, 2, 3, 4, 8, 31, 33, 63, 64, 65, 100, 128, 130, 192, 256, 300, 512, 600, 1024, 1100, 2048, 2100]
"""Every number of words that has a loop of its own, whole blocks of columns and rests."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", WIDTHS)
def test_masks_have_the_bits_of_the_reference(columns, dtype):
    """Nothing that is dropped shows, not even what is not finite, and zeros have no sign."""
    random = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=random).to(dtype)
    x.view(-1)[::5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])[torch.arange(x.numel())[::5] % 4].to(dtype)
    bits = torch.randint(-(2**31), 2**31, (9, -(-columns // 32)), generator=random).int()
    for relu in (False, True):
        y, expected = (f.dropout_apply(x, bits, 0.25, relu) for f in (cpu, reference))
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        zeros = expected == 0
        assert torch.equal(y.signbit()[zeros], expected.signbit()[zeros])
    grad = torch.randn(9, columns, generator=random).to(dtype)
    got, wanted = (f.relu_dropout_grad(grad, x, 0.25) for f in (cpu, reference))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
