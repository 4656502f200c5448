"""Positions behind the last row of a set, which padding has rows for: an error, as in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import SEEDS, Case, Heads, Rows, check, curved

pytestmark = pytest.mark.usefixtures("quick_captures")


def places(h: Tensor, by: int = 0) -> Tensor:
    """Places of rows, one of them in another's stead; ``by`` places further."""
    return (torch.arange(h.shape[0]) * 2) % h.shape[0] + by


def onto(h: Tensor, index: Tensor) -> Tensor:
    return index[:, None].expand(-1, h.shape[1])


READS = {
    "index": lambda h, i: h[i],
    "index of columns, too": lambda h, i: h[i, i * 0][:, None] + h,
    "index_select": lambda h, i: torch.index_select(h, 0, i),
    "of an activation": lambda h, i: h.tanh().index_select(0, i),
    "narrow ids": lambda h, i: h.index_select(0, i.int()),
    "gather": lambda h, i: h.gather(0, onto(h, i)),
    "embedding": lambda h, i: F.embedding(i, h),
    "index_add": lambda h, i: torch.zeros_like(h).index_add(0, i, h),
    "scatter_add": lambda h, i: torch.zeros_like(h).scatter_add(0, onto(h, i), h),
    "scatter_reduce": lambda h, i: torch.zeros_like(h).scatter_reduce(0, onto(h, i), h, "sum"),
    "scatter_reduce max": lambda h, i: torch.zeros_like(h).scatter_reduce(0, onto(h, i), h, "amax"),
    "cross entropy": lambda h, i: h * F.cross_entropy(h @ h.T, i),
    "cross entropy of each": lambda h, i: h * F.cross_entropy(h @ h.T, i, reduction="none")[:, None],
    "nll": lambda h, i: h * F.nll_loss(h @ h.T, i),
    "weighted labels": lambda h, i: h * F.cross_entropy(h @ h.T, i, reduction="sum"),
    "embedding_bag": lambda h, i: F.embedding_bag(i[:, None], h),
    "from the end": lambda h, i: h[-1 - i],
}


@pytest.mark.parametrize("full", [False, True])
def test_rows_of_the_set_are_read(full):
    """Also where the batch leaves no padding."""
    reads = Heads({name: lambda m, b, h, read=read: read(h, places(h)) for name, read in READS.items()})
    check(reads, loss=curved, **({"factor": 1.0, "extra": 0, "tight": True} if full else {}))


@pytest.mark.parametrize("name", READS)
def test_rows_behind_it_are_an_error(name):
    model = Rows(lambda m, b, h: READS[name](h, places(h, by=1)))
    case = Case(model, loss=curved)
    for run in (case.eager, case.exact, case.padded):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)|is out|idx < num_embeddings"):
            run(case.seeds(SEEDS), 0)


@pytest.mark.parametrize("reduce", ["sum", "amax", "prod"])
def test_the_row_behind_the_last_one_of_a_table_is_an_error(reduce):
    """Padded entries are added to a row of their own there, which no id of the batch may mean."""

    def onto_table(m, b, h):
        index = onto(h, torch.zeros_like(b.srcs.long()) + 4)
        return h + h.new_zeros(4, h.shape[1]).scatter_reduce(0, index, h.detach(), reduce).sum()

    case = Case(Rows(onto_table), loss=curved)
    for run in (case.eager, case.exact, case.padded):
        with pytest.raises(RuntimeError, match=r"out of bounds"):
            run(case.seeds(SEEDS), 0)


def test_labels_behind_the_rows_of_a_batch():
    """Of a loss that takes every row of the batch for a class."""
    case = Case(Rows(lambda m, b, h: h), loss=lambda z, y: F.cross_entropy(z @ z.T, y + len(y) - 2))
    for run in (case.eager, case.exact, case.padded):
        with pytest.raises(IndexError, match=r"Target .* is out of bounds"):
            run(case.seeds(SEEDS), 0)
