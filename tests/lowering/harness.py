"""Runs one training program three ways - plainly, exactly, padded - and compares loss, gradients and buffers."""

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from joestar.graph_api import Graph
from joestar.profile.sizes import measure, step_key
from joestar.runtime.program import Options, Program
from joestar.runtime.training import filled
from joestar.sampling import NeighborSampler

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 48, 6, 4
SEEDS = [9, 3, 22, 1, 40, 2, 17]


def small_graph(labels: Tensor | None = None, isolated: int = 0) -> Graph:
    """48 nodes, about 170 edges with duplicates and self-loops; the last ``isolated`` nodes have no edges."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(0, NUM_NODES - isolated, (2, 170), generator=generator)
    x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator) if labels is None else labels
    return Graph.from_edge_index(edges, NUM_NODES, ndata={"x": x, "y": y})


def targets(*shape: int, seed: int = 1) -> Tensor:
    """Floating-point labels ``[NUM_NODES, *shape]`` in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(NUM_NODES, *shape, generator=generator, dtype=torch.float64)


class Rows(nn.Module):
    """``Linear, f, mean aggregation, Linear``: ``f(self, block, h)`` is the operation under test, on source rows.

    Args:
        f: takes and returns rows ``[num_src, width]`` of the only block.
        parts: modules and tensors (buffers) that ``f`` finds as attributes of ``self``.
    """

    def __init__(self, f, width: int = 8, out_width: int | None = None, **parts):
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, width)
        self.last = nn.Linear(width if out_width is None else out_width, NUM_CLASSES)
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.f = f

    def forward(self, blocks, x):
        from joestar import fn

        (block,) = blocks
        h = self.f(self, block, self.first(x))
        return self.last(block.pull(fn.copy_u(h), "mean") + h[: block.num_dst])


@dataclass
class Outcome:
    """What one execution leaves behind."""

    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass
class Case:
    """A model on a small graph, and how it is run.

    Attributes:
        bounds: the padded sizes as a function of the true ones.
        plain: also compare with the user's own eager code (off where dropout draws differ).
    """

    model: nn.Module
    loss: object = F.cross_entropy
    graph: Graph = field(default_factory=small_graph)
    fanouts: tuple[int, ...] = (3,)
    sampler: object = None
    plain: bool = True
    factor: float = 1.5
    extra: int = 37
    disable: tuple[str, ...] = ()
    tolerance: float = 1e-10

    def __post_init__(self):
        self.model = seeded(self.model.double())
        if self.sampler is None:
            self.sampler = NeighborSampler(self.graph, list(self.fanouts))
        self.program = Program("train", self.model, self.sampler, self.loss, Options("eager", self.disable))
        self.start = {name: value.clone() for name, value in self.model.named_buffers()}

    def key(self, step: int) -> Tensor:
        """Key of a step."""
        return step_key(0, 0, step, "cpu")

    def eager(self, seeds: Tensor, step: int) -> Outcome:
        """The user's program as written: nothing captured."""
        graph = self.sampler.graph.keyed(0, 0, step)
        blocks = self.sampler.sample(graph, seeds)
        logits = self.model.train()(blocks, self.graph.ndata["x"][blocks[0].srcs])
        value = self.loss(logits, self.graph.ndata["y"][seeds])
        return self._outcome(value if value.dim() == 0 else value.mean())

    def exact(self, seeds: Tensor, step: int) -> Outcome:
        """The captured graph with true sizes."""
        (loss,), _ = self.program.exact(seeds, self.key(step))
        return self._outcome(loss)

    def padded(self, seeds: Tensor, step: int) -> Outcome:
        """The padded graph, with bounds well above the true sizes."""
        self.program.trace(seeds, self.key(step))
        sizes, _ = measure(self.sampler, self.graph, seeds, self.key(step))
        bounds = [int(self.factor * size) + self.extra for size in sizes]
        self.program.compile(bounds, int(self.factor * len(seeds)) + self.extra)
        count = torch.full((), len(seeds), dtype=torch.int64)
        flag = torch.zeros((), dtype=torch.bool)
        (loss,), counts, ok = self.program.step(filled(seeds, self.program.batch), count, self.key(step), flag)
        assert bool(ok)
        assert counts.tolist() == [sizes[index] for index, _ in self.program.padded.checked]
        return self._outcome(loss)

    def _outcome(self, loss: Tensor) -> Outcome:
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(self.start[name])
        return Outcome(loss.detach(), dict(zip(names, zeros, strict=True)), buffers)


def seeded(model: nn.Module, seed: int = 3) -> nn.Module:
    """Every parameter gets a random value (biases start at 0, where errors would hide)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.6)
    return model


def same(one: Outcome, other: Outcome, tolerance: float, finite: bool = True) -> None:
    """Asserts equal loss, gradients and buffers."""
    assert_close(one.loss, other.loss, rtol=tolerance, atol=tolerance, msg=lambda m: f"loss: {m}")
    for group in ("grads", "buffers"):
        for name, value in getattr(other, group).items():
            got = getattr(one, group)[name]
            if finite:
                assert torch.isfinite(value).all(), f"{group} {name} of the reference is not finite"
            assert_close(got, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{group[:-1]} {n}: {m}")


def check(model: nn.Module, batches=(SEEDS, SEEDS[:3]), **options) -> Case:
    """Runs the model on every batch in all ways and compares; returns the case for further looks."""
    case = Case(model, **options)
    for step, batch in enumerate(batches):
        seeds = torch.tensor(batch, dtype=case.graph.indices.dtype)
        exact = case.exact(seeds, step)
        if case.plain:
            same(exact, case.eager(seeds, step), case.tolerance)
        same(case.padded(seeds, step), exact, case.tolerance)
    return case


def rows(f, width: int = 8, out_width: int | None = None, loss=F.cross_entropy, labels=None, **parts) -> Case:
    """``check`` of one operation on source rows: see ``Rows``."""
    graph = small_graph(labels)
    return check(Rows(f, width, out_width, **copy.deepcopy(parts)), loss=loss, graph=graph)
