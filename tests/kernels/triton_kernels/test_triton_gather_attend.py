"""Attention over rows of a table and self-loops by global ids, in Triton, against float64."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from kernel_checks import in_double
from ops.test_gather_attend import check

from joestar.kernels import gpu, gpu_gather_attend, gpu_heads, gpu_warp_rows, tune
from joestar.kernels.gpu_edge_products import edge_products
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]
RUN = gpu.gather_attend, gpu.gather_attend_grad


def test_every_structure():
    check(RUN, torch.float32, torch.int32, 2e-5, ((2, 5),))


@pytest.mark.parametrize("shape", [(1, 3), (4, 18), (33, 2)], ids=str)
def test_heads_and_widths(shape):
    check(RUN, torch.float32, torch.int32, 2e-5, (shape,), ("duplicates", "padded,"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 5e-3)], ids=str)
def test_other_dtypes(dtype, tolerance):
    check(RUN, dtype, torch.int64, tolerance, ((2, 5),), ("isolated", "hub", "padded,"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 5e-3)], ids=str)
def test_products_of_first_rows(dtype, tolerance):
    random = torch.Generator().manual_seed(0)
    for rows, n, heads, width in ((30, 23, 4, 100), (9, 9, 1, 5), (40, 3, 8, 1100), (5, 0, 2, 3), (3, 2, 1, 0)):
        x, by = (torch.randn(size, width, generator=random).to(dtype) for size in (rows, heads))
        found = gpu_gather_attend.first_products(x, n, by)
        assert found.dtype == dtype
        wanted = x[:n].double() @ by.double().t()
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * width**0.5)
    with pytest.raises(ValueError, match="at least 4 rows"):
        gpu_gather_attend.first_products(x, 4, by)


@pytest.mark.parametrize("transposed", [False, True])
def test_block_diagonal(transposed):
    weight = torch.randn(3, 4, 5)
    weight = weight.transpose(1, 2) if transposed else weight
    assert torch.equal(gpu_heads.block_diagonal(weight), torch.block_diag(*weight))
    assert torch.equal(gpu_heads.block_diagonal(weight[:, 1:]), torch.block_diag(*weight[:, 1:]))


def test_every_setting_of_edge_products(monkeypatch, tf32):
    """On tensor cores or not, in tiles of any size: destinations without edges, with one, with many."""
    degrees = torch.tensor([0, 3, 1, 0, 40, 2, 5, 0, 0, 7, 1])
    indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    random = torch.Generator().manual_seed(0)
    edges = int(indptr[-1])
    indices = torch.randint(0, 9, (edges + 4,), generator=random, dtype=torch.int32)
    x, grad = torch.randn(9, 1, 18, generator=random), torch.randn(degrees.numel(), 4, 18, generator=random)
    row = torch.repeat_interleave(torch.arange(degrees.numel()), degrees)
    expected = torch.einsum("ef,ehf->eh", x[indices[:edges].long(), 0], grad[row])
    tried = []

    def every(_kernel, _shape, candidates, launch, *_):
        for config in candidates:
            tried.append(config)
            out.fill_(float("nan"))
            launch(config)
            torch.testing.assert_close(out[:edges], expected, rtol=1e-5, atol=1e-5, msg=str(config))
        return candidates[0]

    monkeypatch.setattr(tune, "choose", every)
    out = torch.empty(indices.numel(), 4)
    edge_products(indptr, indices, x, grad, out)
    assert {name for config in tried for name in ("GRID", "dense", "EDGES") if name in config} == {
        "GRID",
        "dense",
        "EDGES",
    }


def _degrees():
    """(largest degree, dropout, slope): long rows take the interpreter seconds each."""
    for most in (9, 3, 40):
        for rest in ((True, 0.2), (False, 0.2), (True, 0.0), (False, -0.5)):
            yield pytest.param(most, *rest, marks=pytest.mark.slow if most == 40 and rest != (True, 0.2) else ())


@pytest.mark.parametrize(("most", "dropout", "slope"), list(_degrees()))
def test_one_pass_over_destinations_of_any_degree(most, dropout, slope):
    """More edges than a warp has rows in registers, fewer, and none; programs with several destinations."""
    check_one_pass(most, dropout, slope)


@pytest.mark.parametrize("most", [2, 9])
@pytest.mark.parametrize(
    ("heads", "width", "dtype"),
    [(1, 130, torch.float32), (4, 100, torch.float32), (5, 6, torch.float64), (20, 3, torch.float32),
     (2, 64, torch.float16), (1, 1, torch.float64)], ids=str,
)  # fmt: skip
def test_one_pass_with_any_number_of_heads(most, heads, width, dtype):
    """Products that are as many as a warp has lanes, fewer and more, whose rows lie in any way."""
    check_one_pass(most, True, 0.2, heads, width, dtype, {torch.float64: 1e-12, torch.float32: 2e-4}.get(dtype, 2e-2))


def check_one_pass(most, dropout, slope, heads=3, width=6, dtype=torch.float64, tolerance=1e-12):
    random = torch.Generator().manual_seed(most)
    degrees = torch.randint(0, most + 1, (37,), generator=random) * (torch.rand(37, generator=random) < 0.6)
    indptr = torch.zeros(38, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    edges = int(indptr[-1])
    table = torch.randn(20, width, generator=random, dtype=dtype)
    indices = torch.randint(0, 20, (edges + 5,), generator=random)
    dsts = torch.randint(0, 20, (37,), generator=random)
    vectors = [torch.randn(heads, width, generator=random, dtype=dtype) for _ in range(2)]
    bits = torch.randint(-(2**31), 2**31, (edges + 5, 1), generator=random, dtype=torch.int32) if dropout else None
    of_edges = torch.randn(edges + 5, heads, generator=random, dtype=dtype)
    of_edges[edges:] = float("nan")
    args = (indptr, indices, dsts, table, *vectors, slope, bits, 1.5, of_edges)
    assert gpu_warp_rows.fits(37, edges + 5, table, heads) and degrees.max() > most // 2
    (y, alpha), (good, signed) = gpu.gather_attend(*args), torch.ops.joestar.gather_attend(*in_double(args))

    def near(found, wanted):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * max(1, wanted.abs().max()))

    near(y, good)
    exact = dtype == torch.float64  # otherwise a sum of scores of almost 0 may have either sign
    near(*(values[:edges] if exact else values[:edges].abs() for values in (alpha, signed)))
    grad = torch.randn(y.shape, generator=random, dtype=dtype)
    args = (*args[:4], signed.to(alpha.dtype), grad, good.to(dtype), grad, *args[6:9], True)
    wanted = torch.ops.joestar.gather_attend_grad(*in_double(args))
    for ours, theirs in zip(gpu.gather_attend_grad(*args), wanted, strict=True):
        near(ours, theirs)


@pytest.mark.parametrize("fits", [True, False])
def test_slopes_of_any_sign_and_a_late_highest_score(monkeypatch, fits):
    """Edges that are not there have no score, whatever the slope; the last edge's may be larger by hundreds."""
    monkeypatch.setattr(gpu_gather_attend, "fits", lambda *sizes: fits)
    indptr, dsts = torch.tensor([0, 3, 3, 23, 24]), torch.tensor([0, 1, 2, 3])
    indices, table = torch.arange(24), torch.randn(24, 5, dtype=torch.float64)
    table[22], vectors = 300, [torch.ones(2, 5, dtype=torch.float64) for _ in range(2)]
    for slope in (0.2, 0.0, -0.5):
        args = (indptr, indices, dsts, table, *vectors, slope, None, 1.0)
        for found, expected in zip(gpu.gather_attend(*args), torch.ops.joestar.gather_attend(*args), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
