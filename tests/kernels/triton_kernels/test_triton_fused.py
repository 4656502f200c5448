"""The fused sample-gather-aggregation against its two steps."""

import pytest
import torch
from kernel_checks import check_close, check_equal
from ops.samples import other_ids

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]

KEY = torch.tensor([7, 2, 11])


def _arguments(count: int, k: int, replace: bool, ids=torch.int32) -> tuple:
    generator = torch.Generator().manual_seed(0)
    degrees = torch.tensor([0, 3, 1, 7, 2, 0, 4, 12, 5, 1, 6])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, 11, (int(indptr[-1]),), generator=generator).to(ids)
    dsts = torch.tensor([7, 0, 3, 10, 3, 8, 1, 7, 7], dtype=ids)
    return indptr, indices, dsts, torch.tensor(count), k, replace, KEY, 2


def _features(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)


REDUCES = ("sum", "mean", "max", "min")
NARROW = {"sum": torch.float64, "mean": torch.bfloat16, "max": torch.float16}
"""Besides float32, in which all are looked at; the other pairs take time."""
PAIRS = [
    pytest.param(dtype, reduce, marks=() if dtype in (torch.float32, NARROW.get(reduce)) else pytest.mark.slow)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for reduce in REDUCES
]


@pytest.mark.parametrize(("dtype", "reduce"), PAIRS, ids=str)
def test_against_the_reference(dtype, reduce):
    for k, replace, ids in ((3, False, torch.int32), (2, True, torch.int64), (-1, False, torch.int32)):
        for width in (1, 18):
            args, x = _arguments(7, k, replace, ids), _features(11, width, dtype=dtype)
            case = f"k={k} replace={replace} width={width}"
            y, own, count = gpu.sample_aggregate_self(*args, x, reduce)
            expected, demand = reference.sample_aggregate(*args, x.double(), reduce)
            check_close(y, expected, dtype, case)
            check_equal(own, x[args[2].long()], case)
            check_equal(count, demand, case)
            check_equal(gpu.sample_aggregate(*args, x, reduce)[0], y, case)
            check_equal(gpu.sample_aggregate_cat(*args, x, reduce)[0], _cat(*args, x, reduce, y), case)


def test_other_ids():
    """Rows hash as what their nodes are known by, and read their own columns and features all the same."""
    for k, dtype in ((3, torch.int32), (2, torch.int64), (20, torch.int64), (-1, torch.int32)):
        args, x, ids = _arguments(7, k, False, dtype), _features(11, 5), other_ids(11, dtype)
        expected, demand = reference.sample_aggregate(*args, x.double(), "sum", ids)
        y, own, count = gpu.sample_aggregate_self(*args, x, "sum", ids)
        check_close(y, expected, torch.float32, f"k={k}")
        check_equal(own, x[args[2].long()], f"k={k}")
        check_equal(count, demand, f"k={k}")
        check_equal(gpu.sample_aggregate(*args, x, "sum", ids)[0], y, f"k={k}")
        check_equal(gpu.sample_aggregate_cat(*args, x, "sum", True, ids)[0][:, :5], y, f"k={k}")
        factor = torch.tensor([0.5])
        check_close(gpu.sample_aggregate_own(*args, x, factor, "sum", ids)[0], expected + 0.5 * own, torch.float32, k)


def _cat(*args) -> torch.Tensor:
    """The layout of the joined rows, from the reference, with the kernel's own aggregated half."""
    *args, y = args
    both = reference.sample_aggregate_cat(*args)[0]
    both[:, : y.shape[1]] = y
    return both


@pytest.mark.parametrize("width", [100, 256, 260, 384, 600])
def test_widths_that_are_no_powers_of_two(width):
    args, x = _arguments(9, 3, False), _features(11, width)
    expected, _ = reference.sample_aggregate(*args, x.double(), "mean")
    y, own, _ = gpu.sample_aggregate_self(*args, x, "mean")
    check_close(y, expected, torch.float32, f"width {width}")
    check_equal(own, x[args[2].long()], f"width {width}")


def test_rows_past_the_count_are_zero_and_their_features_unread():
    args, x = _arguments(3, 3, False), _features(11, 5)
    x[8] = x[1] = float("nan")
    indices = args[1].clone()
    indices[(indices == 8) | (indices == 1)] = 0
    y, count = gpu.sample_aggregate(args[0], indices, *args[2:], x, "sum")
    assert torch.isfinite(y).all()
    assert not y[3:].any()
    assert count == 3 + 0 + 3


def test_no_destinations_and_no_features():
    args = _arguments(0, 3, False)
    y, count = gpu.sample_aggregate(*args[:2], args[2][:0], *args[3:], _features(11, 5), "mean")
    assert y.shape == (0, 5)
    assert count == 0
    y, count = gpu.sample_aggregate(*_arguments(9, 3, False), _features(11, 0), "mean")
    assert y.shape == (9, 0)
    assert count == reference.sample_aggregate(*_arguments(9, 3, False), _features(11, 1), "mean")[1]


def test_strided_features():
    args, x = _arguments(9, 3, False), _features(6, 11).t()
    y, _ = gpu.sample_aggregate(*args, x, "max")
    check_equal(y, reference.sample_aggregate(*args, x, "max")[0], "strided")


HOPS = {(3, 2, False): "mean", (2, 3, True): "sum", (1, 16, False): "max", (2, -1, False): "mean"}


@pytest.mark.parametrize(
    ("k", "inner", "replace", "reduce"),
    [pytest.param(*hops, reduce, marks=() if HOPS[hops] == reduce else pytest.mark.slow)
     for hops in HOPS for reduce in ("sum", "mean", "max")],
)  # fmt: skip
def test_two_hops(k, inner, replace, reduce):
    indptr, indices, dsts, count, _, _, key, site = _arguments(7, k, replace)
    x = _features(11, 18)
    for ids in (None, other_ids(11, indices.dtype)):
        y = gpu.sample_aggregate_two_hops(indptr, indices, dsts, count, k, inner, replace, key, site, x, reduce, ids)
        sub, picked, total = reference.sample_cols(indptr, indices, dsts, count, k, replace, key, site, -1, ids)
        rows, _ = reference.sample_aggregate(
            indptr, indices, picked, total, inner, replace, key, site + 1, x.double(), reduce, ids
        )
        expected = reference.spmm(sub, torch.arange(picked.numel()), rows, None, reduce)
        check_close(y, expected, torch.float32, f"{k}, {inner} {reduce}")
