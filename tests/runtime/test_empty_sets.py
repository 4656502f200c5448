"""Models that want the largest or smallest of a set, and batches without an edge: what PyTorch raises, nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_logits

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, ALONE = torch.arange(1, 61), torch.tensor([0])  # node 0 has no edges


class Extremes(nn.Module):
    """Adds to every row something of a reduction over the edges of the batch."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, blocks, x):
        h = self.first(x)
        for block in blocks:
            values = block.apply_edges(fn.copy_u(h))
            h = block.pull(fn.copy_u(h), "sum") + h[: block.num_dst] + self.reduce(block, values).tanh()
        return self.last(h)


REDUCTIONS = {
    "amax": lambda block, values: values.amax(0),
    "max": lambda block, values: values.max(0).values,
    "min of all": lambda block, values: values.min(),
    "amin of both": lambda block, values: values.amin((0, 1)),
    "argmax": lambda block, values: values.argmax(0).to(values.dtype) * 1e-2,
    "ids": lambda block, values: block.indices.max().to(values.dtype) * 1e-2,
    "norm max": lambda block, values: torch.linalg.vector_norm(values, torch.inf, dim=0),
    "norm max of all": lambda block, values: values.norm(torch.inf),
}
VALUES = {
    "sum": lambda values: values.sum(0),
    "nansum": lambda values: values.nansum(0),
    "count": lambda values: values.count_nonzero(0).double(),
    "prod": lambda values: values.prod(0),
    "any": lambda values: (values > 0).any(0).double(),
    "all": lambda values: (values > 0).all(0).double(),
    "mean": lambda values: values.mean(0),
    "mean of all": lambda values: values.mean(),
    "var": lambda values: values.var(0),
    "var of all": lambda values: values.var(),
    "var, correction 0": lambda values: values.var(0, correction=0),
    "var, correction 3": lambda values: values.var(0, correction=3),
    "std": lambda values: values.std(0),
    "std of both": lambda values: values.std((0, 1)),
    "std, correction 3": lambda values: values.std(0, correction=3),
    "logsumexp": lambda values: values.logsumexp(0),
    "norm 1": lambda values: torch.linalg.vector_norm(values, 1, dim=0),
    "norm 2": lambda values: values.norm(dim=0),
    "softmax": lambda values: values.softmax(0).sum(0),
}
"""Reductions that have a value of no rows, if only NaN, or of fewer than the correction."""


def compiled(reduce, execution):
    torch.manual_seed(0)
    model = Extremes(reduce).double()
    sampler = joestar.NeighborSampler(planted_graph(dtype=torch.float64), [3], seed=5)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    return joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", execution=execution, batch_size=20)


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.each("name")
def test_the_largest_of_none_is_an_error_of_pytorchs(name, execution):
    step = compiled(REDUCTIONS[name], execution)
    losses = [loss.item() for loss in step.epoch(IDX, 20)]
    state = copy.deepcopy(step.state_dict())
    for use in (step, step.predict, lambda seeds: list(step.epoch(seeds, 20))):
        with pytest.raises((RuntimeError, IndexError), match=r"max|min|inf norm"):
            use(ALONE)
    assert step.counters.recompiles == 0
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, state["model"][name])
    again = compiled(step.model.reduce, execution)
    assert losses == [loss.item() for loss in again.epoch(IDX, 20)]
    both = torch.cat([ALONE, IDX[:7]]).to(step.graph.indices.dtype)
    expected = plain_logits(copy.deepcopy(step.model).eval(), step.sampler, both, -1, 0)
    torch.testing.assert_close(step.predict(both), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.each("name")
def test_what_few_or_no_edges_give_is_what_they_give_in_pytorch(name, execution):
    """One seed without edges, then seeds of which one has one to three."""
    step = compiled(lambda block, values: VALUES[name](values), execution)
    step.predict(IDX)
    for seeds in (ALONE, IDX[:1], torch.cat([ALONE, IDX[:1]]), torch.cat([ALONE, IDX[:7]])):
        seeds = seeds.to(step.graph.indices.dtype)
        expected = plain_logits(copy.deepcopy(step.model).eval(), step.sampler, seeds, -1, 0)
        torch.testing.assert_close(step.predict(seeds), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
