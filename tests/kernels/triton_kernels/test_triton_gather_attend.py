"""Attention over rows of a table and self-loops by global ids, in Triton, against float64."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.test_gather_attend import check

from joestar.kernels import gpu, tune
from joestar.kernels.gpu_edge_products import edge_products
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")
RUN = gpu.gather_attend, gpu.gather_attend_grad, gpu.row_dots


def test_every_structure():
    check(RUN, torch.float32, torch.int32, 2e-5, ((2, 5),))


@pytest.mark.parametrize("shape", [(1, 3), (4, 18), (33, 2)], ids=str)
def test_heads_and_widths(shape):
    check(RUN, torch.float32, torch.int32, 2e-5, (shape,), ("duplicates", "padded,"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 5e-3)], ids=str)
def test_other_dtypes(dtype, tolerance):
    check(RUN, dtype, torch.int64, tolerance, ((2, 5),), ("isolated", "hub", "padded,"))


@pytest.mark.parametrize("transposed", [False, True])
def test_block_diagonal(transposed):
    weight = torch.randn(3, 4, 5)
    weight = weight.transpose(1, 2) if transposed else weight
    assert torch.equal(gpu.block_diagonal(weight), torch.block_diag(*weight))
    assert torch.equal(gpu.block_diagonal(weight[:, 1:]), torch.block_diag(*weight[:, 1:]))


def test_every_setting_of_edge_products(monkeypatch):
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
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        edge_products(indptr, indices, x, grad, out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert any("dense" in config for config in tried) and not all("dense" in config for config in tried)
