"""Random programs over macro-batches on several ranks, beside the same ranks with the whole graph each.

Every rank runs ``staged.check``: both of its runs are of all ranks together, which ``tests/distributed`` compares with
one process. Plans have room for any step, so that no rank is alone with an error; some macro-batches are cut on one
rank and not on another.
"""

import os
from dataclasses import replace
from unittest import mock

import torch

import joestar
from joestar.runtime.seeds import shuffled
from joestar.stages.plan import Plan

from . import staged

TOLERANCE = {"exact": 1e-12, "padded": 1e-9}
"""Bounds are chosen from seeds of all ranks, or from those of a rank's first macro-batch: sums have another order."""
EPOCHS = 12
"""More than there are in a case, epochs within epochs counted."""


class OnRanks(staged.Drawn):
    """A case whose steps leave every rank two seeds: statistics of one row are errors of one rank."""

    def __init__(self, number: int, graph, classified: bool):
        super().__init__(number, graph, classified)
        world = joestar.distributed.world_size()
        self.batch = max(4, self.batch)
        whole = self.batch * world * self.rng.randint(2, 4) + self.rng.choice((0, 2 * world, 3 * world))
        self.order = [self.rng.randrange(graph.num_nodes) for _ in range(whole)]

    def crowd(self, graph, hops: int) -> None:
        """Room that is just enough for every step by itself, on any rank, or more."""
        stage, whole = staged.Everything(1, hops), joestar.NeighborSampler(graph, [-1])
        macros = [stage.sample(graph, whole, seeds, (0, 0, 0)) for seeds in self._steps(graph)]
        for name, size in (("cold", self._cold), ("edges", lambda macro: macro.num_edges)):
            least = max(map(size, macros))
            setattr(self, name, max(1, self.rng.choice((least, least, least + 3, getattr(self, name)))))

    def plan(self, dtype: torch.dtype) -> Plan:
        """As drawn, for predictions in whole batches: models that mix the rows of a batch see no pieces."""
        return replace(super().plan(dtype), batch=self.batch + 1)

    def _steps(self, graph) -> list[torch.Tensor]:
        """Seeds of all steps that there may be: of epochs, and of what happens in between."""
        ids, world = torch.tensor(self.order, dtype=graph.indices.dtype), joestar.distributed.world_size()
        some, backwards = ids[: self.batch], ids.flip(0).split(self.batch + 1)
        found = [some, *backwards]
        for epoch in range(EPOCHS if self.shuffle else 1):
            order = shuffled(ids, 0, epoch) if self.shuffle else ids
            found += [part[rank::world] for part in order.split(self.batch * world) for rank in range(world)]
        return found


def checked(cases: list[int]) -> dict:
    """What differs in these cases on this rank, and the tally."""
    joestar.distributed.init(timeout=30.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    tally, wrong = staged.Tally(), []
    here = {"Drawn": OnRanks, "SAMPLED": 0.0, "TOLERANCE": TOLERANCE, "plain_differences": lambda *given: []}
    with mock.patch.multiple(staged, **here):
        for case in cases:
            found = staged.check(case, tally)
            wrong += [f"{staged.written_of(case).source}\n" + "\n".join(found)] if found else []
    return {"wrong": wrong, "tally": vars(tally)}
