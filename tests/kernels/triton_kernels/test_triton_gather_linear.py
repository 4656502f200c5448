"""The Triton product of gathered rows, against gather and product (Triton's interpreter has no bfloat16 products)."""

import pytest
import torch
from kernel_checks import check_close

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_row_sums, tune
from joestar.kernels.gpu_launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")


@pytest.mark.parametrize(("table", "weight"), [(torch.float32, torch.float32), (torch.float32, torch.float16),
                                               (torch.float16, torch.float16)], ids=str)  # fmt: skip
def test_against_gather_and_product(table, weight):
    random = torch.Generator().manual_seed(0)
    for n, width, columns in ((1, 3, 1), (150, 100, 4), (40, 33, 130), (0, 8, 4)):
        x = torch.randn(60, width, generator=random).to(table)
        w, b = (
            torch.randn(columns, width, generator=random).to(weight),
            torch.randn(columns, generator=random).to(weight),
        )
        for ids in (torch.int32, torch.int64):
            index = torch.randint(0, 60, (n,), generator=random).to(ids)
            for bias in (b, None):
                y = gpu.gather_linear(x, index, w, bias)
                rows = x[index.long()].to(weight).double()
                expected = torch.nn.functional.linear(rows, w.double(), None if bias is None else bias.double())
                assert y.shape == (n, columns)
                check_close(y, expected, weight, f"n={n} width={width} columns={columns} {ids} bias={bias is not None}")


@pytest.mark.parametrize(("table", "grad"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                             (torch.float64, torch.float64)], ids=str)  # fmt: skip
def test_gradient_of_the_weight(table, grad):
    random = torch.Generator().manual_seed(0)
    for n, width, columns in ((1, 3, 1), (150, 100, 4), (40, 300, 13), (40, 16, 8), (0, 8, 4)):
        x = torch.randn(60, width, generator=random).to(table)
        g = torch.randn(n, columns, generator=random).to(grad)
        for ids in (torch.int32, torch.int64):
            index = torch.randint(0, 60, (n,), generator=random).to(ids)
            y = gpu.gather_linear_weight_grad(x, index, g)
            assert y.shape == (columns, width) and y.dtype == grad
            check_close(y, g.double().t() @ x[index.long()].double(), grad, f"n={n} width={width} {ids}")


def test_every_setting_of_sums_over_rows(monkeypatch):
    """Programs that take several turns, the last of which has rows for some; gradients of 16 bits; a count."""
    random = torch.Generator().manual_seed(0)
    tried = []

    def every(_kernel, _shape, candidates, launch, *_):
        for config in candidates:
            for grid in (1, 3):
                launch({**config, "GRID": grid})
                tried.append(found())
        return candidates[0]

    def found():
        """What the last launch left: the launcher's own result is the first setting's."""
        return sums[-1].clone()

    sums, added_up = [], gpu_row_sums.added_up
    monkeypatch.setattr(gpu_row_sums, "added_up", lambda *args: sums.append(added_up(*args)) or sums[-1])
    monkeypatch.setattr(tune, "choose", every)
    for grad, width, columns, n in (
        (torch.float32, 100, 4, 75),
        (torch.bfloat16, 16, 3, 300),
        (torch.float64, 5, 8, 9),
    ):
        x, index = torch.randn(60, width, generator=random), torch.randint(0, 60, (n,), generator=random)
        g = torch.randn(n, columns, generator=random).to(grad)
        for count in (None, torch.tensor(n - 4)):
            tried.clear()
            gpu_row_sums.row_sums(x, index, g, count)
            last = n if count is None else int(count)
            expected = g[:last].double().t() @ x[index[:last]].double()
            assert len(tried) >= 6
            for y in tried:
                assert y.dtype == grad
                check_close(y, expected, grad, f"{grad} width={width} n={n}")
