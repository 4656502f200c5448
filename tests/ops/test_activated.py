"""Aggregation behind any activation and a norm, against plain PyTorch in float64: results, gradients, NaN."""

import pytest
import torch
import torch.nn.functional as F

from joestar.kernels.activations import ACTIVATIONS, SPELT, parsed, spelt
from joestar.ops import reference

from .database_activated import ACTS, EPS

ops = torch.ops.joestar
INDPTR, INDICES = torch.tensor([0, 2, 2, 5]), torch.tensor([4, 0, 3, 3, 5])
MODULES = {
    "elu": F.elu, "celu": lambda u: F.celu(u, 0.7), "selu": F.selu, "relu": F.relu, "relu6": F.relu6, "gelu": F.gelu,
    "tanh gelu": lambda u: F.gelu(u, approximate="tanh"), "silu": F.silu, "mish": F.mish, "tanh": torch.tanh,
    "leaky_relu": lambda u: F.leaky_relu(u, 0.2), "sigmoid": torch.sigmoid, "log_sigmoid": F.logsigmoid,
    "softplus": lambda u: F.softplus(u, 2.0, 1.5), "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda u: F.hardtanh(u, -0.3, 0.4), "identity": lambda u: u,
}  # fmt: skip
"""Functions of torch, by the names of ``aten``."""
NUMBERS = {"elu": (1, 1, 1), "celu": (0.7,), "gelu": ("none",), "tanh gelu": ("tanh",), "leaky_relu": (0.2,),
           "softplus": (2.0, 1.5), "hardtanh": (-0.3, 0.4)}  # fmt: skip


def text_of(name: str) -> str:
    return spelt(name.split()[-1], *NUMBERS.get(name, ()))


def inputs(width: int = 37) -> dict:
    random = torch.Generator().manual_seed(0)
    x, gain, shift, bias = (
        torch.randn(shape, dtype=torch.float64, generator=random) * 2
        for shape in ((6, width), (width,), (width,), (width,))
    )
    bits = torch.randint(-(2**31), 2**31, (6, -(-width // 32)), generator=random, dtype=torch.int32)
    weight = torch.randn(5, dtype=torch.float64, generator=random)
    return {"x": x, "gain": gain, "shift": shift, "bias": bias, "bits": bits, "weight": weight}


def dense(weight, reduce: str) -> torch.Tensor:
    """The aggregation as a matrix ``[3, 6]``."""
    a = torch.zeros(3, 6, dtype=torch.float64)
    for row in range(3):
        for e in range(INDPTR[row], INDPTR[row + 1]):
            a[row, INDICES[e]] += 1.0 if weight is None else weight[e]
        if reduce == "mean":
            a[row] /= max(1, INDPTR[row + 1] - INDPTR[row])
    return a


def plainly(function, x, gain, shift, bias, bits, weight, own, reduce, cat, norm):
    """The same in PyTorch's own words."""
    u = x + bias
    z = function(F.layer_norm(u, u.shape[1:], gain, shift, EPS) if norm else u)
    words = bits.shape[1]
    column = torch.arange(x.shape[1])
    z = torch.where((bits[:, column % words] >> (column // words).to(torch.int32)) & 1 != 0, 2.5 * z, 0.0)
    y = dense(weight, reduce) @ z
    return torch.cat([y, z[:3]], 1) if cat else y + own * z[:3]


SHORT = ("celu", "hardsigmoid")
"""Whose gradients PyTorch computes with 1 / alpha, or 1 / 6, rounded to float32."""
FORMS = [(True, False, "mean"), (False, True, "sum"), (True, True, "sum")]


@pytest.mark.parametrize("whose", [ops, reference], ids=["op", "reference"])
@pytest.mark.parametrize("name", MODULES)
def test_results_and_gradients_are_those_of_pytorch(name, whose):
    given = inputs()
    leaves = [given[key].requires_grad_() for key in ("x", "gain", "shift", "bias")]
    x, gain, shift, bias = leaves
    own, random = torch.tensor([0.3], dtype=torch.float64), torch.Generator().manual_seed(1)
    for cat, norm, reduce in FORMS:
        weight = None if cat else given["weight"]
        vectors = (gain, shift, EPS) if norm else (None, None, 0.0)
        args = (None if cat else own, given["bits"], 2.5, reduce, cat, text_of(name), *vectors, bias)
        ours = whose.aggregate_activated(INDPTR, INDICES, x, weight, *args)
        expected = plainly(MODULES[name], *leaves, given["bits"], weight, own, reduce, cat, norm)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        if whose is reference:
            continue
        by = torch.randn(expected.shape, dtype=torch.float64, generator=random)
        wanted = leaves if norm else [x, bias]
        grads = (torch.autograd.grad((rows * by).sum(), wanted) for rows in (ours, expected))
        for mine, theirs in zip(*grads, strict=True):
            tolerance = 1e-6 if name in SHORT else 1e-11
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_every_activation_of_the_table_is_tested():
    assert {parsed(text_of(name))[0] for name in MODULES} == set(ACTIVATIONS) == {parsed(act)[0] for act in ACTS}
    assert set(SPELT) <= set(MODULES)
    assert spelt("softsign") is None
    assert parsed(spelt("hardtanh", -1, float("inf"))) == ("hardtanh", -1.0, float("inf"))


@pytest.mark.parametrize("name", MODULES)
def test_nan_passes(name):
    """A model that has diverged must not train on as if nothing were, whatever the activation."""
    given = inputs(5)
    x, every = given["x"], torch.full((6, 1), -1, dtype=torch.int32)
    x[4, 2] = x[1, 3] = float("nan")
    x.requires_grad_()
    y = ops.aggregate_activated(INDPTR, INDICES, x, None, None, every, 1.0, "sum", True, text_of(name))
    assert torch.equal(y.isnan().nonzero(), torch.tensor([[0, 2], [1, 8]]))
    normed = (given["gain"], given["shift"], EPS)
    y = ops.aggregate_activated(INDPTR, INDICES, x, None, None, every, 1.0, "sum", True, text_of(name), *normed)
    assert torch.equal(y.isnan().any(1), torch.tensor([True, True, False]))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad[4].isnan().all() and grad[1].isnan().all()


def test_dropped_entries_are_zero_and_have_no_gradient():
    """Also of activations that are not 0 at 0."""
    x = inputs(5)["x"].requires_grad_()
    none = torch.zeros((6, 1), dtype=torch.int32)
    y = ops.aggregate_activated(INDPTR, INDICES, x, None, None, none, 2.0, "sum", True, "sigmoid")
    assert not y.any()
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_edge_weights_are_constants():
    given = inputs(5)
    weight = given["weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient for weight"):
        ops.aggregate_activated(INDPTR, INDICES, given["x"], weight, None, None, 1.0, "sum", False, "tanh")
