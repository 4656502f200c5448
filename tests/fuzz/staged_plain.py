"""Steps over macro-batches beside a plain PyTorch loop over the same mini-batches, whole runs long.

For every step the macro-batch that it was drawn from is made a graph of its own, by plain indexing: all nodes of the
whole graph under their own numbers, of its edges those that the macro-batch holds. The sampler draws from that one.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from joestar.graph_api import Graph
from joestar.profile.sizes import step_key
from joestar.stages.macro import MacroBatch, Picked
from joestar.stages.union import FirstStageContext

from . import plain
from .subjects import Subject

TOLERANCE = 1e-5
"""Of a loss and of the state; sums of padded steps have another order."""


@dataclass
class Taken:
    """A step of a run: its loss, seeds, and key (epoch, position)."""

    loss: Tensor
    seeds: Tensor
    epoch: int
    position: int


class Noted:
    """Remembers what a first stage gave, macro-batches or picked edges: wraps its methods."""

    def __init__(self, stage=None):
        self.given: list[tuple[tuple[int, int, int], Tensor, MacroBatch | Picked]] = []
        if stage is not None:
            self._wrap(stage)

    @classmethod
    def joined(cls, several: list["Noted"]) -> "Noted":
        """What all of them gave."""
        found = cls()
        found.given = [given for noted in several for given in noted.given]
        return found

    def _wrap(self, stage) -> None:
        def noting(way):
            def noted(graph, sampler, seeds, key):
                macro = way(graph, sampler, seeds, key)
                if macro is not None:  # ``pick`` does not know every sampler
                    self.given.append((key, seeds.clone(), macro))
                return macro

            return noted

        stage.sample, stage.pick, stage.eids = noting(stage.sample), noting(stage.pick), True

    def of(self, step: Taken, batch: int) -> tuple[MacroBatch | Picked, tuple[int, int, int]]:
        """The macro-batch of a step, and its key: the smallest piece that holds its seeds; larger ones had no room."""
        index = 0 if step.epoch < 0 else self._index(step, batch)
        found = [
            (len(seeds), (macro, key)) for key, seeds, macro in self.given
            if key[1] == step.epoch and key[2] == index and any(torch.equal(s, step.seeds) for s in seeds.split(batch))
        ]  # fmt: skip
        return min(found, key=lambda pair: pair[0])[1]

    def _index(self, step: Taken, batch: int) -> int:
        """Which macro-batch of the epoch a step is of: before one is cut, it is made whole."""
        steps: dict[int, int] = {}
        for key, seeds, _ in self.given:
            if key[1] == step.epoch:
                steps[key[2]] = max(steps.get(key[2], 0), -(-len(seeds) // batch))
        ends = itertools.accumulate(steps[index] for index in range(len(steps)))
        return next(index for index, end in enumerate(ends) if step.position < end)


def graph_of(whole: Graph, macro: MacroBatch | Picked, key=(0, 0, 0), repeated: bool = False) -> Graph:
    """The whole graph's nodes with the edges of a macro-batch; draws by weight are those of its key, if ``repeated``:
    an edge draws by its position among those of its node."""
    kept = torch.zeros(whole.num_edges, dtype=torch.bool)
    kept[macro.eids] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    part = Graph.from_csc(before[whole.indptr], whole.indices[kept], dict(whole.ndata.items()))
    part.edata.update({name: value[kept] for name, value in whole.edata.items()})
    part.ids, part.whole_degrees = whole.ids, whole.indptr.diff()
    part._whole_sizes = whole.num_nodes, whole.num_edges
    if repeated:
        positions = [range(degree) for degree in whole.indptr.diff().tolist()]
        part.ranks = torch.tensor(list(itertools.chain(*positions)), dtype=torch.int32)[kept]
        part.first_key = torch.tensor(key)
    return part


def strays(subject: Subject, steps: list[Taken], graphs: list[Graph], keys: list[tuple[int, int, int]]) -> list[str]:
    """Steps whose mini-batch is another than what their sampler draws for the seeds from the whole graph, by races
    under the key of the macro-batch."""
    found = []
    for number, (step, graph, key) in enumerate(zip(steps, graphs, keys, strict=True)):
        part = graph.keyed(0, step.epoch, step.position)
        whole = subject.graph.with_context(FirstStageContext(key, races=True))
        whole.context.takes_parts = False
        here, there = (subject.sampler.sample(origin, step.seeds) for origin in (part, whole))
        same = all(
            torch.equal(getattr(a, name), getattr(b, name))
            for a, b in zip(here, there, strict=True) for name in ("indptr", "indices", "srcs", "dsts")
        )  # fmt: skip
        found += [] if same else [f"mini-batch of step {number} is another than from the whole graph"]
    return found


def replayed(subject: Subject, steps: list[Taken], graphs: list[Graph], optimizer) -> tuple[list[str], int, bool]:
    """Runs the steps in plain PyTorch: (what differs in their losses, how many were compared, whether all were).

    Args:
        subject: with a model as before the first step; graphs: that each step samples from.
    """
    found = []
    for number, (step, graph) in enumerate(zip(steps, graphs, strict=True)):
        optimizer.zero_grad()
        mine = replace(subject, graph=graph)
        try:
            wanted = plain.forward(mine, step.seeds, step_key(0, step.epoch, step.position, "cpu"))
        except (plain.AmbiguousError, RuntimeError, ValueError):  # a batch norm of one row
            return found, number, False
        wanted.backward()
        optimizer.step()
        loss, value = float(step.loss), float(wanted.detach())
        near = loss == value or abs(loss - value) <= TOLERANCE * max(1.0, abs(value))
        if not near and loss == loss and value == value:
            found.append(f"loss of step {number} beside a plain loop: {loss!r} for {value!r}")
    return found, len(steps), True
