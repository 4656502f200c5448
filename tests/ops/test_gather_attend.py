"""Attention over rows of a table: against gather, product and ``attend``, in every dtype, with gradients."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from .samples import every, values

ops = torch.ops.joestar
SHAPES = ((1, 3), (2, 5), (4, 18), (33, 2))
"""(heads, features)."""
SLOPE, SCALE = 0.2, 1.6


def calls(dtype, ids, shapes=SHAPES):
    """(case, arguments of ``gather_attend``): every structure, with and without dropout."""
    for s in every(ids):
        for heads, width in shapes:
            table = values((s.num_src + 3, width), dtype, 1)
            by_src, by_dst = values((heads, width), dtype, 2), values((heads, width), dtype, 3)
            dsts = torch.randint(0, table.shape[0], (s.num_dst,), generator=torch.Generator().manual_seed(4)).to(ids)
            args = (s.indptr, s.indices, dsts, table, by_src, by_dst, SLOPE)
            yield f"{s.name}, {heads} heads of {width}", (*args, None, 1.0)
            words = (s.indices.numel(), -(-heads // 32))
            random = torch.Generator().manual_seed(6)
            bits = torch.randint(-(2**31), 2**31, words, generator=random, dtype=torch.int32)
            yield f"{s.name}, {heads} heads of {width}, dropout", (*args, bits, SCALE)


def expected(indptr, indices, dsts, table, by_src, by_dst, slope, bits, scale):
    """Through ``attend`` with a score for every row of the table, in float64."""
    table, by_src, by_dst = (value.double() for value in (table, by_src, by_dst))
    scores = table @ by_src.t(), table[dsts.long()] @ by_dst.t()
    y, top, total = ops.attend(indptr, indices, *scores, table.unsqueeze(1), slope, bits, scale)
    return y, scores[0][indices.long()], scores[1], top, total


def close(ours, good, tolerance, case):
    torch.testing.assert_close(ours, good, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}")


def check(run, dtype, ids, tolerance, shapes=SHAPES):
    """``run`` (forward, gradient) against float64."""
    for case, args in calls(dtype, ids, shapes):
        y, s_src, s_dst, top, total = run[0](*args)
        assert y.dtype == dtype and s_src.dtype == top.dtype == torch.promote_types(dtype, torch.float32), case
        edges = int(args[0][-1])
        good = expected(*args)
        for ours, value in zip(
            (y, s_src[:edges], s_dst, top, total), (good[0], good[1][:edges], *good[2:]), strict=True
        ):
            close(ours.double(), value, tolerance, case)
        grad = values(y.shape, dtype, 5)
        found = run[1](*args[:4], s_src, s_dst, top, total, grad, *args[6:])
        vectors = [value.double().clone().requires_grad_() for value in args[4:6]]
        expected(*args[:4], *vectors, *args[6:])[0].backward(grad.double())
        wanted = torch.stack([value.grad for value in vectors])
        largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        close(found.double() / largest, wanted / largest, tolerance, case)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_values_and_gradients(dtype, tolerance, ids):
    check((ops.gather_attend, ops.gather_attend_grad), dtype, ids, tolerance)


def test_autograd_and_registration():
    args = next(args for case, args in calls(torch.float64, torch.int64) if "2 heads of 5, dropout" in case)
    args = list(args)
    args[4:6] = [value.clone().requires_grad_() for value in args[4:6]]
    assert torch.autograd.gradcheck(lambda a, b: ops.gather_attend(*args[:4], a, b, *args[6:])[0], args[4:6])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.gather_attend, tuple(args), test_utils=checks)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value for value in args]
    with mode:
        y, scores, _, _, total = ops.gather_attend(*fakes)
    assert y.shape == (args[2].numel(), 2, 5) and scores.shape == (args[1].numel(), 2) and total.shape == y.shape[:2]


def test_errors():
    args = list(next(calls(torch.float32, torch.int64))[1])
    with pytest.raises(ValueError, match=r"expected a table \[N, F\], vectors \[H, F\]"):
        ops.gather_attend(*args[:4], args[4][:, :1].repeat(1, 7), *args[5:])
    args[3] = args[3].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient for its table; gather with index_select, then use attend"):
        ops.gather_attend(*args)
