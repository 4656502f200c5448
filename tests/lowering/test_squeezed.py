"""``squeeze`` leaves rows alone in every batch, also in one that has a single row, and says so."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import JoestarWarning
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_logits

pytestmark = [
    pytest.mark.usefixtures("cheapest_captures"), pytest.mark.filterwarnings("ignore:squeeze leaves rows alone")
]  # fmt: skip

IDX = torch.arange(60)


class Squeezing(nn.Module):
    """Weights for the rows of a layer, by some function of one column of it."""

    def __init__(self, weigh):
        super().__init__()
        self.conv, self.weigh = joestar.nn.SAGEConv(FEATURES, CLASSES), weigh
        self.double()

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        return h * self.weigh(h[:, :1].unsqueeze(1)).unsqueeze(-1)


def compiled(weigh, execution="padded"):
    torch.manual_seed(0)
    model = Squeezing(weigh)
    sampler = joestar.NeighborSampler(planted_graph(dtype=torch.float64), [4], seed=3)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    return joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", execution=execution, batch_size=20)


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_a_batch_of_one_row_is_as_others(execution):
    """``softmax(0)`` of a squeezed single row would be taken over nothing, or over columns."""
    step = compiled(lambda column: column.squeeze().softmax(0), execution)
    with pytest.warns(JoestarWarning, match=r"squeeze leaves rows alone(?s:.)*test_squeezed.py:\d+ in "):
        losses = [loss.item() for loss in step.epoch(IDX, 20)]
    named = compiled(lambda column: column.squeeze((1, 2)).softmax(0), execution)
    with warnings.catch_warnings():
        warnings.simplefilter("error", JoestarWarning)
        assert losses == [loss.item() for loss in named.epoch(IDX, 20)]
    for seeds in (IDX[:1], IDX[:5]):
        seeds = seeds.to(step.graph.indices.dtype)
        expected = plain_logits(copy.deepcopy(named.model).eval(), named.sampler, seeds, -1, 0)
        assert expected.shape == (len(seeds), CLASSES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JoestarWarning)
            torch.testing.assert_close(step.predict(seeds), expected, rtol=1e-9, atol=1e-9)


SPELLINGS = {
    "in place": (lambda column: column.clone().squeeze_().softmax(0), lambda column: column.squeeze((1, 2)).softmax(0)),
    "rows, in place": (lambda column: column.clone().squeeze_(0).mean((1, 2)), lambda column: column.mean((1, 2))),
    "rows": (lambda column: column.squeeze(0).sum((1, 2)), lambda column: column.sum((1, 2))),
    "rows from behind": (lambda column: column.squeeze(-3).sum((1, 2)), lambda column: column.sum((1, 2))),
    "all, named": (lambda column: torch.squeeze(column, (0, 1, 2)).softmax(0), lambda c: c.squeeze((1, 2)).softmax(0)),
    "nothing to drop": (
        lambda column: column.expand(-1, 2, 2).squeeze().sum((1, 2)),
        lambda column: column.expand(-1, 2, 2).sum((1, 2)),
    ),
    "vectors": (lambda column: column.flatten().squeeze().softmax(0), lambda column: column.flatten().softmax(0)),
}


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.each("name")
def test_rows_stay_however_it_is_spelt(name, execution):
    spelt, meant = SPELLINGS[name]
    step, plain = compiled(spelt, execution), compiled(meant, execution)
    step.predict(IDX)
    for seeds in (IDX[:1], IDX[:5]):
        seeds = seeds.to(step.graph.indices.dtype)
        expected = plain_logits(copy.deepcopy(plain.model).eval(), plain.sampler, seeds, -1, 0)
        torch.testing.assert_close(step.predict(seeds), expected, rtol=1e-9, atol=1e-9)


def test_what_names_no_dimension_or_columns_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", JoestarWarning)
        compiled(lambda column: column.squeeze(()).squeeze(2).squeeze(-1)).predict(IDX)
