"""Cells trained on several ranks, beside one process in plain PyTorch over the same samples.

Features are a tensor, sharded over the ranks with hot rows drawn at random, or in host memory behind macro-batches that
hold every neighbour. Batch norms are those of all ranks.
"""

import os
import random
from unittest import mock

import torch
import torch.nn.functional as F
from captures import cheaper, quick
from fuzz.staged import Everything
from torch import nn

import joestar
from joestar.graph_api.row_source import source_of
from joestar.staged.planning import Planner
from joestar.stages.plan import Plan, Speeds

from .cells import Cell
from .train import BATCH, EPS, NODES, SEEDS, Trained, differences, kept_of, make_graph, make_net, make_optimizer
from .train import train_plain as plain

PLACES = ("tensor", "sharded", "hot", "ids", "memory")


def suits(cell: Cell) -> bool:
    """Whether several ranks are one process: nothing in it looks at a batch as a whole, except batch norms."""
    return cell.norm != "graph" and not (cell.model == "gcn" and cell.variant == 0)


def place_of(cell: Cell) -> str:
    """Where a cell's features are."""
    return random.Random(f"place {cell}").choice(PLACES)


def put(graph: joestar.Graph, place: str, rng: random.Random, own: random.Random) -> None:
    """Moves the features there: as many hot rows on every rank (``rng``), of which each chooses its ``own``."""
    x = graph.ndata["x"]
    if place == "sharded":
        graph.ndata["x"] = joestar.store.shard(x)
    elif place == "hot":
        row = x[0].numel() * x.element_size()
        graph.ndata["x"] = joestar.store.shard(x, hot=rng.choice((0, 1, 30, NODES)) * row + 4 * NODES)
    elif place == "ids":
        number = rng.choice((0, 1, 17, NODES))
        graph.ndata["x"] = joestar.store.shard(x, hot=torch.tensor(own.sample(range(NODES), number), dtype=torch.int64))


def train(cell: Cell, place: str, execution: str) -> Trained:
    """Three steps of this rank's share."""
    world, rank = joestar.distributed.world_size(), joestar.distributed.rank()
    rng, own = random.Random(f"{cell}"), random.Random(f"{cell} on {rank}")
    graph, batch = make_graph(), BATCH // world
    put(graph, place, rng, own)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make_net(cell))
    optimizer, given = make_optimizer(cell, net.parameters(), EPS), {}
    steps = rng.randint(1, 3)
    if place == "memory":
        given = {"memory": "1GiB", "batch_size": batch}
        hot = torch.tensor(sorted(own.sample(range(NODES), own.choice((0, 20, 90, NODES)))), dtype=graph.indices.dtype)
        plan = Plan(1 << 30, False, steps * batch, 2, len(hot), NODES, graph.num_edges, hot_ids=hot, batch=batch)
    else:
        plan = None
    with mock.patch.multiple(Planner, plan=lambda self: plan, _measured=lambda self: Speeds()):
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, list(cell.fanouts), seed=3), F.cross_entropy, optimizer,
            execution=execution, backend="eager", warm_up=3, **given,
        )  # fmt: skip
    if place == "memory":
        step.first_stage = Everything(steps * batch, len(cell.fanouts))
    losses = [loss.detach().clone() for loss in step.epoch(SEEDS, batch, shuffle=False)]
    assert step.counters.steps == 3
    return kept_of(torch.stack(losses), net, optimizer)


def checked(cells: list[tuple[Cell, str]], tolerance: float = 1e-9) -> list[str]:
    """What differs, on a rank of a job."""
    joestar.distributed.init(timeout=60.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    found = []
    with cheaper(quick):
        for cell, place in cells:
            execution = ("padded", "exact")[sum(map(ord, str(cell))) % 2]
            got = train(cell, place, execution)
            off = differences(got, plain(cell, make_graph(), make_net(cell)), tolerance)
            found += [f"{cell}, {place}, {execution}: {what}" for what in off]
            torch._dynamo.reset()
    return found


def rows_of_shards(cases: list[int]) -> list[str]:
    """Tables of any shape, dtype and place, with any hot rows: what is gathered is ``x[ids]``."""
    joestar.distributed.init(timeout=60.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    found, rank = [], joestar.distributed.rank()
    for case in cases:
        rng, own = random.Random(f"shard {case}"), random.Random(f"shard {case} on {rank}")
        rows = rng.choice((1, 2, 63, 64, 65, 129, rng.randint(1, 700)))
        shape = (rows, *rng.choice(((1,), (3,), (8,), (5, 2), (17,))))
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        place = rng.choice(("peers", "host", None))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(case)).to(dtype)
        stored = rng.choice((None, None, torch.float16)) if dtype == torch.float32 else None
        if place == "host" and dtype == torch.float64:
            place = None  # refused there
        number = rng.choice((0, 1, rows // 2, rows))
        hot = rng.choice((None, torch.tensor(own.sample(range(rows), number), dtype=torch.int64)))
        options = {} if stored is None else {"dtype": stored}
        graph = joestar.Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), rows)
        graph.ndata["x"] = joestar.store.shard(x, hot=hot, place=place, **options)
        source = source_of(graph.ndata, "x")
        ids = torch.tensor([own.randrange(rows) for _ in range(own.choice((0, 1, 40)))], dtype=torch.int64)
        ids = ids.to(rng.choice((torch.int32, torch.int64)))
        got, wanted = source.rows(ids).cpu(), x[ids.long()].to(stored or dtype)
        if got.dtype != wanted.dtype or got.shape != wanted.shape or not torch.equal(got, wanted):
            found.append(f"case {case}: {shape}, {dtype} as {stored}, {place}, hot={hot!r}")
    return found
