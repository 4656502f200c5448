"""Calls of batch norm of rows to test with, and how they are compared."""

from collections.abc import Iterator

import torch

from joestar.ops import reference

from .samples import TOLERANCE, values

SHAPES = ((1, 3, 0), (1, 3, 1), (2, 1, 2), (7, 3, 5), (40, 300, 40), (300, 40, 299), (2100, 17, 2050))
"""Rows, columns and how many rows are valid: none, one, all, several tiles of rows and of columns."""
EPS = 1e-3


def calls(dtype: torch.dtype, shapes=SHAPES) -> Iterator[tuple]:
    """Arguments; rows behind the count are NaN. Vectors of 16-bit rows in float32, as under autocast, and like them."""
    for n, width, valid in shapes:
        x, count = 2 * values((n, width), dtype, 1, valid) + 5, torch.tensor(valid)
        for vectors in {dtype, torch.promote_types(dtype, torch.float32)}:
            weight, bias = (values((width,), vectors, seed) for seed in (2, 3))
            for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
                yield x, w, b, count, EPS


def compare(run, run_sums, dtype: torch.dtype, shapes=SHAPES) -> None:
    """Both against the references in float64, relative to the largest value; results of 16 bits are rounded once."""

    def wide(tensors) -> list:
        return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]

    for x, weight, bias, count, eps in calls(dtype, shapes):
        found = run(x, weight, bias, count, eps)
        expected = reference.batch_norm_rows(*wide((x, weight, bias, count, eps)))
        of_sums = torch.promote_types(dtype, torch.float32)
        grad = values(tuple(x.shape), dtype, 5, int(count))
        sums = run_sums(grad, x, count, found[1], found[3])
        good = reference.batch_norm_rows_sums(*wide((grad, x, count, found[1], found[3])))
        assert [y.dtype for y in (*found, sums)] == [dtype, *[of_sums] * 4]
        for ours, right in zip((*found, sums), (*expected, good), strict=True):
            assert ours.shape == right.shape and torch.equal(ours.isnan(), right.isnan())
            most = max(1.0, float(right.nan_to_num().abs().max()))
            error = (ours.double() - right).nan_to_num().abs().max()
            assert error <= 2 * TOLERANCE[ours.dtype] * most, (dtype, list(x.shape), int(count), float(error))
