"""Attention over rows of a table, compiled: every dtype, and a size at which its settings are chosen by timing."""

import pytest
import torch
from ops.test_gather_attend import check

from joestar.kernels import gpu, gpu_edge_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ops = torch.ops.joestar


def on_gpu(function):
    """``function`` of the arguments' copies on the GPU; results on the CPU."""

    def run(*args):
        found = function(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in args))
        return found.cpu() if isinstance(found, torch.Tensor) else tuple(value.cpu() for value in found)

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)], ids=str,
)  # fmt: skip
def test_values_and_gradients(dtype, tolerance):
    run = tuple(map(on_gpu, (gpu.gather_attend, gpu.gather_attend_grad)))
    check(run, dtype, torch.int32, tolerance, ((4, 18), (33, 2)))  # in one pass, in several


@pytest.mark.parametrize(("heads", "width"), [(4, 100), (8, 768)])
def test_large(heads, width):
    random = torch.Generator().manual_seed(0)
    rows, most = 40_000, 6
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.randint(0, most + 1, (rows,), generator=random), 0, out=indptr[1:])
    table = torch.randn(50_000, width, generator=random)
    indices = torch.randint(0, 50_000, (int(indptr[-1]) + 100,), generator=random, dtype=torch.int32)
    dsts = torch.randint(0, 50_000, (rows,), generator=random, dtype=torch.int32)
    vectors = [torch.randn(heads, width, generator=random) / 10 for _ in range(2)]
    bits = torch.randint(-(2**31), 2**31, (indices.numel(), 1), generator=random, dtype=torch.int32)
    of_edges = torch.randn(indices.numel(), heads, generator=random)
    args = (indptr, indices, dsts, table, *vectors, 0.2, bits, 1.5, of_edges)
    ours, good = on_gpu(ops.gather_attend)(*args), ops.gather_attend(*args)
    torch.testing.assert_close(ours[0], good[0], rtol=1e-4, atol=1e-4)
    edges = int(indptr[-1])
    signed = (ours[1][:edges].abs(), good[1][:edges].abs())  # a logit of almost 0 may have either sign
    torch.testing.assert_close(*signed, rtol=1e-4, atol=1e-4)
    grad = torch.randn(good[0].shape, generator=random)
    args = (*args[:4], good[1], grad, good[0], grad, *args[6:9], True)
    for found, expected in zip(on_gpu(ops.gather_attend_grad)(*args), ops.gather_attend_grad(*args), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_products_per_head():
    x, weight = torch.randn(5_000, 4, 100, device="cuda"), torch.randn(4, 32, 100, device="cuda")
    y = ops.head_linear(x, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.einsum("nhf,hcf->nhc", x, weight), rtol=1e-3, atol=1e-2)
    grad = torch.randn_like(y)
    expected = torch.einsum("nhc,nhf->hcf", grad, x)
    torch.testing.assert_close(ops.head_linear_weight_grad(x, grad), expected, rtol=1e-3, atol=1.0)


def test_gradients_in_tf32(monkeypatch):
    """The form on tensor cores may be chosen: as exact as TF32."""
    monkeypatch.setattr(gpu_edge_products, "_edge_tiles", lambda width, numbers: [])
    monkeypatch.setattr(gpu_edge_products, "fits", lambda *sizes, held: False)
    random = torch.Generator().manual_seed(0)
    indptr = torch.arange(0, 30_001 * 6, 6)
    x, grad = torch.randn(40_000, 1, 100, generator=random), torch.randn(30_000, 4, 100, generator=random)
    indices = torch.randint(0, 40_000, (180_000,), generator=random, dtype=torch.int32)
    out = torch.empty(180_000, 4, device="cuda")
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        gpu_edge_products.edge_products(indptr.cuda(), indices.cuda(), x.cuda(), grad.cuda(), out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    expected = torch.einsum("ef,ehf->eh", x[indices.long(), 0], grad.repeat_interleave(6, 0))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-2, atol=5e-2)
