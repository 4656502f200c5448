"""Models of ``joestar.nn`` and of the examples under autocast: no pass rounds what PyTorch has in float32."""

import autocast_dtypes
import pytest
import torch
from captures import cheaper, cheapest
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS, seeded, small_graph

import joestar
from joestar import nn as jnn
from joestar.bench.user_models import FOLDER, MODELS, example
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .test_norms_autocast import as_on_a_gpu  # noqa: F401

OWN = {
    "GCN": lambda: jnn.GCN(NUM_FEATURES, 8, 2, NUM_CLASSES),
    "GCN without bias": lambda: jnn.GCN(NUM_FEATURES, 8, 2, NUM_CLASSES, bias=False),
    "GCN, norm": lambda: jnn.GCN(NUM_FEATURES, 8, 2, NUM_CLASSES, norm="layer_norm", dropout=0.3),
    "GCN, jumping": lambda: jnn.GCN(NUM_FEATURES, 8, 2, NUM_CLASSES, jk="cat"),
    "SAGE": lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 2, NUM_CLASSES),
    "SAGE, norm": lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 2, NUM_CLASSES, norm="layer_norm", act="gelu"),
    "SAGE, max": lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 2, NUM_CLASSES, jk="max", aggr="max"),
    "GAT": lambda: jnn.GAT(NUM_FEATURES, 8, 2, NUM_CLASSES, heads=2),
    "GAT, norm": lambda: jnn.GAT(NUM_FEATURES, 8, 2, NUM_CLASSES, heads=2, norm="batch_norm", act="elu"),
    "GIN": lambda: jnn.GIN(NUM_FEATURES, 8, 2, NUM_CLASSES, norm="batch_norm"),
}
ELSEWHERE = {"dce", "simplify", "cse", "dce-after", "bias", "bias-relu"}
"""Passes that clean up, and those of biases, which are in float32 beside rows in 16 bits."""
CASES = [(name, dtype) for name in (*OWN, *MODELS) for dtype in (torch.bfloat16, torch.float16)]


def made(name: str, graph) -> torch.nn.Module:
    if name in OWN:
        return seeded(OWN[name]()).float().train()
    module = example(FOLDER, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    for key, value in graph.edata.items():
        graph.edata[key] = value.float()
    return seeded(module.Net(NUM_FEATURES, 16, 2, NUM_CLASSES, 0.0, **options)).float().train()


def rewritten(name: str, autocast: torch.dtype | None, features: torch.dtype) -> dict[str, int]:
    """How often every pass rewrote a program."""
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model = made(name, graph)
    graph.ndata["x"] = graph.ndata["x"].to(features)
    program = Program("logits", model, joestar.NeighborSampler(graph, [3, 2]), None, Options("eager", (), autocast))
    with cheaper(cheapest):
        program.trace(torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu"))
    return {record.name: record.rewrites for record in program.passes if record.name not in ELSEWHERE}


@pytest.mark.parametrize("name", [*OWN, *MODELS])
@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.every(8)
def test_as_much_is_fused_as_in_float32(name, features):
    """Also where a layer converts factors or coefficients to the dtype of its rows, and where features have 16 bits."""
    times = rewritten(name, torch.bfloat16, features)
    for known, before in rewritten(name, None, torch.float32).items():
        assert times[known] >= before, known


@pytest.mark.parametrize("name", ["GAT", "GIN", "gatv2", "dot_attention", "softmax_aggregation", "edge_features"])
@pytest.mark.every(4)
def test_first_layers_over_features_in_16_bits_are_fused(name, as_on_a_gpu):  # noqa: F811
    assert rewritten(name, torch.bfloat16, torch.bfloat16) == rewritten(name, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize(("name", "autocast"), CASES, ids=str)
@pytest.mark.every(16)
def test_dtypes_are_those_of_pytorch(name, autocast, short):
    """Also where features have the dtype of autocast."""
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model, sampler = made(name, graph), joestar.NeighborSampler(graph, [3, 2])
    graph.ndata["x"] = graph.ndata["x"].to(autocast if short else torch.float32)
    seeds, key = torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu")
    program = Program("logits", model, sampler, None, Options("eager", (), autocast))
    with cheaper(cheapest), autocast_dtypes.checked() as narrowed:
        program.trace(seeds, key)
    assert not narrowed
    y = program.exact(seeds, key)[0][0]
    blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
    with torch.autocast("cpu", autocast):
        eager = model(blocks, graph.ndata["x"][blocks[0].srcs])
    assert y.dtype == eager.dtype
    assert torch.isfinite(y).all()
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(z.float().sum(), parameters, allow_unused=True) for z in (y, eager)]
    assert [g is not None and g.dtype for g in grads[0]] == [g is not None and g.dtype for g in grads[1]]
