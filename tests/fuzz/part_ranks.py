"""Random training over partitions on several ranks, beside plain PyTorch with dictionaries.

Graphs, models, partitions, groups, bounds of age and what happens between two steps are drawn; every rank replays the
steps of all of them.
"""

import copy
import os

import torch
from captures import cheaper, cheapest

import joestar
from tests.distributed.part_plain import Lanes
from tests.runtime.partitioned import model_of
from tests.runtime.test_partitioned_random import Drawn


class OnRanks(Drawn):
    """As drawn for one process, without what looks at a batch of all ranks, or is replayed step by step only."""

    def __init__(self, number):
        super().__init__(number)
        self.norm = None if self.norm == "batch_norm" else self.norm
        self.accumulate = 1

    def trained(self, model):
        """Losses of every step, the orders of the epochs, seeds of single steps in each, and the step."""
        step, losses, orders, between = self.step(model), [], [], []
        for _ in range(3):
            epoch, singles, position = step.epoch(self.graph.train_idx, self.batch), {}, 0
            while len(epoch):
                losses.append(next(epoch).item())
                position += 1
                event = self.rng.choice(("predict", "state", "resume", "step", "", "", "", "", ""))
                if event == "predict":
                    step.predict(self.graph.train_idx[:5], 3)
                if event == "state":
                    step.state_dict()
                if event == "step":
                    singles[position] = self.rng.sample(
                        range(self.graph.num_nodes), self.rng.randint(2, 2 * self.batch)
                    )
                    losses.append(step(torch.tensor(singles[position])).item())
                if event == "resume" and len(epoch):
                    state = copy.deepcopy(step.state_dict())
                    step = self.step(model)
                    step.load_state_dict(state)
                    epoch = step.epoch(self.graph.train_idx, self.batch)
            orders.append(epoch._in_parts())
            between.append(singles)
        return losses, orders, between, step


def checked(cases: list[int]) -> dict:
    """What differs in these cases on this rank; how many rows came from the history, and were pushed by others."""
    joestar.distributed.init(timeout=60.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    wrong, pulled, idle, single = [], 0, 0, 0
    with cheaper(cheapest):
        for number in cases:
            drawn = OnRanks(number)
            ours, theirs = (model_of(drawn.kind, drawn.layers, norm=drawn.norm) for _ in range(2))
            losses, orders, between, step = drawn.trained(ours)
            history = {"hubs": drawn.hubs.tolist(), **drawn.history}
            plain = Lanes(drawn.graph, drawn.parts.assignment, theirs, orders[0].ranks, **history)
            pairs = zip(orders, between, strict=True)
            expected = [loss for order, singles in pairs for loss in plain.epoch(order, between=singles)]
            wrong += [f"case {number}, {vars(drawn)}: {what}" for what in _off(losses, expected, ours, theirs)]
            taken = sorted(v for order in orders for v in order.seeds[order.seeds >= 0].tolist())
            if taken != sorted(3 * drawn.graph.train_idx.tolist()):
                wrong.append(f"case {number}: seeds of three epochs are not the training nodes three times")
            pulled += sum(row.pulled - row.missing - row.too_old for row in step.report().feeding.history)
            single += sum(map(len, between))
            idle += sum(bool((order.seeds.view(-1, order.batch, order.ranks)[:, 0] < 0).any()) for order in orders)
            torch._dynamo.reset()
    return {"wrong": wrong, "pulled": pulled, "idle": idle, "single": single}


def _off(losses, expected, ours, theirs) -> list[str]:
    pairs = [("losses", torch.tensor(losses), torch.tensor(expected))]
    pairs += [(name, value, theirs.state_dict()[name]) for name, value in ours.state_dict().items()]
    return [
        f"{name} differ" for name, a, b in pairs if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    ]
