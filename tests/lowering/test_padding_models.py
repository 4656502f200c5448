"""Normalisations and layers that look at all nodes, and whole models: padded equals exact and eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .harness import NUM_CLASSES, NUM_FEATURES, SEEDS, WIDTH, Case, Rows, check, check_rows, same, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")


def pair_norm(m, b, h):
    """Zhao and Akoglu, 2020."""
    centred = h - h.mean(0)
    return centred / (1e-5 + centred.pow(2).sum(-1).mean()).sqrt()


def graph_norm(m, b, h):
    """Cai et al., 2021, with one graph per batch."""
    centred = h - m.scale * h.mean(0, keepdim=True)
    return m.scale * centred / (centred.pow(2).mean(0) + 1e-5).sqrt()


def group_norm(m, b, h):
    """Differentiable group normalisation (Zhou et al., 2020)."""
    groups = (m.assign(h).softmax(-1)[:, :, None] * h[:, None]).view(-1, 3 * WIDTH)
    return h + 0.1 * m.norm(groups).view(-1, 3, WIDTH).sum(1)


def principal(m, b, h):
    scores = F.relu(h @ (h.T @ h).sum(1, keepdim=True) / b.num_src)
    return h + torch.sigmoid(scores) * h.mean(0)


def degree_scalers(m, b, h):
    """PNA (Corso et al., 2020): the mean of log-degrees is one of the batch."""
    logs = (b.in_degrees() + 1.0).double().log()
    return h + (b.pull(fn.copy_u(h), "mean") * (logs / logs.mean())[:, None]).sum(0)


def test_normalisations_over_nodes():
    check_rows({
        "PairNorm": pair_norm,
        "PairNorm of rows": lambda m, b, h: F.normalize(h - h.mean(0)),
        "GraphNorm": graph_norm,
        "LayerNorm of the graph": lambda m, b, h: (h - h.mean()) / (h.std(unbiased=False) + 1e-5),
        "GraphSizeNorm": lambda m, b, h: h * b.num_src**-0.5,
        "MeanSubtraction": lambda m, b, h: h - h.mean(0, keepdim=True),
        "DiffGroupNorm": group_norm,
        "MessageNorm": lambda m, b, h: h + F.normalize(b.pull(fn.copy_u(h), "sum")).sum(0),
        "statistics without gradient": lambda m, b, h: (h - h.detach().mean(0)) / h.detach().std(0),
    }, scale=nn.Parameter(torch.ones(WIDTH)), assign=nn.Linear(WIDTH, 3), norm=nn.BatchNorm1d(3 * WIDTH))  # fmt: skip


def test_layers_that_look_at_all_nodes():
    check_rows({
        "virtual node": lambda m, b, h: h + m.linear(h.mean(0)).relu(),
        "virtual node, expanded": lambda m, b, h: torch.cat(
            [h, m.linear(h.max(0, keepdim=True)[0]).expand(h.shape[0], -1)], 1
        )[:, 4:12],
        "attention pooling": lambda m, b, h: h + (m.linear(h)[:, :1].softmax(0) * h).sum(0),
        "set2set": lambda m, b, h: h + ((h @ h.mean(0)).softmax(0)[:, None] * h).sum(0),
        "attention": lambda m, b, h: m.attention(h[None], h[None], h[None])[0][0],
        "degree embedding": lambda m, b, h: h + m.degrees(b.graph_degrees("src").clamp(max=7)),
        "out-degrees": lambda m, b, h: h * b.out_degrees()[:, None] / b.out_degrees().double().mean(),
        "PNA": degree_scalers,
        "pooled": principal,
        "histogram": lambda m, b, h: h + F.one_hot(b.in_degrees(), 16).sum(0)[:WIDTH],
    }, linear=nn.Linear(WIDTH, WIDTH), attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        degrees=nn.Embedding(WIDTH, WIDTH))  # fmt: skip


MODELS = {
    "sage": ("GraphSAGE", {"aggr": ["mean", "max"], "normalize": True, "project": True, "dropout": 0.3}),
    "sage_norm": ("GraphSAGE", {"norm": "batch_norm", "jk": "lstm", "dropout": 0.5}),
    "gcn": ("GCN", {"norm": "layer_norm", "dropout": 0.3}),
    "gcn_graph": ("GCN", {"gcn_norm": "graph", "improved": True, "norm": "batch_norm"}),
    "gat": ("GAT", {"heads": 2, "dropout": 0.4, "residual": True, "jk": "cat"}),
    "gin": ("GIN", {"train_eps": True, "norm": "batch_norm", "jk": "max"}),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "options"), MODELS.values(), ids=MODELS.keys())
def test_models(name, options):
    """With dropout the exact run is the reference: its masks are keyed, those of eager code are not."""
    model = getattr(jnn, name)(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, **options)
    batches = ((*SEEDS, 9, 46), (5, 47))  # duplicates, nodes without edges
    plain = "dropout" not in options
    check(model, batches, fanouts=(3, 2), graph=small_graph(isolated=3), plain=plain)


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN"])
def test_a_single_seed_without_edges(name):
    model = getattr(jnn, name)(NUM_FEATURES, WIDTH, 2, NUM_CLASSES)
    check(model, ((5,), (47,)), fanouts=(3, 2), graph=small_graph(isolated=3))


def test_all_edges_and_replacement():
    from joestar.sampling import NeighborSampler

    graph = small_graph()
    for sampler in (NeighborSampler(graph, [-1, 2]), NeighborSampler(graph, [4, 3], replace=True)):
        check(jnn.GraphSAGE(NUM_FEATURES, WIDTH, 2, NUM_CLASSES), graph=graph, sampler=sampler)


def test_bounds_do_not_matter():
    """Tight, generous and different bounds give the same loss and gradients."""
    model = jnn.GAT(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, heads=2, dropout=0.5)
    case = Case(model, fanouts=(3, 2), tight=True)
    seeds = case.seeds()
    reference = case.exact(seeds, 0)
    for factor, extra in ((1.0, 0), (1.0, 1), (3.0, 5)):
        case.factor, case.extra = factor, extra
        same(case.padded(seeds, 0), reference, 1e-10)


@pytest.mark.slow
def test_inductor():
    """The same program through Inductor: statistics, buffers, guards and dropout in one compilation."""

    def operation(m, b, h):
        h = F.dropout(m.norm(h), 0.2)
        h = (h - h.mean(0)) / h.std(0) + h / b.num_src
        a = b.pull(fn.copy_u(h), "mean")
        return h + (a / b.in_degrees()[:, None]).sum(0)

    case = Case(Rows(operation, norm=nn.BatchNorm1d(WIDTH)), backend="inductor")
    same(case.padded(case.seeds(), 0), case.exact(case.seeds(), 0), 1e-8)
