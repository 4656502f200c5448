"""The product of gathered rows on a GPU, at a real size and in every dtype."""

import pytest
import torch
import torch.nn.functional as F

import joestar  # noqa: F401  (registers the ops)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ops = torch.ops.joestar


@pytest.mark.parametrize(("table", "weight", "tolerance"), [
    (torch.float32, torch.float32, 1e-5), (torch.float64, torch.float64, 1e-12), (torch.float32, torch.bfloat16, 3e-2),
    (torch.bfloat16, torch.bfloat16, 3e-2), (torch.float16, torch.float16, 4e-3),
], ids=str)  # fmt: skip
def test_against_gather_and_product(table, weight, tolerance):
    random = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(20_000, 100, generator=random, device="cuda").to(table)
    index = torch.randint(0, 20_000, (50_003,), generator=random, device="cuda", dtype=torch.int32)
    for columns in (4, 128):
        w = (torch.randn(columns, 100, generator=random, device="cuda") / 10).to(weight).requires_grad_()
        b = torch.randn(columns, generator=random, device="cuda").to(weight).requires_grad_()
        y = ops.gather_linear(x, index, w, b)
        rows = x[index.long()].to(weight).double()
        expected = F.linear(rows, w.detach().double(), b.detach().double())
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 4)
        grad = torch.randn(y.shape, generator=random, device="cuda").to(weight) / 100
        y.backward(grad)
        torch.testing.assert_close(w.grad.double(), grad.double().t() @ rows, rtol=tolerance * 4, atol=tolerance * 40)
