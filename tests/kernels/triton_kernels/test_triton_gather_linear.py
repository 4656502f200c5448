"""The Triton product of gathered rows, against gather and product (Triton's interpreter has no bfloat16 products)."""

import pytest
import torch
from kernel_checks import check_close

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import gpu, gpu_row_sums, tune
from joestar.kernels import gpu_gather_linear as module
from joestar.kernels import gpu_gather_linear_grad as backward
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops.dense.gather_linear import NO_ROW

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


@pytest.mark.parametrize(("table", "weight"), [(torch.float32, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_several_products_of_the_same_rows(table, weight):
    """Of one or several tiles of columns, the first with a bias."""
    random = torch.Generator().manual_seed(0)
    for n, width, columns, biases in ((1, 3, 1, 1), (150, 40, 4, 0), (150, 100, 130, 2), (40, 9, 5, 3), (0, 8, 4, 2)):
        x = torch.randn(60, width, generator=random).to(table)
        weights = [torch.randn(columns, width, generator=random).to(weight) for _ in range(3)]
        vectors = [torch.randn(columns, generator=random).to(weight) for _ in range(biases)]
        index = torch.randint(0, 60, (n,), generator=random)
        outs = gpu.gather_linears(x, index, weights, vectors)
        for p, y in enumerate(outs):
            bias = vectors[p].double() if p < biases else None
            expected = torch.nn.functional.linear(x[index].to(weight).double(), weights[p].double(), bias)
            assert y.shape == (n, columns) and y.is_contiguous()
            check_close(y, expected, weight, f"product {p} n={n} width={width} columns={columns} biases={biases}")


MATMUL = torch.backends.cuda.matmul
WAYS = {
    "allow_tf32": (lambda: setattr(MATMUL, "allow_tf32", True), lambda: setattr(MATMUL, "allow_tf32", False)),
    "set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "fp32_precision": (
        lambda: setattr(MATMUL, "fp32_precision", "tf32"),
        lambda: setattr(MATMUL, "fp32_precision", "ieee"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_tf32_however_it_is_allowed(way, monkeypatch):
    """PyTorch refuses to read its older setting once the newer one is made."""
    allow, forbid = WAYS[way]
    seen = []

    def choose(kernel, shape, candidates, *rest):
        seen.append((shape, candidates))
        return candidates[0]

    monkeypatch.setattr(tune, "choose", choose)
    x, ids, weight = torch.randn(9, 16), torch.arange(5, dtype=torch.int32), torch.randn(4, 16)
    forbid()
    try:
        for change in (allow, forbid):
            change()
            (y,) = module.gather_linears(x, ids, [weight], [])
            assert torch.allclose(y, x[:5] @ weight.T, atol=1e-5)
    finally:
        forbid()
    assert ["tf32" in shape for shape, _ in seen] == [True, False]
    assert [any("AHEAD" in config for config in candidates) for _, candidates in seen] == [True, False]


@pytest.mark.parametrize("place", range(len(module._KEPT)))
def test_programs_that_keep_a_weight(place, monkeypatch, ranges, tf32):
    """Fewer programs than tiles, as many, and more; several tiles of columns; rows of another dtype."""

    def choose(kernel, shape, candidates, *rest):
        kept = [config for config in candidates if "AHEAD" in config]
        return kept[place] if kept else candidates[place % len(candidates)]

    monkeypatch.setattr(tune, "choose", choose)
    random = torch.Generator().manual_seed(0)
    for cores, n, width, columns, products, biases in (
        (1, 500, 100, 20, 2, 1), (2, 130, 16, 130, 1, 0), (132, 70, 24, 4, 3, 3), (3, 1, 128, 1, 1, 1),
    ):  # fmt: skip
        monkeypatch.setattr(module, "multiprocessors", lambda device, cores=cores: cores)
        x = torch.randn(60, width, generator=random).to(torch.float16 if products == 3 else torch.float32)
        weights = [torch.randn(columns, width, generator=random) for _ in range(products)]
        vectors = [torch.randn(columns, generator=random) for _ in range(biases)]
        index = torch.randint(0, 60, (n,), generator=random)
        for p, y in enumerate(gpu.gather_linears(x, index, weights, vectors)):
            bias = vectors[p].double() if p < biases else None
            expected = torch.nn.functional.linear(x[index].double(), weights[p].double(), bias)
            check_close(y, expected, torch.float32, f"product {p} cores={cores} n={n} width={width} columns={columns}")


@pytest.mark.parametrize(("table", "grad"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
    pytest.param(torch.float32, torch.float16, marks=pytest.mark.fuzz),
    pytest.param(torch.float64, torch.float64, marks=pytest.mark.fuzz),
], ids=str)  # fmt: skip
def test_gradients(table, grad):
    """Of weights, and of biases by a column of ones (3, 100 columns) and without (64, 300: a tile more)."""
    random = torch.Generator().manual_seed(0)
    for n, width, columns in ((1, 3, 1), (150, 100, 4), (40, 300, 13), (33, 64, 5), (0, 8, 4)):
        x = torch.randn(60, width, generator=random).to(table)
        grads = [torch.randn(n, columns, generator=random).to(grad) for _ in range(3)]
        for ids, biases in ((torch.int32, 0), (torch.int64, 1), (torch.int32, 3)):
            index = torch.randint(0, 60, (n,), generator=random).to(ids)
            found = gpu.gather_linear_grad(x, index, grads, biases)
            assert [tuple(y.shape) for y in found] == [(columns, width)] * 3 + [(columns,)] * biases
            assert all(y.dtype == grad and y.is_contiguous() for y in found)
            rows, where = x[index.long()].to(grad).double(), f"n={n} width={width} {ids} biases={biases}"
            for y, g in zip(found, grads, strict=False):
                check_close(y, g.double().t() @ rows, grad, f"weight {where}")
            for y, g in zip(found[3:], grads, strict=False):
                check_close(y, g.double().sum(0), grad, f"bias {where}")


@pytest.mark.parametrize("place", range(len(module._CONFIGS) + len(module._KEPT)))
def test_rows_of_zeros(place, monkeypatch, ranges, tf32):
    """By every setting: what stands in front of the table, or is NaN in it, is not read."""
    monkeypatch.setattr(tune, "choose", lambda kernel, shape, candidates, *_: candidates[place % len(candidates)])
    random = torch.Generator().manual_seed(0)
    for n, width, columns in ((130, 20, 16), (70, 33, 4)):
        held = torch.randn(61, width, generator=random)
        held[:2] = torch.nan
        x, w, b = held[1:], torch.randn(columns, width, generator=random), torch.randn(columns, generator=random)
        for ids in (torch.int32, torch.int64):
            index = torch.randint(0, 59, (n,), generator=random).to(ids)
            index[::5] = NO_ROW
            index[index == 0] = NO_ROW
            rows = torch.where(index[:, None] < 0, 0, x[index.clamp(min=0).long()]).double()
            y = gpu.gather_linear(x, index, w, b)
            check_close(y, torch.nn.functional.linear(rows, w.double(), b.double()), torch.float32, f"{n} {columns}")
            grad = torch.randn(n, columns, generator=random)
            for_weight, for_bias = gpu.gather_linear_grad(x, index, [grad], 1)
            check_close(for_weight, grad.double().t() @ rows, torch.float32, f"weight {n} {columns}")
            check_close(for_bias, grad.double().sum(0), torch.float32, f"bias {n} {columns}")


@pytest.mark.parametrize("biases", [0, 1, 3])
@pytest.mark.parametrize(("width", "columns"), [(100, (16, 40, 9)), (64, (16, 16, 5)), (30, (3, 8, 1))])
def test_gradients_of_the_first_rows(width, columns, biases):
    """Of fewer rows than there are ids: rows are gathered for the one that has most."""
    random = torch.Generator().manual_seed(0)
    x, index = torch.randn(60, width, generator=random), torch.randint(0, 60, (50,), generator=random)
    grads = [torch.randn(n, c, generator=random) for n, c in zip((20, 50, 7), columns, strict=True)]
    found = gpu.gather_linear_grad(x, index, grads, biases)
    rows = x[index].double()
    for y, g in zip(found, grads, strict=False):
        check_close(y, g.double().t() @ rows[: g.shape[0]], torch.float32, f"weight of {g.shape[0]} rows")
    for y, g in zip(found[3:], grads[:biases], strict=True):
        check_close(y, g.double().sum(0), torch.float32, f"bias of {g.shape[0]} rows")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.fuzz)], ids=str)
def test_gradients_by_rows_that_are_not_stored(dtype, monkeypatch, ranges, tf32):
    """By every setting: several tiles of rows, of their columns and of gradients'; programs that have none of the last
    tiles; what is no row, or is NaN in the table."""
    seen = []
    monkeypatch.setattr(backward, "gather_rows", lambda *args: pytest.fail("rows are stored"))
    random = torch.Generator().manual_seed(0)
    for cores, width, columns, rows, biases in (
        (1, 128, (20, 70), (300, 130), 1), (132, 64, (16, 90, 9), (70, 70, 20), 2), (2, 120, (130, 64), (129, 129), 0),
        (3, 127, (9, 9, 9, 2), (1, 65, 0, 70), 0), (3, 128, (9, 9, 9, 2), (1, 65, 0, 70), 3),
        (132, 300, (17,), (150,), 0), (1, 3, (12, 12), (40, 200), 0),
    ):  # fmt: skip
        monkeypatch.setattr(backward, "multiprocessors", lambda device, cores=cores: cores)
        held = torch.randn(61, width, generator=random).to(dtype)
        held[:2] = torch.nan
        x, index = held[1:], torch.randint(1, 60, (max(rows),), generator=random, dtype=torch.int32)
        index[::5] = NO_ROW
        grads = [torch.randn(n, c, generator=random).to(dtype) for n, c in zip(rows, columns, strict=True)]
        read = torch.where(index[:, None] < 0, 0, x[index.clamp(min=0).long()]).to(dtype).double()
        for setting in backward._READ:
            monkeypatch.setattr(tune, "choose", lambda kernel, shape, given, *_, taken=setting: (
                seen.append(kernel) or (taken if taken in given else given[-1])))  # fmt: skip
            found = gpu.gather_linear_grad(x, index, grads, biases)
            where = f"{setting} cores={cores} width={width} columns={columns} rows={rows}"
            assert [y.shape for y in found[: len(grads)]] == [(c, width) for c in columns], where
            for y, g in zip(found, grads, strict=False):
                assert y.dtype == dtype and y.is_contiguous()
                check_close(y, g.double().t() @ read[: g.shape[0]], dtype, f"weight {where}")
            for y, g in zip(found[len(grads) :], grads[:biases], strict=True):
                check_close(y, g.double().sum(0), dtype, f"bias {where}")
    assert seen.count("gather_linear_grad") == 7 * len(backward._READ)


def test_stored_rows_where_tensor_cores_multiply_nothing(monkeypatch):
    """float32 without TF32, float64, and rows whose dtype is not the gradients'."""
    for table, grad, tf32, number in (
        (torch.float32, torch.float32, False, 1), (torch.float64, torch.float64, True, 1),
        (torch.bfloat16, torch.float32, True, 1), (torch.float32, torch.float32, True, 3),
    ):  # fmt: skip
        monkeypatch.setattr(backward, "in_tensor_cores", lambda dtype, tf32=tf32: dtype != torch.float64 and tf32)
        given = backward.candidates(torch.zeros(2, 2, dtype=table), torch.zeros(2, 2, dtype=grad))
        assert len(given) == number and given[0] == backward._STORED
    assert len(backward.candidates(torch.zeros(2, 200), torch.zeros(2, 2))) == 2
    assert len(backward.candidates(torch.zeros(2, 0), torch.zeros(2, 2))) == 1
    assert backward.candidates(torch.zeros(2, 2), torch.zeros(2, 2), ones=True) == [backward._STORED]


@pytest.mark.fuzz
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
        first = torch.arange(min(n, 60) - 1)
        for ids, count in ((index, None), (index, torch.tensor(n - 4)), (None, None)):
            of = first if ids is None else ids[:count]
            tried.clear()
            given = g if ids is not None else g[: of.numel()]
            others = None if ids is not None else given[: of.numel() // 2].flip(0).contiguous()
            gpu_row_sums.row_sums(x, ids, given, count, others)
            expected = g[: of.numel()].double().t() @ x[of].double()
            if others is not None:
                few = x[of[: others.shape[0]]].double()
                expected = torch.stack((expected, others.double().t() @ few))
            assert len(tried) >= 6
            for y in tried:
                assert y.dtype == grad
                check_close(y, expected, grad, f"{grad} width={width} n={n}")
