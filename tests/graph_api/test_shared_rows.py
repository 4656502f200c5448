"""Rows that several heads share, each head with its own edge weights."""

import pytest
import torch
from torch.testing import assert_close

from joestar.graph_api import fn

from .test_computation import EACH, _values


@EACH
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("backwards", [False, True])
def test_pull_of_rows_shared_by_heads(g, reduce, backwards):
    if backwards and not hasattr(g, "reverse"):
        pytest.skip("has no reverse")
    g = g.reverse() if backwards else g
    x, weight = _values(g.num_src, 1, 3).requires_grad_(), _values(g.num_edges, 4, seed=1).requires_grad_()
    y = g.pull(fn.u_mul_e(x, weight), reduce)
    expected = g.pull(fn.u_mul_e(x.expand(-1, 4, -1), weight), reduce)
    assert y.shape == (g.num_dst, 4, 3)
    assert_close(y, expected)
    assert_close(g.pull(fn.e_mul_u(weight, x), reduce), expected)
    grad = _values(g.num_dst, 4, 3, seed=2)
    assert_close(torch.autograd.grad(y, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad))


@EACH
def test_extrema_are_refused(g):
    if g.num_edges:
        with pytest.raises(ValueError, match=r"sum or mean of rows shared by heads.*max"):
            g.pull(fn.u_mul_e(_values(g.num_src, 1, 3), _values(g.num_edges, 4)), "max")
