"""Further norms, activations and losses, edge weights, autocast: cells of two layers, and what they train to."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import joestar
from joestar.profile.sizes import step_key

from . import model
from .cells import Cell
from .train import (
    BATCH,
    CLASSES,
    EPS,
    FEATURES,
    SEEDS,
    Trained,
    captured_once,
    differences,
    kept_of,
    make_graph,
    make_optimizer,
)

HIDDEN = 8
IN_16_BITS = 0.05
"""How far three steps in 16 bits may be off, of a scale of 1 at least."""

MORE = {
    "model": ("sage", "gcn", "gin", "gat"),
    "act": ("elu", "gelu", "prelu", "silu"),
    "norm": ("none", "batch", "layer", "rms", "over rows"),
    "loss": ("classes", "sum", "smoothed", "binary", "values", "margins"),
    "weighted": (False, True),
    "autocast": ("", "bfloat16"),
}


def _wide(z: Tensor) -> Tensor:
    """Rows as targets are, under autocast, too."""
    return z.float() if z.dtype is torch.bfloat16 else z


LOSSES = {
    "classes": F.cross_entropy,
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum") / 20,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "binary": lambda z, y, t: F.binary_cross_entropy_with_logits(z, t.to(z.dtype)),
    "values": lambda z, y, t: F.mse_loss(_wide(z), t),
    "margins": lambda z, y: F.multi_margin_loss(_wide(z), y),
}
OF_TARGETS = ("binary", "values")
"""Losses of ``t`` in (0, 1), too."""


@dataclass(frozen=True)
class More:
    """One configuration of two layers."""

    model: str
    act: str
    norm: str
    loss: str
    weighted: bool
    autocast: str

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


class OverRows(nn.Module):
    """A norm over the rows of a batch, less a learned share of their mean (GraphNorm of one graph)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias, self.share = (nn.Parameter(torch.ones(width)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, width]`` -> ``[n, width]``."""
        centred = x - self.share * x.mean(0, keepdim=True)
        return self.weight * centred / (centred.square().mean(0, keepdim=True) + 1e-2).sqrt() + self.bias


NORMS = {**model.NORMS, "rms": lambda width: nn.RMSNorm(width, eps=1e-3), "over rows": OverRows}
ACTIVATIONS = {**model.ACTIVATIONS, "silu": nn.SiLU}


class Weighted(nn.Module):
    """A convolution, and beside it a sum of neighbours by the weights of their edges."""

    def __init__(self, conv: nn.Module, width: int, out: int):
        super().__init__()
        self.conv, self.beside = conv, nn.Linear(width, out)

    def forward(self, block, x: Tensor) -> Tensor:
        """Rows of the sources -> of the destinations."""
        weights = block.edata["w"].to(x.dtype)
        return self.conv(block, x) + self.beside(block.pull(joestar.fn.u_mul_e(x, weights), "sum"))


def plain_conv(conv: nn.Module, block, x: Tensor, masks: model.Masks) -> Tensor:
    """The same in plain PyTorch."""
    if not isinstance(conv, Weighted):
        return model.PLAIN[type(conv)](conv, block, x, masks)
    src, dst = model._edges(block)
    weighed = x[src] * block.edata["w"].to(x.dtype)[:, None]
    total = x.new_zeros(block.num_dst, x.shape[1]).index_add(0, dst, weighed)
    return plain_conv(conv.conv, block, x, masks) + conv.beside(total)


def cell_of(more: More) -> Cell:
    """What ``Net`` takes; dropout behind the first layer."""
    return Cell(HIDDEN, (4, 3), more.model, "none", "none", 0.5, "none", "none", "sgd", 0)


def net_of(more: More) -> model.Net:
    """The model in float64, every parameter at random."""
    net, random = model.Net(cell_of(more), FEATURES, CLASSES), torch.Generator().manual_seed(2)
    net.norms, net.acts = nn.ModuleList([NORMS[more.norm](HIDDEN)]), nn.ModuleList([ACTIVATIONS[more.act]()])
    if more.weighted:
        net.convs[0] = Weighted(net.convs[0], FEATURES, HIDDEN)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(noise * spread + (1.0 if bool((parameter == 1).all()) else 0.0))
    return net.double()


def graph_of(dtype: torch.dtype) -> joestar.Graph:
    """The grid's graph, with targets ``t`` and weights ``w``."""
    graph, random = make_graph(dtype), torch.Generator().manual_seed(5)
    graph.ndata["t"] = torch.rand(graph.num_nodes, CLASSES, generator=random, dtype=torch.float64).to(dtype)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=random, dtype=torch.float64).to(dtype)
    return graph


def train_plain(more: More, graph: joestar.Graph, net: model.Net) -> Trained:
    """Three steps in plain PyTorch, in float64."""
    sampler, net = joestar.NeighborSampler(graph, [4, 3], seed=3), copy.deepcopy(net)
    optimizer, losses = make_optimizer(cell_of(more), net.parameters(), EPS), []
    for number, seeds in enumerate(SEEDS.split(BATCH)):
        blocks = sampler.sample(graph.keyed(3, 0, number), seeds.to(graph.indices.dtype))
        masks = model.Masks(step_key(3, 0, number, "cpu"))
        logits = net.layered(
            blocks, graph.ndata["x"][blocks[0].srcs.long()], lambda *given, m=masks: plain_conv(*given, m),
            lambda block, rows, m=masks: m.of_nodes(rows, block.dsts, net.drop.p),
        )  # fmt: skip
        targets = (graph.ndata["t"][seeds],) if more.loss in OF_TARGETS else ()
        loss = LOSSES[more.loss](logits, graph.ndata["y"][seeds], *targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return kept_of(torch.stack(losses), net, optimizer)


def check(more: More) -> list[str]:
    """What differs from plain PyTorch in float64, in padded and in exact execution."""
    net, found = net_of(more), []
    expected = train_plain(more, graph_of(torch.float64), net)
    dtype, tolerance = (torch.float32, IN_16_BITS) if more.autocast else (torch.float64, 1e-9)
    net, graph = net.to(dtype), graph_of(dtype)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    autocast = getattr(torch, more.autocast) if more.autocast else None
    with captured_once():
        for execution in ("padded", "exact"):
            net.load_state_dict(start)
            optimizer = make_optimizer(cell_of(more), net.parameters(), EPS)
            step = joestar.compile(
                net, joestar.NeighborSampler(graph, [4, 3], seed=3), LOSSES[more.loss], optimizer,
                execution=execution, backend="eager", autocast=autocast,
            )  # fmt: skip
            losses = [loss.detach().clone() for loss in step.epoch(SEEDS, BATCH, shuffle=False)]
            got = kept_of(torch.stack(losses), net, optimizer)
            found += [f"{execution}: {what}" for what in differences(got, expected, tolerance)]
    return found
