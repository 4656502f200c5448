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
from joestar.runtime.program import Options, Program

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


@pytest.mark.parametrize("name", OWN)
@pytest.mark.every(4)
def test_as_much_is_fused_as_in_float32(name):
    """Also where a layer converts factors or coefficients to the dtype of its rows."""
    graph, rewrites = small_graph(), []
    graph.ndata["x"] = graph.ndata["x"].float()
    for autocast in (None, torch.bfloat16):
        program = Program(
            "logits", made(name, graph), joestar.NeighborSampler(graph, [3, 2]), None, Options("eager", (), autocast)
        )
        with cheaper(cheapest):
            program.trace(torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu"))
        rewrites.append({record.name: record.rewrites for record in program.passes if record.name not in ELSEWHERE})
    for name, times in rewrites[0].items():
        assert rewrites[1][name] >= times, name


@pytest.mark.parametrize(("name", "autocast"), CASES, ids=str)
@pytest.mark.every(8)
def test_dtypes_are_those_of_pytorch(name, autocast):
    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model, sampler = made(name, graph), joestar.NeighborSampler(graph, [3, 2])
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
