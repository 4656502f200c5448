"""Attention over rows of a table: against gather, product and ``attend``, in every dtype, with gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from joestar import kernels
from joestar.ops.aggregate import gather_attend as module

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
            of_edges = values((s.indices.numel(), heads), dtype, 5, s.edges) / 4
            yield f"{s.name}, {heads} heads of {width}, scores of edges", (*args, bits, SCALE, of_edges)


def expected(indptr, indices, dsts, table, by_src, by_dst, slope, bits, scale, s_edge=None):
    """(sums, signed coefficients) through ``attend`` with a score for every row of the table, in float64."""
    table, by_src, by_dst = (value.double() for value in (table, by_src, by_dst))
    scores = table @ by_src.t(), table[dsts.long()] @ by_dst.t()
    s_edge = s_edge if s_edge is None else s_edge.double()
    y, _, _ = ops.attend(indptr, indices, *scores, table.unsqueeze(1), slope, bits, scale, s_edge)
    z = ops.sddmm(indptr, indices, *scores, "add")
    z = z if s_edge is None else z + s_edge
    alpha = ops.edge_softmax(indptr, F.leaky_relu(z, slope))
    return y, torch.where(z > 0, alpha, -alpha)


def close(ours, good, tolerance, case):
    torch.testing.assert_close(ours, good, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case}: {text}")


def check(run, dtype, ids, tolerance, shapes=SHAPES, only=("",)):
    """``run`` (forward, gradient) against float64; ``only`` structures whose names begin like this."""
    for case, args in calls(dtype, ids, shapes):
        if not case.startswith(only):
            continue
        y, alpha = run[0](*args)
        assert y.dtype == dtype and alpha.dtype == torch.promote_types(dtype, torch.float32), case
        edges, good = int(args[0][-1]), expected(*args)
        close(y.double(), good[0], tolerance, case)
        close(alpha[:edges].double(), good[1][:edges], tolerance, case)
        grad = values(y.shape, dtype, 5)
        found, of_edges = run[1](*args[:4], alpha, grad, y, grad, *args[6:9], len(args) > 9)
        vectors = [value.double().clone().requires_grad_() for value in (*args[4:6], *args[9:])]
        expected(*args[:4], *vectors[:2], *args[6:9], *vectors[2:])[0].backward(grad.double())
        wanted = torch.stack([value.grad for value in vectors[:2]])
        largest = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        close(found.double() / largest, wanted / largest, tolerance, case)
        close(of_edges.double(), vectors[2].grad if vectors[2:] else torch.zeros(0).double(), 4 * tolerance, case)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_values_and_gradients(dtype, tolerance, ids):
    check((ops.gather_attend, ops.gather_attend_grad), dtype, ids, tolerance)


def linear_arguments():
    args = next(
        args for case, args in calls(torch.float64, torch.int64) if "2 heads of 5, scores" in case and args[1].numel()
    )
    weight = values((2, 3, 5), torch.float64, 8)
    trained = (value.clone().requires_grad_() for value in (*args[4:6], weight))
    return [*args[:4], *trained, *args[6:9], args[9].clone().requires_grad_()]


def test_product_gradients_and_registration():
    args = linear_arguments()
    out, y, _ = ops.gather_attend_linear(*args)
    torch.testing.assert_close(out, torch.einsum("nhf,hcf->nhc", y, args[6]))
    assert torch.autograd.gradcheck(
        lambda a, b, w, e: ops.gather_attend_linear(*args[:4], a, b, w, *args[7:10], e)[0], (*args[4:7], args[10])
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.gather_attend_linear, tuple(args), test_utils=checks)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value for value in args]
    with mode:
        shapes = [value.shape for value in ops.gather_attend_linear(*fakes)]
    assert shapes == [(args[2].numel(), 2, 3), (args[2].numel(), 2, 5), (args[1].numel(), 2)]


def test_gradients_in_one_pass_read_no_product(monkeypatch):
    """As on a GPU: the result of the product is not kept for the backward pass, so that its epilogue may replace it."""
    args, saved = linear_arguments(), []
    monkeypatch.setattr(module, "_in_one_pass", lambda *sizes: True)

    def run(*trained):
        with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
            return ops.gather_attend_linear(*args[:4], *trained[:3], *args[7:10], trained[3])[0]

    assert torch.autograd.gradcheck(run, (*args[4:7], args[10]))
    shapes = [value.shape for value in saved]
    assert (args[2].numel(), 2, 5) in shapes and (args[2].numel(), 2, 3) not in shapes


def test_in_one_pass_on_a_gpu_only():
    indptr, indices, table = torch.zeros(9, dtype=torch.int64), torch.zeros(20, dtype=torch.int32), torch.zeros(5, 8)
    assert not module._in_one_pass(indptr, indices, table, 2)
    with FakeTensorMode():
        there = torch.empty(5, 8, device="cuda")
        if kernels.find("gpu_warp_rows.fits") is not None:
            assert module._in_one_pass(indptr, indices, there, 2)
            assert not module._in_one_pass(indptr, torch.empty(20 * 9), there, 2)  # too many edges of a destination
            assert not module._in_one_pass(indptr, indices, there, 33)


def test_errors():
    args = linear_arguments()
    with pytest.raises(ValueError, match=r"expected a table \[N, F\], vectors \[H, F\]"):
        ops.gather_attend_linear(*args[:4], args[4][:, :1].repeat(1, 7), *args[5:])
    with pytest.raises(ValueError, match=r"expected scores of edges s_edge \[\d+, 2\]"):
        ops.gather_attend_linear(*args[:10], args[10][:, :1])
    args[3] = args[3].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient for its table; gather with index_select, then use attend"):
        ops.gather_attend_linear(*args)
