"""Analytic gradients against numerical ones in float64, and what PyTorch requires of a custom op."""

import pytest
import torch
from torch import Tensor

from .database import IDS, KEY, OPS, values
from .structures import structures

ops = torch.ops.joestar
STRUCTURES = [s for s in structures() if s.name != "hub"]
EACH_STRUCTURE = pytest.mark.parametrize("s", STRUCTURES, ids=[s.name for s in STRUCTURES])


def _leaf(*shape: int, seed: int = 0) -> Tensor:
    """Distinct values, far enough apart that a small step never changes which one is largest."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    spaced = (torch.randperm(size, generator=generator).double() + 1) / max(size, 1)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return (spaced * signs).reshape(shape).requires_grad_()


def _check(function, *leaves: Tensor) -> None:
    assert torch.autograd.gradcheck(function, leaves, fast_mode=False)


def _row_shapes(s):
    """(shape of a row of x, shapes of a weight)."""
    edges = s.indices.numel()
    return [((), [None, (edges,)]), ((3,), [None, (edges,)]), ((2, 2), [None, (edges,), (edges, 2)])]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@EACH_STRUCTURE
@pytest.mark.every(2)
def test_spmm(s, reduce):
    for row, weights in _row_shapes(s):
        x = _leaf(s.num_src, *row)
        for shape in weights:
            if shape is None:
                _check(lambda x: ops.spmm(s.indptr, s.indices, x, None, reduce), x)
            else:
                weight = _leaf(*shape, seed=1)
                _check(lambda x, w: ops.spmm(s.indptr, s.indices, x, w, reduce), x, weight)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_spmm_of_rows_shared_by_heads(reduce):
    for s in structures():
        if s.name != "hub":
            x, weight = _leaf(s.num_src, 1, 3), _leaf(s.indices.numel(), 2, seed=1)
            _check(lambda x, w, s=s: ops.spmm(s.indptr, s.indices, x, w, reduce), x, weight)


def test_spmm_through_a_hub():
    s = next(s for s in structures() if s.name == "hub")
    x, weight = _leaf(s.num_src, 2), _leaf(s.indices.numel(), seed=1)
    for reduce in ("sum", "mean", "max"):
        _check(lambda x, w, reduce=reduce: ops.spmm(s.indptr, s.indices, x, w, reduce), x, weight)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot", "copy_lhs", "copy_rhs"])
@EACH_STRUCTURE
@pytest.mark.every(2)
def test_sddmm(s, op):
    for row in ((), (3,), (2, 2)):
        if op == "dot" and not row:
            continue
        lhs, rhs = _leaf(s.num_src, *row), _leaf(s.num_dst, *row, seed=1)
        if op == "copy_lhs":
            _check(lambda a: ops.sddmm(s.indptr, s.indices, a, None, "copy_lhs"), lhs)
        elif op == "copy_rhs":
            _check(lambda b: ops.sddmm(s.indptr, s.indices, None, b, "copy_rhs"), rhs)
        else:
            _check(lambda a, b: ops.sddmm(s.indptr, s.indices, a, b, op), lhs, rhs)


@EACH_STRUCTURE
def test_edge_softmax(s):
    for heads in ((), (3,), (2, 2)):
        _check(lambda scores: ops.edge_softmax(s.indptr, scores), _leaf(s.indices.numel(), *heads))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.each("heads")
def test_attend(heads, shared):
    for s in structures():
        if s.name in ("hub", "no sources", "isolated", "padded"):
            scores = _leaf(s.num_src, heads), _leaf(s.num_dst, heads, seed=1)  # the shift: no sum is 0
            x = _leaf(s.num_src, 1 if shared else heads, 2, seed=2)
            words = (s.indices.numel(), 1)
            bits = torch.randint(0, 2**heads, words, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
            for mask in (None, bits):

                def y(a, b, x, e=None, s=s, mask=mask):
                    return ops.attend(s.indptr, s.indices, a, b + 0.0137, x, 0.2, mask, 1.5, e)[0]

                _check(y, *scores, x)
            _check(y, *scores, x, _leaf(s.indices.numel(), heads, seed=3))


def test_ties_share_the_gradient_evenly_as_in_torch():
    indptr, indices = torch.tensor([0, 4, 4, 6]), torch.tensor([0, 1, 2, 1, 3, 0])
    x = torch.tensor([2.0, 2.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    y = ops.spmm(indptr, indices, x, None, "max")
    (grad,) = torch.autograd.grad(y, x, torch.tensor([6.0, 100.0, 8.0], dtype=torch.float64))
    dst = torch.tensor([0, 0, 0, 0, 2, 2])
    like = torch.zeros(3, dtype=torch.float64).scatter_reduce(0, dst, x[indices], "amax", include_self=False)
    (expected,) = torch.autograd.grad(like, x, torch.tensor([6.0, 100.0, 8.0], dtype=torch.float64))
    assert grad.tolist() == expected.tolist() == [2.0, 4.0, 0.0, 8.0]


def test_only_what_needs_a_gradient_gets_one():
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    for reduce in ("sum", "mean", "max", "min"):
        x, weight = values((2, 3), torch.float32, 1), values((3,), torch.float32, 2)
        y = ops.spmm(indptr, indices, x.requires_grad_(), weight, reduce)
        (grad_x,) = torch.autograd.grad(y.sum(), [x])
        y = ops.spmm(indptr, indices, x.detach(), weight.requires_grad_(), reduce)
        (grad_weight,) = torch.autograd.grad(y.sum(), [weight])
        assert grad_x.abs().sum() > 0
        assert grad_weight.abs().sum() > 0
        assert not ops.spmm(indptr, indices, x.detach(), weight.detach(), reduce).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_gradients_accumulate_wider(dtype):
    """4,096 gradients of 1 sum to 4,096; adding them one by one in 16 bits would stop at 256 or 2,048."""
    rows = 4096
    indptr, indices = torch.arange(rows + 1), torch.zeros(rows, dtype=torch.int64)
    x = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    ops.spmm(indptr, indices, x, None, "sum").sum(dtype=torch.float32).backward()
    assert x.grad.item() == rows
    star = torch.tensor([0, rows])
    assert ops.spmm(star, indices, x.detach(), None, "sum").item() == rows
    weight = torch.ones(rows, dtype=dtype)
    assert ops.scatter_dst(star, weight).item() == rows


def _checked(name: str, count: int = 5) -> list[tuple]:
    """A few samples of the op, spread over the database; float arguments that have gradients ask for them."""
    op = OPS[name]
    samples = [s for s in op.samples(torch.float64, IDS[0]) if not s.case.startswith(("no rows", "hub", "nothing"))]
    out = []
    for sample in samples[:: -(-len(samples) // count)]:
        args = [
            value.clone().requires_grad_() if i in op.gradients and isinstance(value, Tensor) else value
            for i, value in enumerate(sample.args)
        ]
        out.append(tuple(args))
    return out


@pytest.mark.every(2)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    """Schema (nothing mutated or aliased), autograd registration, fake kernel."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for args in _checked(name):
        torch.library.opcheck(getattr(ops, name), args, test_utils=checks)


