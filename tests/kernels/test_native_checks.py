"""Operands with too few rows are refused before a kernel reads past their end."""

import pytest
import torch

from joestar.kernels import cpu

INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
X = torch.ones(2, 4)
ROWS = r"with one row for each of {}, got \[{}"
REFUSED = [
    ("spmm", (INDPTR, INDICES, X, torch.ones(2), "sum"), "weight " + ROWS.format(3, 2)),
    ("spmm", (INDPTR, INDICES[:2], X, None, "sum"), r"at least indptr\[-1\] = 3 ids, got 2"),
    ("spmm_grad_x", (INDPTR, INDICES, X[:1], None, 2, "sum"), "grad " + ROWS.format(2, 1)),
    ("spmm_grad_x", (INDPTR, INDICES, X, torch.ones(4), 2, "sum"), "weight " + ROWS.format(3, 4)),
    ("spmm_grad_x", (INDPTR, INDICES[:2], X, None, 2, "sum"), r"at least indptr\[-1\]"),
    ("spmm_grad_weight", (INDPTR, INDICES, X, X[:1], torch.ones(3), "sum"), "grad " + ROWS.format(2, 1)),
    ("spmm_grad_weight", (INDPTR, INDICES, X, X, torch.ones(2), "sum"), "weight_like " + ROWS.format(3, 2)),
    ("spmm_extremum_grad", (INDPTR, INDICES, X, None, X[:1], X), "y " + ROWS.format(2, 1)),
    ("spmm_extremum_grad", (INDPTR, INDICES, X, None, X, X[:1]), "grad " + ROWS.format(2, 1)),
    ("sddmm", (INDPTR, INDICES, X, X[:1], "add"), "rhs " + ROWS.format(2, 1)),
    ("sddmm", (INDPTR, INDICES[:2], X, X, "add"), r"at least indptr\[-1\]"),
    ("scatter_src", (INDPTR, INDICES, torch.ones(2), 2), "edge values " + ROWS.format(3, 2)),
    ("scatter_dst", (INDPTR, torch.ones(2)), r"edge values of 3 edges, got \[2\]"),
    ("edge_softmax", (INDPTR, torch.ones(2, 4)), r"edge values of 3 edges, got \[2, 4\]"),
    ("edge_softmax_grad", (INDPTR, torch.ones(3), torch.ones(2)), "grad " + ROWS.format(3, 2)),
]


@pytest.mark.parametrize(("name", "args", "message"), REFUSED, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REFUSED)])
def test_too_few_rows(name, args, message):
    with pytest.raises(ValueError, match=message):
        getattr(cpu, name)(*args)
