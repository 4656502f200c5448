"""Training under autocast and in TF32 on a GPU, over features in 16 bits too: as near to float64 as plain PyTorch's."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fusion.layer_forms import FORMS, Net

import joestar
from joestar import nn as jnn
from joestar.bench.user_models import FOLDER, example

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FEATURES, HIDDEN, CLASSES = 100, 64, 7


class Shape(NamedTuple):
    nodes: int = 2000
    degree: int = 8
    classes: int = CLASSES
    batch: int = 200
    fanouts: tuple[int, ...] = (6, 4)


JOINED = "SAGE, joined weights"
SHAPES = {JOINED: Shape(20_000, 20, 172, 500, (15, 10, 5))}
"""Those in which other forms are chosen: weights of several layers are joined where layers aggregate first."""
COMMON = (FEATURES, HIDDEN, 2, CLASSES)
OWN = {
    "SAGE": lambda: jnn.GraphSAGE(*COMMON),
    JOINED: lambda: jnn.GraphSAGE(FEATURES, 128, 3, SHAPES[JOINED].classes),
    "SAGE, norm": lambda: jnn.GraphSAGE(*COMMON, norm="layer_norm", act="gelu"),
    "GCN": lambda: jnn.GCN(*COMMON),
    "GIN": lambda: jnn.GIN(*COMMON),
    "GAT": lambda: jnn.GAT(*COMMON, heads=4, add_self_loops=False),
}
USER = ("dot_attention", "edge_features", "gat_edges", "gatv2", "pna", "softmax_aggregation", "two_aggregators")
LAYERS = ("FiLM", "GCNII", "gates per edge", "SAGE, ELU", "cat-SAGE, `lin(cat([x, agg]))`")


def make_graph(features: torch.dtype, shape: Shape) -> joestar.Graph:
    """Features as a table in 16 bits holds them, in ``features``; a hub, and nodes that no edge reads."""
    random = torch.Generator().manual_seed(1)
    edges = torch.randint(0, shape.nodes - 9, (2, shape.degree * shape.nodes), generator=random)
    hub = torch.stack([torch.arange(0, 300), torch.full((300,), 7)])
    x = torch.randn(shape.nodes, FEATURES, generator=random).to(torch.bfloat16)
    y = torch.randint(0, shape.classes, (shape.nodes,), generator=random)
    return joestar.Graph.from_edge_index(torch.cat([edges, hub], 1), shape.nodes, {"x": x.to(features), "y": y})


def make_net(name: str, graph: joestar.Graph) -> torch.nn.Module:
    """A model; edge features of its own go to ``graph``."""
    torch.manual_seed(0)
    if name in OWN:
        net = OWN[name]()
    elif name in LAYERS:
        layer, settings = FORMS[name]
        net = Net(layer, FEATURES, HIDDEN, CLASSES, **settings | {"dropout": 0.0})
    else:
        module = example(FOLDER, name)
        net = module.Net(*COMMON, 0.0, **(module.prepare(graph) if hasattr(module, "prepare") else {}))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:  # what starts at 0 or 1 hides errors
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return net.float()


def plain(net, graph: joestar.Graph, fanouts, seeds, number: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Loss and gradients of plain PyTorch over the same mini-batch: under autocast if ``dtype`` has 16 bits."""
    sampler = joestar.NeighborSampler(graph, fanouts)
    blocks = sampler.sample(graph.keyed(3, 0, number), seeds.to(graph.indices.dtype))
    with torch.autocast(graph.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = net(blocks, graph.ndata["x"][blocks[0].srcs.long()])
        loss = F.cross_entropy(logits, graph.ndata["y"][seeds])
    names, parameters = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters)
    return {"loss": loss.detach().double()} | {name: grad.double() for name, grad in zip(names, grads, strict=True)}


@pytest.mark.parametrize("features", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*OWN, *USER, *LAYERS])
def test_gradients_are_as_near_to_float64_as_those_of_pytorch(name, features):
    check(name, features, torch.bfloat16)


@pytest.mark.parametrize("name", ["SAGE", "GAT"])
def test_in_tf32(name, tf32):
    """Products with an epilogue, and those of rows of 7 numbers, are kernels of ours."""
    check(name, torch.float32, None)


def check(name, features, autocast):
    """Root of the mean square over mini-batches, each from the same weights."""
    nodes, _, _, size, fanouts = shape = SHAPES.get(name, Shape())
    graphs = [make_graph(features, shape) for _ in range(3)]
    net, *_ = (make_net(name, graph) for graph in graphs)
    net.to("cuda")
    ours, in_float64, graph = (graph.to("cuda") for graph in graphs)
    for data in (in_float64.ndata, in_float64.edata):
        for key, value in data.items():
            data[key] = value.double() if value.is_floating_point() else value
    before, exact_net = copy.deepcopy(net), copy.deepcopy(net).double()
    seeds = torch.randperm(nodes, generator=torch.Generator().manual_seed(4))[: 4 * size].to("cuda")
    step = joestar.compile(
        net, joestar.NeighborSampler(ours, fanouts, seed=3), F.cross_entropy,
        torch.optim.SGD(net.parameters(), 1.0), autocast=autocast,
    )  # fmt: skip
    rows = []
    for number, loss in enumerate(step.epoch(seeds, size, shuffle=False)):
        after = dict(net.named_parameters())
        grads = {key: (value - after[key]).detach().double() for key, value in before.named_parameters()}
        net.load_state_dict(before.state_dict())
        batch = seeds[number * size : (number + 1) * size]
        exact = plain(exact_net, in_float64, fanouts, batch, number, torch.float64)
        eager = plain(before, graph, fanouts, batch, number, autocast or torch.float32)
        rows.append(({"loss": loss.detach().double()} | grads, eager, exact))
    assert step.counters.fallbacks == 0 and len(rows) == 4
    joined = sum(row.rewrites for row in step.report().programs[0].passes if row.name == "join-together")
    assert joined or name != JOINED
    sizes = {key: sum(float(exact[key].square().sum()) for *_, exact in rows) for key in exact}
    for key, size in sizes.items():
        if size < 1e-12 * max(sizes.values()):  # zero but for rounding: a bias of all scores of a softmax
            continue
        off, allowed = (
            (sum(float((row[kind][key] - row[2][key]).square().sum()) for row in rows) / size) ** 0.5 for kind in (0, 1)
        )
        assert off <= 2 * allowed + 1e-2, f"{key}: off by {off:.3g}, PyTorch by {allowed:.3g}"
