import pytest
import torch
from native_support import IDS, KEY, VALUES, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_equals_sampling_then_aggregating(dtype, ids, reduce, any_threads):
    indptr, indices = random_csc(200, 200, mean=15, dtype=ids)
    dsts = ((torch.arange(150) * 37) % 200).to(ids)
    x = torch.randn(200, 37, generator=torch.Generator().manual_seed(1)).to(dtype)
    for k in (-1, 0, 5, 64, 65):
        for replace in (False, True):
            for count in (0, 77, 150):
                args = (indptr, indices, dsts, torch.tensor(count), k, replace, KEY, 3)
                got = any_threads(lambda args=args: cpu.sample_aggregate(*args, x, reduce))
                offsets, ids_picked, picked = cpu.sample_cols(*args, -1)
                assert same(got, (cpu.spmm(offsets, ids_picked, x, None, reduce), picked))
                if count == 77:
                    assert same(got, reference.sample_aggregate(*args, x, reduce))


@pytest.mark.parametrize("shape", [(200,), (200, 1), (200, 2, 3), (200, 513)], ids=str)
def test_rows_of_any_shape(shape):
    indptr, indices = random_csc(200, 200, mean=15)
    dsts = torch.arange(60, dtype=torch.int32)
    x = torch.randn(shape)
    args = (indptr, indices, dsts, torch.tensor(60), 7, False, KEY, 3)
    y, _ = cpu.sample_aggregate(*args, x, "mean")
    assert y.shape == (60, *shape[1:])
    offsets, picked, _ = cpu.sample_cols(*args, -1)
    assert same(y, cpu.spmm(offsets, picked, x, None, "mean"))


def test_no_destinations():
    indptr, indices = random_csc(20, 20)
    none = torch.empty(0, dtype=torch.int32)
    y, count = cpu.sample_aggregate(indptr, indices, none, torch.tensor(0), 5, False, KEY, 0, torch.ones(20, 3), "sum")
    assert y.shape == (0, 3)
    assert int(count) == 0
