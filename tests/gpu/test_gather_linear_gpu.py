"""The product of gathered rows on a GPU, at a real size and in every dtype."""

import pytest
import torch
import torch.nn.functional as F

import joestar  # noqa: F401  (registers the ops)
from joestar.ops.dense.gather_linear import NO_ROW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ops = torch.ops.joestar


@pytest.mark.parametrize(("table", "weight", "tolerance"), [
    (torch.float32, torch.float32, 1e-5), (torch.float64, torch.float64, 1e-12), (torch.float32, torch.bfloat16, 3e-2),
    (torch.bfloat16, torch.bfloat16, 3e-2), (torch.float16, torch.float16, 4e-3),
], ids=str)  # fmt: skip
def test_against_gather_and_product(table, weight, tolerance):
    """With rows of zeros, and a row that is NaN and nobody's."""
    random = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(20_000, 100, generator=random, device="cuda").to(table)
    index = torch.randint(0, 20_000, (50_003,), generator=random, device="cuda", dtype=torch.int32)
    index[::7] = NO_ROW
    index[index == 0] = NO_ROW
    known = torch.where(index[:, None] < 0, 0, x[index.clamp(min=0).long()])
    x[0] = torch.nan
    for columns in (4, 128):
        w = (torch.randn(columns, 100, generator=random, device="cuda") / 10).to(weight).requires_grad_()
        b = torch.randn(columns, generator=random, device="cuda").to(weight).requires_grad_()
        y = ops.gather_linear(x, index, w, b)
        rows = known.to(weight).double()
        expected = F.linear(rows, w.detach().double(), b.detach().double())
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 4)
        grad = torch.randn(y.shape, generator=random, device="cuda").to(weight) / 100
        y.backward(grad)
        torch.testing.assert_close(w.grad.double(), grad.double().t() @ rows, rtol=tolerance * 4, atol=tolerance * 40)
        torch.testing.assert_close(b.grad.double(), grad.double().sum(0), rtol=tolerance * 4, atol=tolerance * 40)
        first, second = ops.gather_linears(x, index, [w, w * 2], [b])
        assert first.is_contiguous() and second.is_contiguous()
        torch.testing.assert_close(first, y, rtol=tolerance, atol=tolerance * 4)
        torch.testing.assert_close(second.double(), (expected - b.double()) * 2, rtol=tolerance, atol=tolerance * 8)


def settings(place: int, alike: bool) -> list[dict]:
    """The launch settings of a product of rows and weights of one dtype or two, this one in front."""
    from joestar.kernels import gpu_gather_linear as module

    every = module.candidates(alike, True)
    return every[place % len(every) :] + every[: place % len(every)]


