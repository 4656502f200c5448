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
}


def compiled(reduce, execution):
    torch.manual_seed(0)
    model = Extremes(reduce).double()
    sampler = joestar.NeighborSampler(planted_graph(dtype=torch.float64), [3], seed=5)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    return joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", execution=execution, batch_size=20)


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_largest_of_none_is_an_error_of_pytorchs(name, execution):
    step = compiled(REDUCTIONS[name], execution)
    losses = [loss.item() for loss in step.epoch(IDX, 20)]
    state = copy.deepcopy(step.state_dict())
    for use in (step, step.predict, lambda seeds: list(step.epoch(seeds, 20))):
        with pytest.raises((RuntimeError, IndexError), match=r"max|min"):
            use(ALONE)
    assert step.counters.recompiles == 0
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, state["model"][name])
    again = compiled(step.model.reduce, execution)
    assert losses == [loss.item() for loss in again.epoch(IDX, 20)]
    both = torch.cat([ALONE, IDX[:7]]).to(step.graph.indices.dtype)
    expected = plain_logits(copy.deepcopy(step.model).eval(), step.sampler, both, -1, 0)
    torch.testing.assert_close(step.predict(both), expected, rtol=1e-9, atol=1e-9)
