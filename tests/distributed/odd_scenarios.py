"""Ranks with models, losses and scripts that are unlike most others."""


import torch
import torch.nn.functional as F
from captures import cheaper, cheapest, silent
from torch import nn

import joestar
from tests.distributed.scenarios import SEED, graph_of, ids, state_of
from tests.runtime.common import CLASSES, FEATURES

BATCH = 10
"""Seeds of a step, of all ranks together."""


def odd(*names: str) -> dict:
    """Several scenarios in the same processes, one after the other."""
    joestar.distributed.init(timeout=20.0, device="cpu")
    with cheaper(cheapest), silent():
        return {name: globals()[name]() for name in names}


def error_of(work) -> str:
    """What it raises, of Joestar's."""
    try:
        work()
    except joestar.errors.JoestarError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Net(nn.Module):
    """One layer over all neighbours, in float64, and what is made of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.out = joestar.nn.SAGEConv(FEATURES, 6), nn.Linear(6, CLASSES)
        self.double()

    def forward(self, blocks, x):
        """Scores."""
        return self.out(self.conv(blocks[0], x).relu())


def compiled(model, graph=None, loss=F.cross_entropy, optimizer=torch.optim.SGD, **options):
    """A step that samples nothing, with a learning rate of 0.1."""
    graph = graph_of() if graph is None else graph
    optimizer = None if loss is None else optimizer(model.parameters(), lr=0.1)
    return joestar.compile(
        model, joestar.NeighborSampler(graph, [-1], seed=SEED), loss, optimizer, backend="eager", **options
    )


def trained(step, number: int = 40, epochs: int = 1) -> dict:
    """Losses and weights behind epochs in the order of nodes."""
    batch = BATCH // joestar.distributed.world_size()
    losses = [
        loss.item() for _ in range(epochs) for loss in step.epoch(ids(number), batch, shuffle=False, drop_last=True)
    ]
    return {"losses": losses, "state": state_of(step)}


# --- parameters ---


def layouts() -> dict:
    """Parameters that do not lie row by row, under every optimizer with steps of one launch, and sums of gradients."""
    found = {}
    given = {"transposed": lambda w: w.t().contiguous().t(), "reversed": lambda w: _reversed(w), "rows": lambda w: w}
    for name, laid in given.items():
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            for accumulate in (1, 2):
                model = Net()
                model.out.weight = nn.Parameter(laid(model.out.weight.detach()))
                step = compiled(model, optimizer=optimizer, accumulate=accumulate)
                found[f"{name}, {optimizer.__name__}, {accumulate}"] = trained(step)
    return found


def _reversed(weight: torch.Tensor) -> torch.Tensor:
    """With three dimensions in another order, one of them of size 1."""
    return weight[None].permute(2, 0, 1).contiguous().permute(1, 2, 0)[0]


# --- losses ---


def _void_graph():
    """Seeds 10 to 19 are of class 1, 20 to 29 of 0 and 1 in turns."""
    graph = graph_of()
    graph.ndata["y"][10:20] = 1
    graph.ndata["y"][20:30] = torch.arange(10) % 2
    return graph


WEIGHT = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)


def _nothing_is_0(o, y):
    return F.cross_entropy(o, y, weight=WEIGHT, reduction="sum") / WEIGHT[y].sum().clamp(min=1e-9)


def void_losses() -> dict:
    """Batches whose seeds all weigh nothing, of losses that make 0 of them, and those that make NaN."""
    floats = _void_graph()
    y = floats.ndata["y"].double()[:, None].clone()
    y[10:20] = torch.nan
    floats.ndata["y"] = y

    def mse(o, y):
        known = ~torch.isnan(y)
        return (o[:, :1] - y)[known].square().sum() / known.sum()  # NaN without any

    losses = {
        "0": (_nothing_is_0, _void_graph()),
        "NaN": (nn.CrossEntropyLoss(WEIGHT), _void_graph()),
        "labels, NaN": (mse, floats),
    }
    return {name: trained(compiled(Net(), graph, loss)) for name, (loss, graph) in losses.items()}
