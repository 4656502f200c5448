"""Training over partitions against plain PyTorch with dictionaries: graphs, models, stages and events at random."""

import copy
import random

import pytest
import torch

import joestar
from tests.runtime.partitioned import compiled, model_of, replayed

pytestmark = pytest.mark.usefixtures("cheapest_captures")


class Drawn:
    """A graph, a model, a stage and what happens in between, at random."""

    def __init__(self, number):
        rng = self.rng = random.Random(number)
        torch.manual_seed(number)
        nodes = rng.randint(30, 80)
        edges = torch.randint(0, nodes, (2, nodes * rng.randint(1, 4)))
        self.graph = joestar.Graph.from_edge_index(edges[:, edges[1] > 3], nodes)
        self.graph.ndata["x"] = torch.randn(nodes, 6, dtype=torch.float64)
        self.graph.ndata["y"] = torch.randint(0, 4, (nodes,))
        few = rng.random() < 0.5  # then layers have rows of few nodes
        self.graph.train_idx = torch.randint(0, nodes, (rng.randint(2, 8) if few else rng.randint(20, 50),))
        self.parts = joestar.partition(self.graph, rng.randint(2, 7), passes=1, seed=number)
        self.group, self.batch = rng.randint(1, self.parts.parts - 1), rng.randint(3, 9)
        self.layers = rng.randint(2, 3)
        self.kind = rng.choice(["GraphSAGE", "GAT", "GCN", "GIN"])
        self.norm = rng.choice((None, None, "batch_norm", "layer_norm"))
        self.hubs = torch.tensor(sorted(rng.sample(range(nodes), rng.choice((0, 0, 3)))), dtype=torch.int64)
        self.history = {"dtype": rng.choice((torch.float32, torch.bfloat16)), "max_age": rng.choice((None, None, 2))}
        self.stage = {"ahead": rng.choice((None, self.layers)), "hubs": self.hubs}
        self.accumulate = rng.choice((1, 1, 2))
        self.run = {"execution": rng.choice(("exact", "padded", "padded"))}
        self.run |= rng.choice(({}, {"slack": 0, "warm_up": 1}))

    def step(self, model):
        stage = joestar.Partitions(self.parts, self.group, **self.stage, **self.history)
        return compiled(
            self.graph, stage, model, [-1] * self.layers, accumulate=self.accumulate, batch_size=self.batch, **self.run
        )

    def trained(self, model):
        """Losses of every step, seeds of the steps of every epoch, and the step."""
        step, losses, taken = self.step(model), [], []
        for _ in range(3):
            epoch, seeds = step.epoch(self.graph.train_idx, self.batch, with_seeds=True), []
            while len(epoch):
                loss, some = next(epoch)
                losses.append(loss.item())
                seeds.append(some.tolist())
                event = self.rng.choice(("predict", "state", "resume", "", "", "", "", ""))
                if event == "predict":
                    step.predict(self.graph.train_idx[:5], 3)
                if event == "state":
                    step.state_dict()
                if event == "resume" and len(epoch):
                    state = copy.deepcopy(step.state_dict())
                    step = self.step(model)
                    step.load_state_dict(state)
                    epoch = step.epoch(self.graph.train_idx, self.batch, with_seeds=True)
            taken.append(seeds)
        return losses, taken, step


@pytest.mark.parametrize("number", [1, *(pytest.param(n, marks=pytest.mark.fuzz) for n in (0, *range(2, 24)))])
def test_any_training_is_that_of_plain_pytorch(number):
    drawn = Drawn(number)
    ours, theirs = (model_of(drawn.kind, drawn.layers, norm=drawn.norm) for _ in range(2))
    losses, taken, _ = drawn.trained(ours)
    history = {"hubs": drawn.hubs.tolist(), **drawn.history}
    try:
        expected, _ = replayed(drawn.graph, drawn.parts, theirs, taken, drawn.accumulate, drawn.group, **history)
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        return  # plain PyTorch has no batch norm of one row
    assert losses == pytest.approx(expected, rel=1e-6), vars(drawn)
    for name, value in ours.state_dict().items():
        assert torch.allclose(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-8), name
