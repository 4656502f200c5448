"""A small labelled graph on which every class has neighbours of its own kind."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F

import joestar
from joestar.runtime import executor as executor_module

NODES, FEATURES, CLASSES = 1200, 12, 4


def planted_graph(seed: int = 0, nodes: int = NODES, degree: int = 9, dtype=torch.float32) -> joestar.Graph:
    """Labels are mostly shared along edges; node 0 is isolated, node 1 a hub with many in-neighbours."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (nodes,), generator=random)
    src = torch.randint(2, nodes, (nodes * degree,), generator=random)
    candidates = torch.randint(2, nodes, (nodes * degree, 8), generator=random)
    match = (labels[candidates] == labels[src][:, None]).float().argmax(1)
    dst = candidates[torch.arange(src.numel()), match]
    hub = torch.stack([torch.arange(2, 400), torch.ones(398, dtype=torch.int64)])
    edges = torch.cat([torch.stack([src, dst]), hub], 1)
    features = torch.randn(nodes, FEATURES, generator=random, dtype=dtype) + F.one_hot(labels, FEATURES)
    return joestar.Graph.from_edge_index(edges, nodes, {"x": features.to(dtype), "y": labels})


class Asking(torch.nn.Module):
    """Three times as much where ``ask()`` says yes; in float64."""

    def __init__(self, ask):
        super().__init__()
        self.conv, self.ask = joestar.nn.SAGEConv(FEATURES, CLASSES).double(), ask

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        return h * 3 if self.ask() else h


class Reading(torch.nn.Module):
    """A layer whose rows are multiplied by all that functions read; in float64."""

    def __init__(self, *read: Callable):
        super().__init__()
        self.conv, self.read = joestar.nn.SAGEConv(FEATURES, CLASSES).double(), read

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        for read in self.read:
            h = h * read()
        return h


class RunningLoss(torch.nn.Module):
    """Cross-entropy in units of its running mean, a buffer, in float64."""

    def __init__(self, keep: float):
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, z, y):
        loss = F.cross_entropy(z, y)
        with torch.no_grad():
            self.mean.mul_(self.keep).add_(loss, alpha=1 - self.keep)
        return loss / self.mean


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """PyTorch's, within."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def pressed(step, place: str, act: Callable[[], None], after: int = 0) -> Iterator[None]:
    """``act`` is called once within steps, behind so many others, at a place: behind their ``forward`` pass, ``in
    backward`` (from a hook), behind the ``backward`` pass, in the ``optimizer``, or ``behind`` it."""
    runner, left = step._runner, itertools.count(-after)
    patched = {
        "forward": (runner.executor.program, "split"), "backward": (runner, "_gradients"),
        "optimizer": (runner.update, "apply"), "behind": (runner, "_push"),
    }  # fmt: skip

    def count(*given) -> None:
        if next(left) == 0:
            act()

    if place not in patched:
        handle = next(step.model.parameters()).register_hook(count)
        yield
        handle.remove()
        return
    kept = getattr(*patched[place])

    def counted(*given):
        found = kept(*given)
        count()
        return found

    with mock.patch.object(*patched[place], counted):
        yield


def make_step(execution="padded", *, model="GraphSAGE", graph=None, seed=0, optimizer=None, loss=F.cross_entropy, **kw):
    """A compiled step of a small model in float64 unless the graph says otherwise; eager backend by default."""
    graph = planted_graph(dtype=torch.float64) if graph is None else graph
    torch.manual_seed(seed)
    options = {"dropout": 0.4, "num_layers": 2, "out_channels": CLASSES} | kw.pop("model_options", {})
    net = getattr(joestar.nn, model)(FEATURES, 16, **options).to(graph.ndata["x"].dtype)
    sampler = joestar.NeighborSampler(graph, kw.pop("fanouts", [5, 3]), seed=7)
    make = optimizer or (lambda parameters: torch.optim.Adam(parameters, 1e-2))
    kw = {"backend": "eager", **kw}
    return joestar.compile(net, sampler, loss, make(net.parameters()), execution=execution, **kw)


def train(step, idx, batch=100, epochs=2) -> list[float]:
    """Losses of a few epochs, read once the epoch has settled."""
    return [loss.item() for _ in range(epochs) for loss in list(step.epoch(idx, batch))]


def tight_bounds(monkeypatch, shrink: float) -> None:
    """Makes the chosen bounds too small by a factor, so that batches overflow in the middle of training."""
    choose = executor_module.choose_bounds

    def smaller(profile, batch, num_nodes, slack):
        bounds = choose(profile, batch, num_nodes, 0.0)
        mean = [sum(column) / len(column) for column in zip(*profile.batches, strict=True)]
        return [max(batch, int(shrink * m)) if b else b for m, b in zip(mean, bounds, strict=True)]

    monkeypatch.setattr(executor_module, "choose_bounds", smaller)


def states_agree(ours, theirs, tolerance: float) -> None:
    """Asserts that two models hold the same parameters and buffers, and two optimizers the same moments."""
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)
    pairs = zip(ours._runner.optimizer.parameters(), theirs._runner.optimizer.parameters(), strict=True)
    for mine, other in pairs:
        left, right = (s._runner.optimizer.optimizer.state for s in (ours, theirs))
        assert left[mine].keys() == right[other].keys()
        for key, value in left[mine].items():
            torch.testing.assert_close(value, right[other][key], rtol=tolerance, atol=tolerance, msg=key)
