"""Every activation and the norm in Triton kernels, forward and back: against the references, and with NaN."""

import math

import pytest
import torch
from kernel_checks import check_close
from ops.database_activated import ACTS, EPS

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

import triton
import triton.language as tl

from joestar.kernels import gpu, gpu_activations, gpu_links
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")

STRUCTURE = torch.tensor([0, 2, 2, 7]), torch.tensor([5, 0, 3, 3, 6, 5, 2], dtype=torch.int32)
ROWS, SOURCES, WIDTH = 3, 7, 37


def inputs(dtype: torch.dtype) -> tuple:
    """(x, gain, shift, bias, bits); arguments far from 0, too, where exponentials overflow."""
    random = torch.Generator().manual_seed(0)
    x, gain, shift, bias = (torch.randn(s, generator=random) for s in ((SOURCES, WIDTH), WIDTH, WIDTH, WIDTH))
    x[:, ::7] *= 60
    bits = torch.randint(-(2**31), 2**31, (SOURCES, 2), generator=random, dtype=torch.int32)
    return *(v.to(dtype) for v in (x, gain, shift, bias)), bits


def double(args) -> tuple:
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.each("act")
def test_every_activation(act, dtype, atomic):
    x, gain, shift, bias, bits = inputs(dtype)
    grad = torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    for norm, mask in (((gain, shift, EPS, None), bits), ((None, None, 0.0, bias), None)):
        rest = (None, None, mask, 1.0 if mask is None else 2.0, "mean", True, act, *norm)
        args, back = (*STRUCTURE, x, *rest), (*STRUCTURE, grad, x, *rest)
        exact = reference.aggregate_activated(*double(args))
        check_close(gpu.aggregate_activated(*args), exact, dtype, act)
        found, exact = gpu.aggregate_activated_grad(*back), reference.aggregate_activated_grad(*double(back))
        for ours, good in zip(found, exact, strict=True):
            check_close(ours, good, dtype, f"gradients of {act}")


@pytest.mark.parametrize("act", ["gelu none", "identity"])
def test_rows_that_fill_their_tile(act, atomic):
    """No column of a norm's tile is outside."""
    _, *vectors, bits = inputs(torch.float32)
    x, gain, shift, _, bits = (v[..., :32].contiguous() for v in (inputs(torch.float32)[0], *vectors, bits[:, :1]))
    rest = (None, None, bits, 2.0, "mean", True, act, gain, shift, EPS, None)
    args, back = (*STRUCTURE, x, *rest), (*STRUCTURE, torch.cat([x, x], 1)[:ROWS], x, *rest)
    check_close(gpu.aggregate_activated(*args), reference.aggregate_activated(*double(args)), x.dtype, act)
    found, exact = gpu.aggregate_activated_grad(*back), reference.aggregate_activated_grad(*double(back))
    for ours, good in zip(found, exact, strict=True):
        check_close(ours, good, x.dtype, f"gradients of {act}")


