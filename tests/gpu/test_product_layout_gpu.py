"""Gradients of many rows by a turned weight on a GPU: rewritten under TF32, and right."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from joestar.fusion.backend import product_layout
from joestar.fusion.backend.first import FirstPasses
from joestar.runtime.inductor import settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("tf32", [True, False])
def test_gradients_of_many_rows(tf32, monkeypatch):
    from torch._inductor.compile_fx import compile_fx

    made, run = [], product_layout.run
    monkeypatch.setattr(product_layout, "run", lambda graph: made.append(run(graph)))
    monkeypatch.setattr(FirstPasses, "uuid", lambda self: None)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, tf32
    try:
        x, weight = (torch.randn(n, 128, device="cuda", requires_grad=True) for n in (product_layout._ROWS, 96))
        gm = make_fx(lambda x, weight: (torch.ops.aten.mm(x, weight.t()).tanh(),))(x, weight)
        (y,) = compile_fx(gm, [x, weight], config_patches=settings(torch.device("cuda")))(x, weight)
        found = torch.autograd.grad(y.square().sum(), (x, weight))
        plain = torch.autograd.grad((x @ weight.t()).tanh().square().sum(), (x, weight))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    exact = [part.detach().double().requires_grad_() for part in (x, weight)]
    expected = torch.autograd.grad((exact[0] @ exact[1].t()).tanh().square().sum(), exact)
    assert sum(made) == int(tf32)
    for ours, theirs, right in zip(found, plain, expected, strict=True):
        off, allowed = ((grad.double() - right).norm() / right.norm() for grad in (ours, theirs))
        assert off <= 1.5 * allowed + 1e-6, f"off by {off:.3g}, PyTorch by {allowed:.3g}"
