"""Samplers that change, or call a varying number of times, and models with other rows than seeds: the errors say so."""

import pytest
from torch import nn

from joestar.errors import CaptureError
from joestar.sampling import NeighborSampler

from .harness import NUM_CLASSES, NUM_FEATURES, Case, small_graph


class HopSampler:
    """Makes as many hops as it is told, which may change between batches."""

    def __init__(self, graph, hops: int):
        self.graph = graph
        self.hops = hops

    def sample(self, graph, seeds):
        blocks = []
        for _ in range(self.hops):
            blocks.insert(0, graph[:, blocks[0].srcs if blocks else seeds].individual_sample(2))
        return blocks


class Last(nn.Module):
    """Reads the last block only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, blocks, x):
        return self.linear(x[: blocks[-1].num_dst])


def test_number_of_sampling_calls_may_not_vary():
    graph = small_graph()
    case = Case(Last(), graph=graph, sampler=HopSampler(graph, 1))
    case.trace()
    case.sampler.hops = 2
    with pytest.raises(CaptureError, match=r"made 6 sets of data-dependent size; 3 were captured.*may not vary"):
        case.exact(case.seeds(), 0)


class CountingSampler(NeighborSampler):
    def sample(self, graph, seeds):
        self.calls = getattr(self, "calls", 0) + 1
        return super().sample(graph, seeds)


def test_sampler_with_state():
    graph = small_graph()
    with pytest.raises(CaptureError, match=r"changes sampler\.calls"):
        Case(Last(), graph=graph, sampler=CountingSampler(graph, [2])).trace()


class Pooled(Last):
    def forward(self, blocks, x):
        return self.linear(x).mean(0)


class AllSources(Last):
    def forward(self, blocks, x):
        return self.linear(x)


@pytest.mark.parametrize("model", [Pooled, AllSources])
def test_wrong_number_of_rows(model):
    with pytest.raises(
        CaptureError, match=r"forward must return one row per seed; got shape .* Does the model use all"
    ):
        Case(model(), kind="logits").trace()
