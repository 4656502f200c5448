"""Random programs from safe operations: padded loss and gradients equal exact ones, and those of plain eager code.

Ten programs share a capture (each in a head of its own, see ``Heads``); the seed of a failing one is in its name.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .harness import SEEDS, WIDTH, Heads, check, curved, small_graph

PER_CAPTURE = 10
QUICK = (0, 30)
"""First programs of the captures of ``make test``; every operation occurs in them. The others are ``make fuzz``."""

# Every operation takes rows [n, WIDTH] of the sources, and returns such rows, of moderate size.
OPERATIONS = {
    "relu": lambda m, b, h: h.relu(),
    "tanh": lambda m, b, h: h.tanh(),
    "square": lambda m, b, h: (h * 0.5) ** 2,
    "exp": lambda m, b, h: torch.exp(-h.abs()),
    "log": lambda m, b, h: (h.abs() + 0.1).log(),
    "rsqrt": lambda m, b, h: h * (h.pow(2).sum(1, keepdim=True) + 0.01).rsqrt(),
    "linear": lambda m, b, h: m.linear(h),
    "heads": lambda m, b, h: h.view(-1, 2, 4).softmax(1).flatten(1),
    "columns": lambda m, b, h: torch.cat([h[:, 4:], h[:, :4].sigmoid()], 1),
    "layer_norm": lambda m, b, h: F.layer_norm(h, (WIDTH,)),
    "normalize": lambda m, b, h: F.normalize(h),
    "batch_norm": lambda m, b, h: m.norm(h),
    "in place": lambda m, b, h: (h * 1).add_(0.3).relu_(),
    "where": lambda m, b, h: torch.where(h > 0.1, h, 0.1 * h * b.num_dst / b.num_src),
    "centre": lambda m, b, h: h - h.mean(0),
    "standardise": lambda m, b, h: (h - h.mean(0)) / (h.std(0) + 0.1),
    "scale": lambda m, b, h: h / (h.abs().max() + 0.1),
    "range": lambda m, b, h: (h - h.amin(0)) / (h.amax(0) - h.amin(0) + 0.5),
    "softmax of nodes": lambda m, b, h: h + h.softmax(0) * 3,
    "logsumexp": lambda m, b, h: h - h.logsumexp(0),
    "sum by size": lambda m, b, h: h + h.sum(0) / b.num_src,
    "sqrt of size": lambda m, b, h: h / b.num_src**0.5 + h.sum() / b.num_edges / WIDTH,
    "virtual node": lambda m, b, h: h + m.linear(h.mean(0, keepdim=True)).tanh(),
    "attention": lambda m, b, h: (h @ h.T / 8).softmax(-1) @ h,
    "covariance": lambda m, b, h: h @ (h.T @ h / b.num_src).tanh(),
    "einsum": lambda m, b, h: torch.einsum("nd,de->ne", h, torch.einsum("nd,ne->de", h, h).sigmoid()),
    "cumulative": lambda m, b, h: h.cumsum(0) / torch.arange(1, b.num_src + 1)[:, None],
    "degrees": lambda m, b, h: h / (1 + b.graph_degrees("src"))[:, None] + m.table(b.out_degrees().clamp(max=7)),
    "pull mean": lambda m, b, h: h + b.pull(fn.copy_u(h), "mean").mean(0),
    "pull max": lambda m, b, h: h - b.pull(fn.copy_u(h), "max").sum(0) / b.num_dst,
    "pull per degree": lambda m, b, h: h + (b.pull(fn.copy_u(h), "sum") / b.in_degrees()[:, None] ** 0.5).mean(0),
    "edge softmax": lambda m, b, h: h + b.pull(fn.u_mul_e(h, attention(b, h)), "sum").mean(0),
    "loops": lambda m, b, h: h + b.add_self_loops().pull(fn.copy_u(h), "mean").mean(0),
    "edges": lambda m, b, h: h + m.linear(b.apply_edges(fn.u_sub_v(h, h[: b.num_dst]))).relu().mean(0),
    "scatter": lambda m, b, h: h + torch.zeros_like(h).index_add(0, b.indices, h[b.indices].tanh()),
    "buckets": lambda m, b, h: h + h.new_zeros(9, WIDTH).index_add(0, b.graph_degrees("src") % 9, h).tanh().sum(0),
    "dropout": lambda m, b, h: F.dropout(h, 0.3),
    "edge dropout": lambda m, b, h: h + F.dropout(b.apply_edges(fn.copy_u(h)), 0.5).mean(0),
    "no gradient": lambda m, b, h: h * (h.detach().norm(dim=0) + 1).reciprocal(),
    "average": lambda m, b, h: h - m.average.lerp_(h.detach().mean(0), 0.1),
}
RANDOM = {"dropout", "edge dropout"}
PARTS = {
    "linear": nn.Linear(WIDTH, WIDTH),
    "norm": nn.BatchNorm1d(WIDTH),
    "table": nn.Embedding(WIDTH, WIDTH),
    "average": torch.zeros(WIDTH),
}


def attention(b, h):
    return b.edge_softmax(b.apply_edges(fn.u_dot_v(h, h[: b.num_dst])).tanh())


def program(seed: int):
    """(a random composition of 3 to 6 operations, its name)."""
    names = random.Random(seed).choices(list(OPERATIONS), k=random.Random(seed).randint(3, 6))

    def operation(m, b, h):
        for name in names:
            h = OPERATIONS[name](m, b, h)
        return h

    return operation, f"program {seed}: {', '.join(names)}"


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n in QUICK else pytest.mark.fuzz) for n in range(0, 100, PER_CAPTURE)]
)
def test_random_programs(first):
    programs = [program(seed) for seed in range(first, first + PER_CAPTURE)]
    plain = not any(name in title for _, title in programs for name in RANDOM)
    model = Heads({title: operation for operation, title in programs}, **PARTS)
    connected = small_graph().in_degrees().nonzero().flatten().tolist()  # 0 / 0 is NaN in any execution
    batch = random.Random(first).choices(connected, k=6)
    check(model, (SEEDS, batch), loss=curved, plain=plain, tolerance=1e-9)


def test_every_operation_occurs():
    quick = [seed for first in QUICK for seed in range(first, first + PER_CAPTURE)]
    assert {name for seed in quick for name in program(seed)[1].split(": ")[1].split(", ")} == OPERATIONS.keys()


LAYERS = {
    "GraphSAGE": {"aggr": ["mean", "sum", "max"], "norm": [None, "batch_norm", "layer_norm"]},
    "GCN": {"norm": [None, "layer_norm", "batch_norm"], "gcn_norm": ["block", "graph"]},
    "GAT": {"heads": [1, 2], "norm": [None, "batch_norm"], "residual": [False, True]},
    "GIN": {"train_eps": [False, True], "norm": [None, "batch_norm"]},
}


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(2, 8))])
def test_random_models(seed):
    """Models of joestar.nn with random options, dropout, fanouts and seeds (duplicates, nodes without edges)."""
    choose = random.Random(seed)
    name = list(LAYERS)[seed % 4]
    options = {key: choose.choice(values) for key, values in LAYERS[name].items()}
    depth = choose.choice([1, 2, 3])
    dropout = choose.choice([0.0, 0.4])
    model = getattr(jnn, name)(6, 8, depth, 4, dropout=dropout, **options)
    batches = [choose.choices(range(48), k=choose.randint(2, 12)) for _ in range(2)]
    fanouts = tuple(choose.choice([-1, 1, 2, 4]) for _ in range(depth))
    check(model, batches, fanouts=fanouts, graph=small_graph(isolated=4), plain=not dropout, tolerance=1e-9)
