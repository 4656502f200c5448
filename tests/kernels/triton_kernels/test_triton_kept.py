"""Bits that an aggregation stores for its gradient: rows of any width, and what both read of them."""

import pytest
import torch
from kernel_checks import check_close, check_equal

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_activation, gpu_links
from joestar.kernels.gpu_bits import rows_within_warps
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.gpu_tiles import tile_configs
from joestar.ops import reference

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]

STRUCTURE = torch.tensor([0, 2, 2, 7, 7]), torch.tensor([5, 0, 3, 3, 7, 5, 2, 1], dtype=torch.int32)
READ = [0, 2, 3, 5, 7]
"""Sources of edges; the last index is that of no edge."""
ROWS, SOURCES = 4, 9


def _inputs(width: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(width)
    x = torch.randn(SOURCES, width, generator=random).to(dtype)
    x[:, ::5] = 0.0
    x[1, ::3] = torch.nan
    return x, torch.randint(-(2**31), 2**31, (SOURCES, -(-width // 32)), generator=random, dtype=torch.int32)


def same(found: torch.Tensor, expected: torch.Tensor, case: str) -> None:
    """Bit by bit but for what NaN is made of."""
    check_equal(found.nan_to_num(7e7), expected.nan_to_num(7e7), case)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 65, 96, 128, 160, 256, 257, 300, 768])
def test_rows_of_any_width(width, atomic):
    x, bits = _inputs(width)
    whole, expected = reference.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "sum")
    y, kept = gpu.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "sum")
    assert whole.isnan().any() or width < 4, "NaN passes ReLU"
    torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-5, equal_nan=True)
    same(y, gpu.aggregate_cat(*STRUCTURE, x, bits, 2.0, "sum"), f"width {width}")
    all_read = sorted({*READ, *range(ROWS)})
    check_equal(kept[all_read], expected[all_read], f"width {width}")
    for own, read in ((None, READ), (torch.tensor([0.5]), all_read)):
        args = (None, own, bits, 2.0, "mean")
        y, kept = gpu.aggregate_rows_kept(*STRUCTURE, x, *args)
        same(y, gpu.aggregate_rows(*STRUCTURE, x, *args), f"width {width}")
        check_equal(kept[read], expected[read], f"width {width}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, atomic):
    x, bits = _inputs(70, dtype)
    expected = reference.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "mean")[1]
    check_equal(gpu.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "mean")[1][READ], expected[READ], str(dtype))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("width", [40, 300])
def test_gradients_whatever_rows_hold_that_nobody_reads(width, deterministic, atomic):
    torch.use_deterministic_algorithms(deterministic)
    x, bits = _inputs(width)
    random = torch.Generator().manual_seed(1)
    both, single = (torch.randn(ROWS, n * width, generator=random) for n in (2, 1))
    weight, own = torch.randn(8, generator=random), torch.tensor([0.5])
    _, kept = gpu.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "mean")
    kept[[6, 8]] = -1
    exact = reference.aggregate_cat_grad(*STRUCTURE, both.double(), x, bits, 2.0, "mean")
    for biased in (False, True):
        ours, of_bias = gpu.aggregate_cat_kept_grad(*STRUCTURE, both, kept, 2.0, "mean", biased)
        check_close(ours, exact, torch.float32, "aggregate_cat")
        check_close(of_bias, exact.sum(0) if biased else exact.new_empty(0), torch.float32, "bias of aggregate_cat")
    for factor in (None, own):
        _, kept = gpu.aggregate_rows_kept(*STRUCTURE, x, weight, factor, bits, 2.0, "sum")
        kept[[6, 8]] = -1
        wide = None if factor is None else factor.double()
        exact = reference.aggregate_rows_grad(*STRUCTURE, single.double(), x, weight.double(), wide, bits, 2.0, "sum")
        ours = gpu.aggregate_rows_kept_grad(*STRUCTURE, single, weight, factor, kept, 2.0, "sum", True)
        check_close(ours[0], exact, torch.float32, f"aggregate_rows, {factor}")
        check_close(ours[1], exact.sum(0), torch.float32, f"bias of aggregate_rows, {factor}")