@pytest.mark.parametrize("place", range(8))
def test_every_launch_setting_with_tf32(place, monkeypatch, tf32):
    """Rows in several dtypes, weights of one and two tiles of columns, gradients by a column of ones and without."""
    from joestar.kernels import tune

    def choose(kernel, shape, given, *rest):
        if kernel == "gather_linear_grad":
            return given[place % len(given)]
        return next((config for config in settings(place, shape[0] == shape[1]) if config in given), given[0])

    monkeypatch.setattr(tune, "choose", choose)
    random = torch.Generator("cuda").manual_seed(0)
    for width, columns, table in ((100, 128, torch.float32), (128, 200, torch.float32), (47, 16, torch.bfloat16)):
        x = torch.randn(20_000, width, generator=random, device="cuda").to(table)
        index = torch.randint(0, 20_000, (50_003,), generator=random, device="cuda", dtype=torch.int32)
        weights = [torch.randn(columns, width, generator=random, device="cuda") / 10 for _ in range(2)]
        bias = torch.randn(columns, generator=random, device="cuda")
        rows = x[index.long()].double()
        for y, w, b in zip(ops.gather_linears(x, index, weights, [bias]), weights, (bias, bias * 0), strict=True):
            torch.testing.assert_close(y.double(), F.linear(rows, w.double(), b.double()), rtol=1e-2, atol=1e-2)
        grads = [torch.randn(50_003, columns, generator=random, device="cuda") / 100 for _ in range(2)]
        found = ops.gather_linear_grad(x, index, grads, 2)
        for y, e in zip(
            found, [g.double().t() @ rows for g in grads] + [g.double().sum(0) for g in grads], strict=True
        ):
            torch.testing.assert_close(y.double(), e, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("table", "weight"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16),
], ids=str)  # fmt: skip
def test_the_same_products_every_time(table, weight, monkeypatch, tf32):
    """Two hundred launches of every setting, while copies keep the memory busy: registers that the next tile of columns
    overwrote while a product read them came out as a wrong row now and then."""
    from joestar.kernels import tune

    random, busy, other = (
        torch.Generator("cuda").manual_seed(0),
        torch.zeros(1 << 26, device="cuda"),
        torch.cuda.Stream(),
    )
    for width, columns in ((47, 16), (100, 128), (128, 200)):
        x = torch.randn(20_000, width, generator=random, device="cuda").to(table)
        index = torch.randint(0, 20_000, (50_003,), generator=random, device="cuda", dtype=torch.int32)
        weights = [(torch.randn(columns, width, generator=random, device="cuda") / 10).to(weight) for _ in range(2)]
        rows = x[index.long()].to(weight).double()
        for place in range(8):
            chosen = settings(place, table == weight)
            monkeypatch.setattr(
                tune,
                "choose",
                lambda kernel, shape, given, *rest, c=chosen: next((s for s in c if s in given), given[0]),
            )
            first = ops.gather_linears(x, index, weights, [])
            for y, w in zip(first, weights, strict=True):
                torch.testing.assert_close(y.double(), F.linear(rows, w.double()), rtol=3e-2, atol=3e-2)
            differs = torch.zeros((), dtype=torch.int64, device="cuda")
            other.wait_stream(torch.cuda.current_stream())
            for launch in range(200):
                if launch % 20 == 0:
                    with torch.cuda.stream(other):
                        busy.add_(1)
                again = ops.gather_linears(x, index, weights, [])
                differs += sum((a != b).sum() for a, b in zip(again, first, strict=True))
            assert int(differs) == 0, chosen[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_gradients_every_time(dtype, monkeypatch, tf32):
    """A hundred launches of every setting that gathers, beside copies: the bits of the first, which are right."""
    from joestar.kernels import gpu_gather_linear_grad as module
    from joestar.kernels import tune

    random = torch.Generator("cuda").manual_seed(0)
    busy, other = torch.zeros(1 << 26, device="cuda"), torch.cuda.Stream()
    for width, columns, biases in ((47, 16, 0), (64, 16, 1), (100, 128, 0), (128, 200, 1), (602, 40, 0)):
        x = torch.randn(20_000, width, generator=random, device="cuda").to(dtype)
        index = torch.randint(0, 20_000, (50_003,), generator=random, device="cuda", dtype=torch.int32)
        index[::7] = NO_ROW
        by = (torch.randn(50_003, columns, generator=random, device="cuda") / 100).to(dtype)
        rows = torch.where(index[:, None] < 0, 0, x[index.clamp(min=0).long()]).to(dtype).double()
        for setting in module._READ:
            monkeypatch.setattr(tune, "choose", lambda kernel, shape, given, *rest, taken=setting: (
                taken if taken in given else given[-1]))  # fmt: skip
            first = ops.gather_linear_grad(x, index, [by, by[:9_000]], biases)
            expected = [by.double().t() @ rows, by[:9_000].double().t() @ rows[:9_000], by.double().sum(0)]
            for y, e in zip(first, expected, strict=False):
                torch.testing.assert_close(y.double(), e, rtol=2e-2, atol=2e-2)
            differs = torch.zeros((), dtype=torch.int64, device="cuda")
            other.wait_stream(torch.cuda.current_stream())
            for launch in range(100):
                if launch % 20 == 0:
                    with torch.cuda.stream(other):
                        busy.add_(1)
                again = ops.gather_linear_grad(x, index, [by, by[:9_000]], biases)
                differs += sum((a != b).sum() for a, b in zip(again, first, strict=True))
            assert int(differs) == 0, setting
