"""Models of PyG's convolutions over an ``edge_index``, cut down to hops and with attention in one op, beside PyG.

Three steps of training: losses, parameters, buffers and the optimizer's state are those of a loop in plain PyTorch and
PyG over the same samples.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pyg.common import expected
from pyg.test_trim_attention import fused
from torch import nn
from torch_geometric import nn as gnn

import joestar

from .train import BATCH, CLASSES, EPS, FEATURES, SEEDS, Trained, differences, kept_of, make_optimizer

HEADS = 2
CONVS = {
    "sage": lambda ins, out: gnn.SAGEConv(ins, out),
    "sage max": lambda ins, out: gnn.SAGEConv(ins, out, aggr="max", project=True),
    "gcn": lambda ins, out: gnn.GCNConv(ins, out),
    "gin": lambda ins, out: gnn.GINConv(nn.Linear(ins, out), train_eps=True),
    "graph": lambda ins, out: gnn.GraphConv(ins, out, aggr="mean"),
    "gat": lambda ins, out: gnn.GATConv(ins, out // HEADS, heads=HEADS),
    "gatv2": lambda ins, out: gnn.GATv2Conv(ins, out // HEADS, heads=HEADS, add_self_loops=False),
    "transformer": lambda ins, out: gnn.TransformerConv(ins, out // HEADS, heads=HEADS, beta=True),
    "softmax": lambda ins, out: gnn.SAGEConv(ins, out, aggr=gnn.SoftmaxAggregation(learn=True)),
    "gen": lambda ins, out: gnn.GENConv(ins, out, aggr="softmax", norm=None, learn_t=True),
}
SOFTMAX = ("gatv2", "transformer", "softmax", "gen")
"""Convolutions whose softmax becomes one op."""
NORMS = {"none": lambda width: nn.Identity(), "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
ACTIVATIONS = {"relu": torch.relu, "elu": F.elu, "none": lambda h: h}

DIMENSIONS = {
    "conv": tuple(CONVS),
    "layers": (2, 3),
    "hops": (2, 3),
    "hidden": (8, 32),
    "act": tuple(ACTIVATIONS),
    "norm": tuple(NORMS),
    "jk": ("last", "cat"),
    "skip": (False, True),
    "softmax": ("fused", "stored"),
    "optimizer": ("adam", "adamw", "sgd"),
    "execution": ("padded", "exact"),
}


@dataclass(frozen=True)
class PyGCell:
    """One configuration."""

    conv: str
    layers: int
    hops: int
    hidden: int
    act: str
    norm: str
    jk: str
    skip: bool
    softmax: str
    optimizer: str
    execution: str

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


class Net(nn.Module):
    """Convolutions of PyG as one writes them."""

    def __init__(self, cell: PyGCell, classes: int):
        super().__init__()
        self.jk, self.skip, self.act = cell.jk, cell.skip, ACTIVATIONS[cell.act]
        ins = [FEATURES] + [cell.hidden] * (cell.layers - 1)
        self.convs = nn.ModuleList(CONVS[cell.conv](width, cell.hidden) for width in ins)
        self.norms = nn.ModuleList(NORMS[cell.norm](cell.hidden) for _ in ins)
        self.skips = nn.ModuleList(nn.Linear(width, cell.hidden) if cell.skip else nn.Identity() for width in ins)
        self.last = nn.Linear(cell.hidden * (cell.layers if cell.jk == "cat" else 1), classes)

    def forward(self, x, edge_index):
        """Logits of all nodes."""
        kept = []
        for conv, norm, skip in zip(self.convs, self.norms, self.skips, strict=True):
            h = conv(x, edge_index)
            h = h + skip(x) if self.skip else h
            x = self.act(norm(h))
            kept.append(x)
        return self.last(torch.cat(kept, 1) if self.jk == "cat" else x)


def make_net(cell: PyGCell) -> Net:
    """The model in float64, every parameter at random."""
    net, made = Net(cell, CLASSES), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) * parameter.shape[-1] ** -0.5)
            if parameter.numel() == 1 or bool((parameter == 1).all()):
                parameter.add_(1.0)
    return net.double()


def sampler_of(cell: PyGCell, graph: joestar.Graph):
    """A sample of so many hops."""
    return joestar.NeighborSampler(graph, [4, 3, 3][: cell.hops], seed=3)


def train(cell: PyGCell, graph: joestar.Graph, net: nn.Module) -> tuple[Trained, dict[str, int]]:
    """Three steps, and how often every pass has fired."""
    optimizer = make_optimizer(cell, net.parameters(), EPS)
    with fused(softmax=cell.softmax):
        step = joestar.compile(
            net, sampler_of(cell, graph), F.cross_entropy, optimizer, backend="eager", warm_up=3,
            execution=cell.execution,
        )  # fmt: skip
        losses = [loss.detach().clone() for loss in step.epoch(SEEDS, BATCH, shuffle=False)]
    passes = {record.name: record.rewrites for record in step._runner.executor.program.passes}
    return kept_of(torch.stack(losses), net, optimizer), passes


def train_plain(cell: PyGCell, graph: joestar.Graph, net: nn.Module) -> Trained:
    """The same loop, over the same samples."""
    optimizer, losses = make_optimizer(cell, net.parameters(), EPS), []
    for number, seeds in enumerate(SEEDS.split(BATCH)):
        logits = expected(net, sampler_of(cell, graph), seeds, (3, 0, number), ())
        loss = F.cross_entropy(logits, graph.ndata["y"][seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return kept_of(torch.stack(losses), net, optimizer)


def check(cell: PyGCell, graph: joestar.Graph, tolerance: float = 1e-9) -> list[str]:
    """What differs, and passes that should have fired and did not."""
    net = make_net(cell)
    other = copy.deepcopy(net)
    got, passes = train(cell, graph, net)
    found = differences(got, train_plain(cell, graph, other), tolerance)
    if cell.norm != "batch" and not passes["trim"]:
        found.append(f"trim has not fired: {passes}")
    if cell.conv in SOFTMAX and cell.softmax == "fused" and passes["softmax-aggregate"] != cell.layers:
        found.append(f"softmax-aggregate has fired {passes['softmax-aggregate']} times")
    return [f"{cell}: {what}" for what in found]
