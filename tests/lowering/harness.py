"""Runs one training program three ways - plainly, exactly, padded - and compares loss, gradients and buffers."""

import copy
import re
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from joestar import fn
from joestar.errors import PaddingError
from joestar.graph_api import Graph
from joestar.lowering.padding import pad
from joestar.profile.sizes import measure, step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program
from joestar.runtime.seeds import filled
from joestar.sampling import NeighborSampler

NUM_NODES, NUM_FEATURES, NUM_CLASSES, WIDTH = 48, 6, 4, 8
SEEDS = (9, 3, 22, 1, 40, 2, 17)
BATCHES = (SEEDS, SEEDS[:3])


OLDER = torch.__version__ < "2.13"
NEWER = pytest.mark.skipif(OLDER, reason="older versions of PyTorch cannot trace it")


def small_graph(labels: Tensor | None = None, isolated: int = 0) -> Graph:
    """48 nodes, 170 edges with duplicates and self-loops; the last ``isolated`` nodes have no edges."""
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
        f: takes and returns rows ``[num_src, WIDTH]`` of the only block.
        parts: modules, parameters and tensors (buffers) that ``f`` finds as attributes of ``self``.
    """

    def __init__(self, f, out: int = NUM_CLASSES, **parts):
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.last = nn.Linear(WIDTH, out)
        self.f = f
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part.clone())
            else:
                setattr(self, name, copy.deepcopy(part))

    def forward(self, blocks, x):
        (block,) = blocks
        h = self.f(self, block, self.first(x))
        return self.last(block.pull(fn.copy_u(h), "mean") + h[: block.num_dst])


class Heads(nn.Module):
    """One ``Rows`` per operation, side by side: a wrong operation shows in the gradients of its own head alone."""

    def __init__(self, operations: dict, out: int = 2, **parts):
        super().__init__()
        self.names = list(operations)
        self.heads = nn.ModuleList(Rows(f, out, **parts) for f in operations.values())

    def forward(self, blocks, x):
        return torch.cat([head(blocks, x) for head in self.heads], dim=1)


def curved(z: Tensor, y: Tensor) -> Tensor:
    """A loss that adds up over columns: heads do not see each other."""
    return (z * torch.cos(z)).mean()


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
        plain: also compare with the user's own eager code (off where dropout masks differ).
        factor, extra: padded sizes are ``factor * size + extra``;
        tight: compile for every batch, even if it fits into the bounds of an earlier one.
    """

    model: nn.Module
    loss: object = F.cross_entropy
    graph: Graph = field(default_factory=small_graph)
    fanouts: tuple[int, ...] = (3,)
    sampler: object = None
    plain: bool = True
    factor: float = 1.5
    extra: int = 37
    tight: bool = False
    disable: tuple[str, ...] = ()
    tolerance: float = 1e-10
    kind: str = "train"
    backend: str = "eager"

    def __post_init__(self):
        self.model = seeded(self.model.double())
        if self.sampler is None:
            self.sampler = NeighborSampler(self.graph, list(self.fanouts))
        loss = self.loss if self.kind == "train" else None
        self.program = Program(self.kind, self.model, self.sampler, loss, Options(self.backend, self.disable))
        self.start = {name: value.clone() for name, value in self.model.named_buffers()}

    def key(self, step: int) -> Tensor:
        """Key of a step."""
        return step_key(0, 0, step, "cpu")

    def seeds(self, batch=SEEDS) -> Tensor:
        """A batch in the graph's id dtype."""
        return torch.tensor(batch, dtype=self.graph.indices.dtype)

    def trace(self) -> fx.GraphModule:
        """The captured and optimised graph."""
        self.program.trace(self.seeds(), self.key(0))
        return self.program.captured.gm

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

    def bounds(self, seeds: Tensor, step: int) -> tuple[list[int], list[int]]:
        """(true sizes, generous bounds)."""
        sizes, _ = measure(self.sampler, self.graph, seeds, self.key(step))
        return sizes, [int(self.factor * size) + self.extra for size in sizes]

    def padded(self, seeds: Tensor, step: int) -> Outcome:
        """The padded graph, with bounds well above the true sizes."""
        self.program.trace(seeds, self.key(step))
        sizes, bounds = self.bounds(seeds, step)
        fits = all(size <= bound for size, bound in zip(sizes, self.program.bounds, strict=False))
        if not self.program.bounds or not fits or len(seeds) > self.program.batch or self.tight:
            self.program.compile(bounds, int(self.factor * len(seeds)) + self.extra)
        count = torch.full((), len(seeds), dtype=torch.int64)
        flag = torch.zeros((), dtype=torch.bool)
        (loss,), counts, ok = self.program.step(filled(seeds, self.program.batch), count, self.key(step), flag)
        assert bool(ok)
        assert counts.tolist() == [sizes[index] for index, _ in self.program.padded.checked]
        return self._outcome(loss)

    def _outcome(self, loss: Tensor) -> Outcome:
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), grads, strict=True)]
        buffers = {name: value.detach().clone() for name, value in self.model.named_buffers()}
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(self.start[name])
        return Outcome(loss.detach(), dict(zip(trained, zeros, strict=True)), buffers)


