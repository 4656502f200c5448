"""The same few steps in plain Python, exactly and padded, each in a world of its own: graph, sampler, model."""

import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import WIDTH, Rows, seeded, small_graph
from torch import Tensor, nn

from joestar.errors import CaptureError
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program
from joestar.runtime.seeds import filled
from joestar.sampling import NeighborSampler

BATCHES = ((9, 3, 22, 1, 40, 2, 17), (9, 3, 22), (5, 6, 7, 9))
ROOM = 20
"""Padded seeds; sets get a bound of at least 97."""


class Drawn:
    """A sampler whose hop is a function ``draw(self, graph, seeds) -> blocks``."""

    def __init__(self, graph, draw):
        self.graph, self.draw = graph, draw
        self.weight = torch.linspace(0.1, 1, graph.num_edges)

    def sample(self, graph, seeds):
        return self.draw(self, graph, seeds)


@dataclass
class World:
    """What a program consists of; every tensor in it may be written."""

    graph: object
    model: nn.Module
    sampler: object
    loss: object

    @classmethod
    def of(cls, operation=None, draw=None, loss=F.cross_entropy) -> "World":
        """A program that is harmless but for an operation on rows (``lowering.harness.Rows``), a sampler or a loss."""
        graph = small_graph()
        generator = torch.Generator().manual_seed(2)
        graph.edata["w"] = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
        graph.ndata["h"] = torch.randn(graph.num_nodes, WIDTH, generator=generator, dtype=torch.float64)
        average, table = torch.linspace(0.5, 1.5, WIDTH), torch.zeros(graph.num_nodes, WIDTH)
        parts = {"average": average, "table": table, "norm": nn.BatchNorm1d(WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
        model = seeded(Rows(operation or (lambda m, b, h: h), **parts).double())
        return cls(graph, model, Drawn(graph, draw) if draw else NeighborSampler(graph, [3]), loss)

    def program(self) -> Program:
        """The program, not yet traced."""
        return Program("train", self.model, self.sampler, self.loss, Options("eager"))

    def trace(self) -> Program:
        """The traced program."""
        program = self.program()
        program.trace(torch.tensor(BATCHES[0], dtype=torch.int32), step_key(0, 0, 0, "cpu"))
        return program

    def steps(self, how: str) -> list[Tensor]:
        """Losses and gradients of every step, and the state of everything at the end."""
        program, left = self.program(), []
        parameters = list(self.model.train().parameters())
        for step, batch in enumerate(BATCHES):
            seeds, key = torch.tensor(batch, dtype=torch.int32), step_key(0, 0, step, "cpu")
            loss = getattr(self, f"_{how}")(program, seeds, key)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            left += [loss.detach().clone(), seeds]
            left += [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        tensors = [*self.model.state_dict().values(), *self.graph.ndata.values(), *self.graph.edata.values()]
        return left + [tensor.detach().clone() for tensor in (*tensors, self.graph.indptr, self.graph.indices)]

    def _plain(self, program: Program, seeds: Tensor, key: Tensor) -> Tensor:
        blocks = self.sampler.sample(self.graph.keyed(*key.tolist()), seeds)
        logits = self.model(blocks, torch.index_select(self.graph.ndata["x"], 0, blocks[0].srcs))
        return self.loss(logits, torch.index_select(self.graph.ndata["y"], 0, seeds))

    def _exact(self, program: Program, seeds: Tensor, key: Tensor) -> Tensor:
        return program.exact(seeds, key)[0][0]

    def _padded(self, program: Program, seeds: Tensor, key: Tensor) -> Tensor:
        program.trace(seeds, key)
        if program.run is None:
            program.compile([97 + 16 * place for place in range(len(program.captured.labels))], ROOM)
        flag = torch.zeros((), dtype=torch.bool)
        (loss,), _, ok = program.step(filled(seeds, ROOM), torch.tensor(len(seeds)), key, flag)
        assert bool(ok)
        return loss


def worlds_apart(executions=("exact", "padded"), **parts) -> dict[str, list[int]]:
    """For every execution, positions of what differs from plain Python; ``parts`` as for ``World.of``."""
    expected = World.of(**parts).steps("plain")
    found = {}
    for how in executions:
        pairs = zip(World.of(**parts).steps(how), expected, strict=True)
        found[how] = [i for i, (a, b) in enumerate(pairs) if not torch.allclose(a, b, rtol=1e-9, atol=1e-11)]
    return found


def refused(operation, *words, function=None, **parts):
    """Asserts that a program is refused with these words, a remedy, and the line of ``function``."""
    function = function or operation
    with pytest.raises(CaptureError) as caught:
        World.of(operation, **parts).trace()
    message = str(caught.value)
    for word in (
        *words,
        "Write instead:",
        f"{os.path.basename(function.__code__.co_filename)}:",
        f" in {function.__name__}",
    ):
        assert word in message, message