@pytest.mark.parametrize("which", ["one", pytest.param("several", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.every(2)
def test_opcheck_of_dynamic_shapes(name, which):
    """AOTAutograd gives what eager code gives; one sample, from the middle, unless there is time to trace several."""
    for args in _checked(name) if which == "several" else _checked(name, 2)[-1:]:
        torch.library.opcheck(getattr(ops, name), args, test_utils="test_aot_dispatch_dynamic")


COMPOSITES = {
    "keyed_dropout": lambda x: (x, torch.arange(6), KEY, 3, 0.4),
    "keyed_edge_dropout": lambda x: (x, torch.tensor([0, 2, 2, 5]), torch.tensor([7, 1, 3]), KEY, 3, 0.4),
    "mask_rows": lambda x: (x, torch.tensor(4), 0, 0.5),
    "masked_mean": lambda x: (x, torch.tensor(4), 0, [0], False),
    "masked_var": lambda x: (x, torch.tensor(4), 0, [0, 1], 1.0, True),
    "masked_batch_norm": lambda x: (x, values((3,), x.dtype, 5), values((3,), x.dtype, 6), torch.tensor(4), 1e-5),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites(name):
    x = values((6, 3), torch.float64, 1).requires_grad_()
    args, op = COMPOSITES[name](x), getattr(ops, name)
    torch.library.opcheck(op, args)
    first = name == "masked_batch_norm"
    _check(lambda x: op(x, *args[1:])[0] if first else op(x, *args[1:]), x)
