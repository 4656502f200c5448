"""Steps over partitions, and the same in plain PyTorch."""

import torch
import torch.nn.functional as F

import joestar
from tests.runtime.part_plain import Plain

BATCH, GROUP = 7, 2
NODES, EDGES, PARTS = 90, 320, 6


def drawn_graph():
    """At random; the last nodes have no in-edges, and a training node is there three times."""
    torch.manual_seed(0)
    edges = torch.stack([torch.randint(0, NODES, (EDGES,)), torch.randint(0, NODES - 5, (EDGES,))])
    made = joestar.Graph.from_edge_index(edges, NODES)  # the last nodes have no in-edges
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, 6, dtype=torch.float64), torch.randint(0, 4, (NODES,))
    made.train_idx = torch.cat([torch.randperm(NODES)[:48], torch.tensor([3, 3])])
    return made


def model_of(kind="GraphSAGE", layers=3, **options):
    torch.manual_seed(1)
    return getattr(joestar.nn, kind)(6, 4, layers, 4, **options).double()


def compiled(graph, stage, model=None, fanouts=(-1, -1, -1), **options):
    model = model_of() if model is None else model
    sampler = joestar.NeighborSampler(graph, list(fanouts), seed=3)
    given = {"backend": "eager", "warm_up": 3, "memory": "64MiB", "batch_size": BATCH} | options
    return joestar.compile(
        model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.2), first_stage=stage, **given
    )


def stage_of(parts, **options):
    return joestar.Partitions(parts, GROUP, **options)


def replayed(graph, parts, model, taken, accumulate=1, group=GROUP, **options):
    """Losses of plain PyTorch for the steps ``taken``: per epoch the seeds of every step."""
    plain = Plain(graph, parts.assignment, model, torch.optim.SGD(model.parameters(), 0.2), F.cross_entropy, **options)
    stage, losses = joestar.Partitions(parts, group).prepare(graph, graph.train_idx.unique()), []
    for epoch, steps in enumerate(taken):
        groups, current = stage.groups(3, epoch), None
        for position, seeds in enumerate(steps):
            at = next(i for i, g in enumerate(groups) if plain.part[seeds[0]] in g.tolist())
            assert {plain.part[v] for v in seeds} <= set(groups[at].tolist()), "no step crosses two macro-batches"
            if at != current:
                plain.macro_batch(groups[at].tolist(), current is None)
                current = at
            inside = position % accumulate
            size = min(accumulate, len(steps) - position + inside)
            losses.append(plain.step(seeds, inside == 0, size, inside == size - 1))
    return losses, plain


def run(step, graph, epochs, losses, taken, batch=BATCH):
    for _ in range(epochs):
        epoch = step.epoch(graph.train_idx, batch, with_seeds=True)
        taken.append([])
        for loss, seeds in epoch:
            losses.append(loss.item())
            taken[-1].append(seeds.tolist())