def seeded(model: nn.Module, seed: int = 3) -> nn.Module:
    """Every parameter gets a random value (biases start at 0, where errors would hide)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device)
            parameter.copy_(drawn * 0.6)
    return model


def same(got: Outcome, expected: Outcome, tolerance: float, names: list[str] = ()) -> None:
    """Asserts equal loss, gradients and buffers, all finite; lists every tensor that differs.

    Args:
        names: of the heads, if the model is a ``Heads``.
    """
    wrong = []
    pairs = {"loss": (got.loss, expected.loss)}
    pairs |= {f"gradient of {n}": (got.grads[n], v) for n, v in expected.grads.items()}
    pairs |= {f"buffer {n}": (got.buffers[n], v) for n, v in expected.buffers.items()}
    for name, (value, reference) in pairs.items():
        assert torch.isfinite(reference).all(), f"the reference itself is not finite: {readable(name, names)}"
        if not torch.allclose(value, reference, rtol=tolerance, atol=tolerance):
            difference = (value - reference).abs().max().item()
            wrong.append(f"{readable(name, names)}: off by {difference:.3g}")
    assert not wrong, "\n".join(wrong)


def readable(name: str, names: list[str]) -> str:
    """``heads.3.first.weight`` with the name of the operation."""
    for position, operation in enumerate(names):
        name = name.replace(f"heads.{position}.", f"[{operation}] ")
    return name


def check(model: nn.Module, batches=BATCHES, **options) -> Case:
    """Runs the model on every batch in all ways and compares; returns the case for further looks."""
    case = Case(model, **options)
    names = getattr(case.model, "names", ())
    for step, batch in enumerate(batches):
        seeds = case.seeds(batch)
        expected = case.eager(seeds, step) if case.plain else None
        exact = case.exact(seeds, step)
        if case.plain:
            same(exact, expected, case.tolerance, names)
        same(case.padded(seeds, step), exact, case.tolerance, names)
    return case


def check_rows(operations: dict, plain: bool = True, **parts) -> Case:
    """``check`` of many operations on source rows at once, each in a head of its own."""
    return check(Heads(operations, **parts), loss=curved, plain=plain)


def refused_alone(operations: dict, sampler=None, **parts) -> dict[str, str]:
    """What ``pad`` says to every operation on its own; all of them are captured at once.

    Returns:
        Messages by name; an operation that was not refused is missing.
    """
    case = Case(Heads(operations, **parts), kind="logits", disable=("cse",), sampler=sampler)
    gm = case.trace()
    roles = case.program.captured.roles
    _, bounds = case.bounds(case.seeds(), 0)
    (output,) = gm.graph.find_nodes(op="output")
    heads = [head.name for head in output.args[0][0].args[0]]
    messages = {}
    for name, head in zip(operations, heads, strict=True):
        alone = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        (output,) = alone.graph.find_nodes(op="output")
        output.args = ((next(node for node in alone.graph.nodes if node.name == head),),)
        alone.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        try:
            pad(alone, roles, bounds, 60)
        except PaddingError as error:
            messages[name] = str(error)
    return messages


def assert_refused(expected: dict[str, tuple], file: str, **parts) -> None:
    """Asserts that every operation is refused, with its words, the file and the code of its line.

    Args:
        expected: name -> (operation, words of the message).
    """
    messages = refused_alone({name: operation for name, (operation, _) in expected.items()}, **parts)
    for name, (_, words) in expected.items():
        assert name in messages, f"{name} was not refused"
        assert words in messages[name], f"{name}: {messages[name]}"
        assert file in messages[name], f"{name} does not name the line: {messages[name]}"


def raises(error, words: str):
    """``pytest.raises`` with literal words."""
    return pytest.raises(error, match=re.escape(words))