@triton.jit
def _gelu(x, out, by_x, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    u = tl.load(x + i, i < n, 0)
    tl.store(out + i, gpu_activations.activate(u, ACT, tl.float32), i < n)
    tl.store(by_x + i, gpu_activations.through_activation(1.0, u, ACT, tl.float32), i < n)


def test_gelu_is_exact_to_the_rounding():
    """Within two units in the last place of 1, or of the argument; the ends of the range are PyTorch's."""
    ends = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, 3e38, -3e38, math.inf, -math.inf, math.nan])
    x = torch.cat([torch.linspace(-13, 13, 32000), ends])
    out, by_x = torch.empty_like(x), torch.empty_like(x)
    _gelu[(1,)](x, out, by_x, x.numel(), ACT=("gelu", "none"), BLOCK=32768)
    wide = x.double().requires_grad_()
    exact = torch.nn.functional.gelu(wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    inner = slice(0, 32000)
    assert ((out - exact).abs() / wide.abs().clamp(min=1))[inner].max() < 2.4e-7
    assert (by_x - slope)[inner].abs().max() < 2.4e-7
    assert torch.equal(out[32000:].isnan(), exact[32000:].isnan())
    torch.testing.assert_close(out[32000:], exact[32000:].float(), equal_nan=True)
    finite = slope[32000:].isfinite()
    torch.testing.assert_close(by_x[32000:][finite], slope[32000:][finite].float())


@pytest.mark.parametrize("act", ACTS)
def test_where_pieces_meet(act, atomic):
    """Values and derivatives there are PyTorch's."""
    x = torch.tensor([-3.0, 0.0, 3.0, -0.0, 1.0]).expand(SOURCES, 5).contiguous()
    rest = (None, None, None, 1.0, "sum", False, act, None, None, 0.0, None)
    ours, exact = (module.aggregate_activated(*STRUCTURE, x, *rest) for module in (gpu, reference))
    check_close(ours, exact, x.dtype, act)
    back = (*STRUCTURE, torch.ones(ROWS, 5), x, *rest)
    ours, exact = gpu.aggregate_activated_grad(*back)[0], reference.aggregate_activated_grad(*back)[0]
    check_close(ours, exact, x.dtype, act)


@pytest.mark.parametrize("act", ACTS)
def test_nan_passes(act):
    """Into the result of every row that reads it, and into the gradient of its own."""
    x, gain, shift, _, _ = inputs(torch.float32)
    x[3, 2] = float("nan")
    for norm in ((gain, shift, EPS, None), (None, None, 0.0, None)):
        rest = (None, None, None, 1.0, "sum", True, act, *norm)
        y = gpu.aggregate_activated(*STRUCTURE, x, *rest)
        assert y[2, 2].isnan() and not y[:2].isnan().any()
        assert y[2, :WIDTH].isnan().all() == (norm[2] > 0)
        by_x = gpu.aggregate_activated_grad(*STRUCTURE, torch.ones(ROWS, 2 * WIDTH), x, *rest)[0]
        assert by_x[3].isnan().any() == (norm[2] > 0 or act not in PIECES)


PIECES = {"relu", "identity", "leaky_relu 0.2", "hardtanh -0.5 0.7", "hardsigmoid"}
"""Activations whose derivative is a number on pieces: at NaN it is that of one of them, as in PyTorch."""


@pytest.mark.parametrize("warps", [2, 16])
def test_a_program_takes_several_tiles(warps, atomic, monkeypatch):
    """The sums for the norm's vectors are added up tile after tile, and over programs."""
    monkeypatch.setattr(gpu_links, "_RESIDENT", warps)
    random, width, sources, rows = torch.Generator().manual_seed(0), 40, 157, 60
    edges = torch.repeat_interleave(torch.arange(sources, dtype=torch.int32), torch.arange(sources) % 7 % 6)
    edges = edges[torch.randperm(edges.numel(), generator=random)]
    indptr = torch.linspace(0, edges.numel(), rows + 1).long()
    x, gain, shift, bias = (torch.randn(s, generator=random) for s in ((sources, width), width, width, width))
    grad = torch.randn(rows, width, generator=random)
    weight, own = torch.randn(edges.numel(), generator=random), torch.tensor([0.5])
    rest = (weight, own, None, 1.0, "sum", False, "silu", gain, shift, EPS, bias)
    found = gpu.aggregate_activated_grad(indptr, edges, grad, x, *rest)
    exact = reference.aggregate_activated_grad(*double((indptr, edges, grad, x, *rest)))
    for ours, good in zip(found, exact, strict=True):
        check_close(ours, good, torch.float32, f"{warps} warps")


def test_a_norm_of_rows_of_several_tiles_is_refused():
    x, norm = torch.zeros(SOURCES, 300), (None, None, EPS)
    with pytest.raises(ValueError, match="a norm over 256 columns at most, got 300"):
        gpu.aggregate_activated(*STRUCTURE, x, None, None, None, 1.0, "sum", True, "tanh", *norm)


def test_no_sources():
    empty = torch.zeros(1).long(), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 12), torch.zeros(0, 6)
    rest = (None, None, None, 1.0, "sum", True, "silu", torch.ones(6), torch.ones(6), EPS, torch.ones(6))
    by_x, *sums = gpu.aggregate_activated_grad(*empty, *rest)
    assert by_x.shape == (0, 6) and all(s.shape == (6,) and not s.any() for s in sums)
