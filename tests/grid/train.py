"""Three steps of a cell in every execution and in plain PyTorch, and what differs."""

import contextlib
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import joestar
from joestar.profile.sizes import step_key
from joestar.runtime.program import Program

from .cells import Cell
from .model import Net, plain_forward

NODES, FEATURES, CLASSES, BATCH = 150, 24, 14, 20
SEEDS = torch.randperm(NODES, generator=torch.Generator().manual_seed(4))[: 2 * BATCH + 13]  # three batches


@dataclass
class Trained:
    """What three steps leave: losses, parameters and buffers, the optimizer's state per parameter."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    moments: list[dict[str, Tensor]]


def make_graph(dtype=torch.float64) -> joestar.Graph:
    """A hub, isolated nodes, self-loops and duplicate edges; classes follow from the features."""
    random = torch.Generator().manual_seed(1)
    edges = torch.randint(0, NODES - 9, (2, 4 * NODES), generator=random)
    hub = torch.stack([torch.arange(0, 60), torch.full((60,), 7)])
    loops = torch.arange(0, NODES - 9, 11).expand(2, -1)
    edges = torch.cat([edges, hub, loops, edges[:, :30]], 1)
    x = torch.randn(NODES, FEATURES, generator=random, dtype=torch.float64)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=random, dtype=torch.float64)).argmax(1)
    return joestar.Graph.from_edge_index(edges, NODES, {"x": x.to(dtype), "y": y})


def make_net(cell: Cell, dtype=torch.float64) -> Net:
    """The model, every parameter and buffer at random (what starts at 0 or 1 hides errors)."""
    net, random = Net(cell, FEATURES, CLASSES), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(noise * spread + (1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0))
    return net.to(dtype)


EPS = 1e-4
"""Of Adam: what is nothing but rounding (gradients in front of a norm over one column) must not become a step."""


def make_optimizer(cell: Cell, parameters, eps: float):
    """Settings under which every part of the update counts."""
    if cell.optimizer == "sgd":
        return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-2)
    kind = torch.optim.Adam if cell.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, 1e-2, weight_decay=1e-2, eps=eps)


def train_compiled(cell: Cell, graph: joestar.Graph, net: nn.Module, eps: float = EPS, **options) -> Trained:
    """Three steps of a compiled step."""
    sampler = joestar.NeighborSampler(graph, list(cell.fanouts), seed=3)
    optimizer = make_optimizer(cell, net.parameters(), eps)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, **options)
    losses = [loss.detach().clone() for loss in step.epoch(SEEDS.to(graph.device), BATCH, shuffle=False)]
    assert step.counters.steps == 3
    return kept_of(torch.stack(losses), net, optimizer)


def train_plain(
    cell: Cell, graph: joestar.Graph, net: nn.Module, eps: float = EPS, graphs: list[joestar.Graph] | None = None
) -> Trained:
    """Three steps of a loop in plain PyTorch over the same sampled blocks, in float64.

    Args:
        graphs: that each step samples from, in place of ``graph``.
    """
    sampler = joestar.NeighborSampler(graph, list(cell.fanouts), seed=3)
    net = copy.deepcopy(net).to("cpu", torch.float64)
    optimizer = make_optimizer(cell, net.parameters(), eps)
    x, y, losses = graph.ndata["x"].double(), graph.ndata["y"], []
    for number, seeds in enumerate(SEEDS.split(BATCH)):
        part = graph if graphs is None else graphs[number]
        blocks = sampler.sample(part.keyed(3, 0, number), seeds.to(graph.indices.dtype))
        logits = plain_forward(net, blocks, x[blocks[0].srcs.long()], step_key(3, 0, number, "cpu"))
        loss = F.cross_entropy(logits, y[seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return kept_of(torch.stack(losses), net, optimizer)


def kept_of(losses: Tensor, net: nn.Module, optimizer) -> Trained:
    """What a loop has left."""

    def kept(values: dict) -> dict[str, Tensor]:
        return {k: v.detach().clone().cpu().double() for k, v in values.items() if isinstance(v, Tensor)}

    moments = [kept(optimizer.state[parameter]) for parameter in net.parameters()]
    return Trained(losses.cpu().double().tolist(), kept(net.state_dict()), moments)


def differences(got: Trained, expected: Trained, tolerance: float) -> list[str]:
    """Every loss, parameter, buffer and moment that is off by more than ``tolerance`` times its scale (1 at least)."""
    pairs = {f"loss {i}": (torch.tensor(a), torch.tensor(b))
             for i, (a, b) in enumerate(zip(got.losses, expected.losses, strict=True))}  # fmt: skip
    pairs |= {name: (got.state[name], value) for name, value in expected.state.items()}
    names = [name for name in expected.state if "running" not in name and "batches" not in name]
    for position, state in enumerate(expected.moments):
        for key, value in state.items():
            pairs[f"{key} of parameter {position} of {len(names)}"] = got.moments[position].get(key), value
    found = []
    for name, (value, reference) in pairs.items():
        if value is None or not bool(torch.isfinite(reference).all()):
            found.append(f"{name}: {'missing' if value is None else 'the reference is not finite'}")
            continue
        off, scale = float((value - reference).abs().max()), max(1.0, float(reference.abs().max()))
        if not off <= tolerance * scale:
            found.append(f"{name}: off by {off:.3g} at a scale of {scale:.3g}")
    return found


@contextlib.contextmanager
def captured_once():
    """Programs of one model share a capture: what they do with it is their own."""
    original, donors = Program.trace, {}

    def trace(self, seeds, key):
        donor = donors.get((id(self.model), self.kind))
        if self.captured is None and donor is not None:
            made = donor.variant(self.options, texts=False)
            vars(self).update({name: value for name, value in vars(made).items() if name not in ("phases", "loss")})
            return
        original(self, seeds, key)
        donors.setdefault((id(self.model), self.kind), self)

    Program.trace = trace
    try:
        yield
    finally:
        Program.trace = original


def check(
    cell: Cell, graph: joestar.Graph, tolerance: float = 1e-9, backend: str = "eager",
    executions: tuple[str, ...] = ("padded", "exact"),
) -> list[str]:  # fmt: skip
    """What differs from plain PyTorch in padded and in exact execution of a cell."""
    net, found = make_net(cell), []
    start = {name: value.clone() for name, value in net.state_dict().items()}
    expected = train_plain(cell, graph, net)
    with captured_once():
        for execution in executions:
            net.load_state_dict(start)
            got = train_compiled(cell, graph, net, execution=execution, backend=backend)
            found += [f"{execution}: {what}" for what in differences(got, expected, tolerance)]
    return found
