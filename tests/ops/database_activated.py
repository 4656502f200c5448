"""The op database: aggregation behind any activation and a norm."""

import itertools

import torch

from .database_fused import _aggregate_cat, _aggregate_rows, _large_edges
from .samples import NOT_FLOAT, NUM_SRC, TINY, Op, Sample, values

ACTS = (
    "elu 1.0 1.0 1.0", "gelu none", "leaky_relu 0.2", "silu", "tanh", "softplus 1.0 20.0", "sigmoid", "gelu tanh",
    "mish", "relu", "elu 0.7 1.5 2.0", "hardswish", "log_sigmoid", "hardtanh -0.5 0.7", "hardsigmoid", "identity",
    "softplus 2.0 3.0",
)  # fmt: skip
"""Every activation, some under several numbers."""

EPS = 1e-5
WIDTHS = (1, 17, 70, 300)
"""One word, words that are no power of two, and rows of several tiles, which have no norm."""


def _vectors(width: int, dtype, position: int) -> tuple:
    """(gain, shift, eps, bias), none of them, or some."""
    gain, shift, bias = (values((width,), dtype, seed) for seed in (11, 12, 13))
    normed = width in WIDTHS[1:3] and position % 4 != 3
    bias = bias if position % 3 else None
    return (
        (*((gain, shift), (None, None), (gain, None))[position % 3], EPS, bias) if normed else (None, None, 0.0, bias)
    )


def _aggregate_activated(dtype, ids):
    acts, positions = itertools.cycle(ACTS), itertools.count()
    for sample in _aggregate_cat(dtype, ids, WIDTHS):
        indptr, indices, x, bits, scale, reduce = sample.args
        act, rest = next(acts), _vectors(x.shape[1], dtype, next(positions))
        args = (indptr, indices, x, None, None, bits, scale, reduce, True, act, *rest)
        yield Sample(f"{sample.case}, beside, {act}, {_named(rest)}", args)
    for sample in _aggregate_rows(dtype, ids, WIDTHS[1:]):
        act, rest = next(acts), _vectors(sample.args[2].shape[1], dtype, next(positions))
        yield Sample(f"{sample.case}, {act}, {_named(rest)}", (*sample.args, False, act, *rest))


def _named(rest: tuple) -> str:
    return f"norm {rest[2] > 0}, bias {rest[3] is not None}"


def _aggregate_activated_grad(dtype, ids):
    for sample in _aggregate_activated(dtype, ids):
        indptr, indices, x, *others = sample.args
        grad = values((indptr.numel() - 1, (2 if others[5] else 1) * x.shape[1]), dtype, 5)
        yield Sample(sample.case, (indptr, indices, grad, x, *others))


def _large(dtype) -> tuple:
    indptr, indices, x, bits, scale, reduce = _large_edges(dtype)
    vectors = (values((40,), dtype, seed) for seed in (11, 12))
    return indptr, indices, x, None, None, bits, scale, reduce, True, "gelu none", *vectors, EPS, None


def _large_grad(dtype) -> tuple:
    indptr, indices, *others = _large(dtype)
    return indptr, indices, values((NUM_SRC, 80), dtype, 5), *others


_PLAIN = (None, None, None, 1.0, "sum", False)
_ONES, _INTS = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int64)

OPS = {
    "aggregate_activated": Op(
        _aggregate_activated,
        _large,
        gradients=(2, 10, 11),
        errors=(
            ((*TINY, _INTS, *_PLAIN, "tanh"), NOT_FLOAT),
            ((*TINY, _ONES, *_PLAIN, "cosine"), "expected an activation out of .* got 'cosine'"),
            ((*TINY, _ONES, *_PLAIN, "tanh", torch.ones(2), None, EPS), r"gain \[1\]"),
            ((*TINY, _ONES, *_PLAIN, "tanh", torch.ones(1)), "expected eps > 0"),
        ),
    ),
    "aggregate_activated_grad": Op(
        _aggregate_activated_grad,
        _large_grad,
        errors=(((*TINY, _INTS, _ONES, *_PLAIN, "tanh", None, None, 0.0, None), NOT_FLOAT),),
    ),
}