@pytest.mark.parametrize("warps", [2, 16])
def test_a_program_takes_several_tiles(warps, atomic, monkeypatch):
    """Links are read tiles ahead: sources with none to five readers, in any order, and ends within a tile."""
    monkeypatch.setattr(gpu_links, "_RESIDENT", warps)
    random, width, sources = torch.Generator().manual_seed(0), 40, 157
    readers = torch.arange(sources) % 7 % 6
    edges = torch.repeat_interleave(torch.arange(sources, dtype=torch.int32), readers)
    edges = edges[torch.randperm(edges.numel(), generator=random)]
    rows = 60
    indptr = torch.linspace(0, edges.numel(), rows + 1).long()
    grad = torch.randn(rows, 2 * width, generator=random)
    kept = torch.randint(-(2**31), 2**31, (sources, 2), generator=random, dtype=torch.int32)
    for reduce in ("sum", "mean"):
        expected = reference.aggregate_cat_kept_grad(indptr, edges, grad.double(), kept, 0.5, reduce, True)
        for ours, good in zip(gpu.aggregate_cat_kept_grad(indptr, edges, grad, kept, 0.5, reduce, True), expected,
                              strict=True):  # fmt: skip
            check_close(ours, good, torch.float32, f"{reduce}, {warps} warps")


def test_no_sources():
    for biased in (False, True):
        grad, kept, ids = torch.zeros(0, 12), torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        rows, of_bias = gpu.aggregate_cat_kept_grad(torch.zeros(1).long(), ids, grad, kept, 0.5, "sum", biased)
        assert rows.shape == (0, 6) and of_bias.shape == (6 * biased,) and not of_bias.any()


@pytest.mark.parametrize("programs", [2, 33])
def test_bias_and_relu_of_many_tiles(programs, monkeypatch):
    monkeypatch.setattr(gpu_activation, "_RESIDENT", programs)
    random = torch.Generator().manual_seed(0)
    grad = torch.randn(517, 70, generator=random)
    kept = torch.randint(-(2**31), 2**31, (517, 3), generator=random, dtype=torch.int32)
    expected = reference.bias_relu_grad(grad.double(), kept, 2.0, True)
    for ours, good in zip(gpu.bias_relu_grad(grad, kept, 2.0, True), expected, strict=True):
        check_close(ours, good, torch.float32, f"{programs} programs")


@pytest.mark.parametrize("programs", [1, 512, 513, 1300])
def test_parts_are_added_up_in_one_stage_or_two(programs):
    random = torch.Generator().manual_seed(0)
    for shape in ((11,), (2, 3, 9)):
        parts = torch.randn(programs, *shape, generator=random)
        check_close(added_up(parts), parts.double().sum(0), torch.float32, f"{programs} parts of {shape}")
    assert added_up(parts, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("width", [40, 300])
def test_rows_with_a_bias(width, atomic):
    x, bits = _inputs(width)
    bias = torch.randn(width, generator=torch.Generator().manual_seed(2))
    y, kept = gpu.aggregate_cat_kept(*STRUCTURE, x, bits, 2.0, "mean", bias)
    plain, without = gpu.aggregate_cat_kept(*STRUCTURE, x + bias, bits, 2.0, "mean")
    same(y, plain, f"width {width}")
    check_equal(kept[READ], without[READ], f"width {width}")


def test_a_row_stays_within_a_warp():
    assert rows_within_warps(tile_configs(128, 4), 512) == tile_configs(128, 4)
    assert [c["num_warps"] for c in rows_within_warps(tile_configs(256, 4), 1024)] == [1, 1]


@pytest.mark.parametrize(("columns", "p"), [(4, 0.5), (40, 0.3), (70, 0.5)])
def test_bits_of_edges_of_long_rows(columns, p):
    """More edges than a program takes at a time, more rows, empty ones among them, and a padding of several tiles."""
    degrees = torch.tensor([0, 8, 9, 40, 1, 7, *[3] * 60, 17, 0])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    args = indptr, int(indptr[-1]) + 700, torch.randint(0, 1000, degrees.shape), torch.tensor([5, 1, 2]), 3, p, columns
    check_equal(gpu.edge_dropout_bits(*args), reference.edge_dropout_bits(*args), f"{columns} columns")
