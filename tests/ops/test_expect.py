"""``expect``: an error on a CPU, not a number elsewhere; the values and their gradient are left alone."""

import pytest
import torch

from joestar.errors import DomainError
from joestar.ops.padding import expect as module

JOESTAR = torch.ops.joestar
X = torch.tensor([[0.5, 2.0], [-1.0, 0.25]], dtype=torch.float64)
WHAT = "a probability, got {}"


@pytest.mark.parametrize("wrong", [torch.zeros(2, 2, dtype=torch.bool), torch.zeros((), dtype=torch.bool)])
def test_values_that_are_right(wrong):
    x = X.clone().requires_grad_()
    y = JOESTAR.expect(x, wrong, WHAT)
    assert torch.equal(y, X) and y.is_contiguous() and y.data_ptr() != x.data_ptr()
    (grad,) = torch.autograd.grad((y * X).sum(), x)
    assert torch.equal(grad, X)
    assert torch.equal(module.expect(X, wrong, WHAT), X)


def test_the_first_wrong_value_is_named():
    with pytest.raises(DomainError, match="a probability, got 2"):
        JOESTAR.expect(X, (X < 0) | (X > 1), WHAT)
    with pytest.raises(DomainError, match=r"a probability, got 0\.5"):
        JOESTAR.expect(X, torch.tensor([[True], [False]]), WHAT)


def test_where_nobody_looks_they_are_no_numbers():
    found = module.expect(X, (X < 0) | (X > 1), WHAT)
    assert torch.equal(found.isnan(), torch.tensor([[False, True], [True, False]]))
    assert torch.equal(found[~found.isnan()], torch.tensor([0.5, 0.25], dtype=torch.float64))
    whole = torch.tensor([1, 7])
    assert torch.equal(module.expect(whole, whole > 1, WHAT), whole)
