"""Rows wider than a tile, at widths around the borders of tiles and parts, against references in float64.

Everything that a kernel fills is poisoned with NaN before (``torch.empty`` under deterministic algorithms).
"""

import pytest
import torch
from kernel_checks import check_close, check_equal

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_fused, gpu_tiles
from joestar.kernels.gpu_edge_products import _edge_tiles
from joestar.kernels.gpu_gather_attend import _row_tiles
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.gpu_row_sums import _sum_tiles
from joestar.ops import reference

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")

TILE, PART = gpu_tiles._WIDEST, gpu_fused._PART
WHOLE = 64
"""Instead of 1,024: columns of rows that are added up as a whole; wider ones have tiles of half as many."""
ADDED_UP = pytest.mark.parametrize("width", [WHOLE - 1, WHOLE, WHOLE + 1, 2 * WHOLE + 3])
KEY, HEADS = torch.tensor([7, 2, 11]), 2
DEGREES = torch.tensor([0, 3, 1, 7, 2])
INDPTR = torch.cat([torch.zeros(1, dtype=torch.int64), DEGREES.cumsum(0)])
SOURCES = 8


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch):
    monkeypatch.setattr(gpu_tiles, "_WHOLE", WHOLE)
    monkeypatch.setattr(gpu_tiles, "_WIDE_TILE", WHOLE // 2)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _indices(padding: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, SOURCES, (int(INDPTR[-1]) + padding,), generator=random, dtype=torch.int32)


def _sampled(k: int) -> tuple:
    dsts = torch.tensor([1, 0, 3, 4], dtype=torch.int32)
    return INDPTR, _indices() % 5, dsts, torch.tensor(3), k, False, KEY, 2


def _compare(op: str, *args, case: str) -> None:
    """An op and its reference on the same arguments."""
    exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    ours, good = getattr(gpu, op)(*args), getattr(reference, op)(*exact)
    both = (ours, good) if isinstance(ours, (tuple, list)) else ((ours,), (good,))
    for found, expected in zip(*both, strict=True):
        if found is not None:
            check_close(found, expected, torch.float32, f"{op}, {case}")


@pytest.mark.parametrize(
    ("width", "k", "reduce"),
    [*((w, 3, "mean") for w in (TILE - 1, TILE, TILE + 1, 2 * TILE + 3, PART + 1)), (TILE + 1, 17, "max")],
)
def test_sampled_rows(width, k, reduce):
    """A fanout that is drawn pick by pick, and one whose picks are a tile; own rows, ones and zeros behind them."""
    args, x = _sampled(k), _random(5, width)
    case = f"width {width}, k {k}"
    both, count = gpu.sample_aggregate_cat(*args, x, reduce)
    expected, demand = reference.sample_aggregate_cat(*args, x.double(), reduce)
    check_close(both, expected, torch.float32, case)
    check_equal(both[:, width:], expected[:, width:].float(), case)
    check_equal(count, demand, case)
    factor = torch.tensor([1.5])
    y, count = gpu.sample_aggregate_own(*args, x, factor, "sum")
    expected, _ = reference.sample_aggregate_own(*args, x.double(), factor.double(), "sum")
    check_close(y, expected, torch.float32, case)
    check_equal(count, demand, case)


def test_columns_do_not_depend_on_the_tile():
    """Every column of a wide row is that of the same columns on their own, bit for bit."""
    args, x = _sampled(2), _random(5, PART + 3)
    whole = gpu.sample_aggregate(*args, x, "sum")[0]
    for first in (TILE - 1, PART - 1, PART):
        part = x[:, first : first + 3].contiguous()
        check_equal(gpu.sample_aggregate(*args, part, "sum")[0], whole[:, first : first + 3], f"from {first} on")


@ADDED_UP
def test_products_of_rows(width):
    """Inner products per edge, of rows of their own and of rows that heads share, as gradients of weights are."""
    indices, case = _indices(3), f"width {width}"
    x, grad = _random(SOURCES, width), _random(5, width, seed=1)
    _compare("sddmm", INDPTR, indices, x, grad, "dot", case=case)
    _compare("spmm_grad_weight", INDPTR, indices, x, grad, _random(indices.numel()), "mean", case=case)
    weight, heads = _random(indices.numel(), HEADS), (x[:, None], _random(5, HEADS, width, seed=2))
    _compare("spmm_grad_weight", INDPTR, indices, *heads, weight, "mean", case=case)
    _compare("spmm_grad_weight", INDPTR, indices, *heads, weight, "sum", case=case)


@ADDED_UP
@pytest.mark.parametrize("weighted", [False, True])
def test_extrema(width, weighted):
    indices, case = _indices(3), f"width {width}"
    x = _random(SOURCES, width).round(decimals=0)  # ties
    weight = _random(indices.numel()).sign() if weighted else None
    y, grad = gpu.spmm(INDPTR, indices, x, weight, "max"), _random(5, width, seed=1)
    _compare("spmm_extremum_grad", INDPTR, indices, x, weight, y, grad, case=case)


@ADDED_UP
def test_attention(width):
    """Scores given, and scores made of the rows of a table; both gradients."""
    indices, case = _indices(), f"width {width}"
    x, grad = _random(SOURCES, width), _random(5, HEADS, width, seed=1)
    scores = _random(SOURCES, HEADS, seed=2), _random(5, HEADS, seed=3)
    settings = 0.2, None, 1.0
    y, top, total = gpu.attend(INDPTR, indices, *scores, x[:, None], *settings)
    check_close(y, _attended(indices, *scores, x), torch.float32, case)
    inputs = [tensor.double().requires_grad_() for tensor in (*scores, x)]
    expected = torch.autograd.grad(_attended(indices, *inputs), inputs, grad.double())
    found = gpu.attend_grad(INDPTR, indices, *scores, x[:, None], top, total, grad, *settings, True)
    for ours, good in zip(found[:3], expected, strict=True):
        check_close(ours, good.reshape(ours.shape), torch.float32, case)
    dsts, vectors = torch.arange(5, dtype=torch.int32), [_random(HEADS, width, seed=s) / width**0.5 for s in (4, 5)]
    y, alpha = gpu.gather_attend(INDPTR, indices, dsts, x, *vectors, *settings)
    found, _ = gpu.gather_attend_grad(INDPTR, indices, dsts, x, alpha, grad, y, grad, *settings)
    exact = [vector.double().requires_grad_() for vector in vectors]
    rows = x.double()
    good = _attended(indices, rows @ exact[0].t(), rows[:5] @ exact[1].t(), rows)
    check_close(y, good, torch.float32, case)
    for ours, expected in zip(found, torch.autograd.grad(good, exact, grad.double()), strict=True):
        check_close(ours / width, expected / width, torch.float32, case)


def _attended(indices, s_src, s_dst, x) -> torch.Tensor:
    """Attention of shared rows in plain PyTorch, ``[5, H, F]`` in float64."""
    row = torch.repeat_interleave(torch.arange(5), DEGREES)
    source = indices[: row.numel()].long()
    z = torch.nn.functional.leaky_relu(s_src[source].double() + s_dst[row].double(), 0.2)
    out = torch.zeros(5, z.shape[1], x.shape[1], dtype=torch.float64)
    for i in range(5):
        alpha = torch.softmax(z[row == i], 0)
        out = out.index_put((torch.tensor([i]),), torch.einsum("eh,ef->hf", alpha, x[source[row == i]].double())[None])
    return out


@pytest.mark.parametrize("width", [WHOLE + 1, WHOLE + 35])
def test_sums_over_wide_heads(width):
    """A program holds all columns of a head; there are zeros behind the last edge."""
    indices, program = _indices(3), "src dst vector | add 0 1 | mul 3 2 | total 4 -> edges 5"
    leaves = [_random(SOURCES, 2 * width), _random(5, 2 * width, seed=1), _random(2 * width, seed=2)]
    _compare("segment", INDPTR, indices, leaves, program, HEADS, case=f"width {width}")


@pytest.mark.parametrize("width", [1, 2000, 20000])
def test_dropout_of_edge_values(width):
    dsts, edges = torch.arange(5, dtype=torch.int32), int(INDPTR[-1]) + 3
    args = INDPTR, edges, dsts, KEY, 0, 0.5, width
    check_equal(gpu.edge_dropout_bits(*args), reference.edge_dropout_bits(*args), f"{width} columns")


@pytest.mark.parametrize("width", [1, 3, 100, 257, 745, 4714, 20000])
def test_a_kernel_has_few_settings(width):
    """Compiling them is most of the first step's time: at most four, and at most two for rows of several tiles."""
    block = gpu_tiles.row_tile(width)
    for size in (2, 4, 8):
        assert len(gpu_tiles.tile_configs(width, size)) <= (2 if width > TILE else 4)
    for configs in (_edge_tiles(width, block), _row_tiles(width, block), _sum_tiles(width, block, HEADS)):
        compiled = {tuple(value for name, value in config.items() if name != "GRID") for config in configs}
        assert 1 <= len(compiled) <= (2 if width > WHOLE else 4), configs
