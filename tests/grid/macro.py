"""A cell trained over macro-batches, beside plain PyTorch over the same ones."""

import random
from unittest import mock

import torch
import torch.nn.functional as F
from fuzz.staged_plain import Noted, Taken, graph_of

import joestar
from joestar.staged.planning import Planner
from joestar.stages import LargeBatch
from joestar.stages.plan import Plan, Speeds

from .cells import Cell
from .train import BATCH, EPS, NODES, SEEDS, Trained, differences, kept_of, make_net, make_optimizer, train_plain

STEPS = 2
"""Of a macro-batch: the three of a cell come from two."""


def drawn_plan(cell: Cell, graph: joestar.Graph) -> Plan:
    """Hot nodes as drawn, none or all among them; room for everything."""
    rng = random.Random(str(cell))
    hot = torch.tensor(sorted(rng.sample(range(NODES), rng.choice((0, 20, 90, NODES)))), dtype=graph.indices.dtype)
    return Plan(1 << 30, False, STEPS * BATCH, 2, len(hot), NODES, graph.num_edges, hot_ids=hot, batch=BATCH)


def train_macro(cell: Cell, graph: joestar.Graph, net, execution: str) -> tuple[Trained, list[joestar.Graph]]:
    """Three steps over macro-batches, and the graph that each of them was drawn from."""
    plan = drawn_plan(cell, graph)
    optimizer = make_optimizer(cell, net.parameters(), EPS)
    with (
        mock.patch.object(Planner, "plan", return_value=plan),
        mock.patch.object(Planner, "_measured", return_value=Speeds()),
    ):
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, list(cell.fanouts), seed=3), F.cross_entropy, optimizer,
            execution=execution, backend="eager", memory="1GiB", batch_size=BATCH,
        )  # fmt: skip
    step.first_stage = LargeBatch(STEPS * BATCH)
    noted = Noted(step.first_stage)
    losses = [loss.detach().clone() for loss in step.epoch(SEEDS, BATCH, shuffle=False)]
    assert step.traffic.macro_batches == 2
    taken = (Taken(loss, seeds, 0, at) for at, (loss, seeds) in enumerate(zip(losses, SEEDS.split(BATCH), strict=True)))
    graphs = [graph_of(graph, *noted.of(one, BATCH)) for one in taken]
    return kept_of(torch.stack(losses), net, optimizer), graphs


def check_macro(cell: Cell, graph: joestar.Graph, tolerance: float = 1e-9) -> list[str]:
    """What differs from plain PyTorch; padded or exact execution in turns."""
    net = make_net(cell)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    execution = ("padded", "exact")[sum(map(ord, str(cell))) % 2]
    got, graphs = train_macro(cell, graph, net, execution)
    net.load_state_dict(start)
    found = differences(got, train_plain(cell, graph, net, graphs=graphs), tolerance)
    return [f"macro-batches, {execution}: {what}" for what in found]
