"""Attention with scores of its own rows: against products and ``attend``, gradients, registration and errors."""

import pytest
import torch

from .samples import every, values

ops = torch.ops.joestar


def calls(dtype, ids, heads=2, width=5):
    """Arguments of ``attend_own`` for every structure whose destinations are sources."""
    for s in every(ids):
        if s.num_dst > s.num_src:
            continue
        x = values((s.num_src, width), dtype, 1)
        vectors = [values((heads, width), dtype, seed) for seed in (2, 3)]
        words = (s.indices.numel(), -(-heads // 32))
        bits = torch.randint(-(2**31), 2**31, words, generator=torch.Generator().manual_seed(6), dtype=torch.int32)
        of_edges = values((s.indices.numel(), heads), dtype, 4, s.edges)
        for mask, scale, *scores in ((None, 1.0), (bits, 1.6), (bits, 1.6, of_edges)):
            yield s.name, (s.indptr, s.indices, x, *vectors, 0.2, mask, scale, *scores)


def expected(indptr, indices, x, v_src, v_dst, slope, bits, scale, *s_edge):
    n = indptr.numel() - 1
    return ops.attend(indptr, indices, x @ v_src.t(), x[:n] @ v_dst.t(), x.unsqueeze(1), slope, bits, scale, *s_edge)[0]


def check(run, dtype, ids, tolerance, heads=2):
    """``run``: the gradient; ``x`` first. Forward and backward against autograd of the parts, in float64."""
    for case, args in calls(dtype, ids, heads):
        wide = [a.double().clone().requires_grad_() for a in (*args[2:5], *args[8:])]
        good = expected(*args[:2], *wide[:3], *args[5:8], *wide[3:])
        y, *saved = ops.attend_own(*args)
        torch.testing.assert_close(y.double(), good, rtol=tolerance, atol=tolerance, msg=case)
        grad = values(y.shape, dtype, 7)
        wanted = torch.autograd.grad(good, wide, grad.double())
        for_x, vectors, for_edge = run(*args[:5], *saved, grad, *args[5:])
        grads = [for_x, *vectors, for_edge]
        assert len(grads) == 4 and (wide[3:] or not grads[3].numel()), case
        for found, value in zip(grads[: len(wanted)], wanted, strict=True):
            torch.testing.assert_close(found.double(), value, rtol=tolerance, atol=tolerance * 10, msg=case)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str)
def test_values_and_gradients(dtype, tolerance, heads):
    check(ops.attend_own_grad, dtype, torch.int64, tolerance, heads)


def test_autograd_and_registration():
    args = [args for name, args in calls(torch.float64, torch.int64) if name == "bipartite"][-1]
    args = [*args[:2], *(a.clone().requires_grad_() for a in args[2:5]), *args[5:8], args[8].clone().requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda *v: ops.attend_own(*args[:2], *v[:3], *args[5:8], v[3])[0], (*args[2:5], args[8])
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.attend_own, tuple(args), test_utils=checks)


def test_errors():
    args = list(next(args for name, args in calls(torch.float64, torch.int64) if name == "bipartite"))
    args[3] = args[3][:, :2]
    with pytest.raises(ValueError, match=r"expected rows \[N, F\]"):
        ops.attend_own(*args)
