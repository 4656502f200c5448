"""Inductor's caches of graphs: found again by the next process, never for other code."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import joestar
from joestar.bench.planted import planted
from joestar.errors import CaptureError
from joestar.kernels.digest import PACKAGE, folder_digest, source_digest
from joestar.ops.registry import OPS
from joestar.runtime import inductor

CPU = torch.device("cpu")


def _graph(constant=None) -> fx.GraphModule:
    """x + bias by an op of ours that Inductor compiles from its reference."""
    module = torch.nn.Module()
    graph = fx.Graph()
    x, bias = graph.placeholder("x"), graph.placeholder("bias")
    out = graph.call_function(torch.ops.joestar.add_bias.default, (x, bias))
    if constant is not None:
        module.register_buffer("held", constant)
        out = graph.call_function(torch.ops.aten.mul.Tensor, (out, graph.get_attr("held")))
    graph.output((out,))
    return fx.GraphModule(module, graph)


def _looked_up() -> tuple[int, int, int]:
    """(hits, misses, bypasses) since the last call."""
    seen = {**counters["aot_autograd"], **counters["inductor"]}
    counters.clear()
    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass", "fxgraph_cache_bypass")
    hit, miss, *bypass = (seen.get(name, 0) for name in names)
    return hit, miss, sum(bypass)


def test_the_same_code_hits_and_other_code_never(monkeypatch):
    x, bias = torch.arange(12.0).view(4, 3), torch.tensor([1.0, 2.0, 3.0])

    def result():
        (out,) = inductor.compile_graph(_graph(), [x, bias], CPU, ())(x, bias)
        return out

    counters.clear()
    with fresh_cache(), torch.no_grad():
        torch.testing.assert_close(result(), x + bias)
        assert _looked_up() == (0, 1, 0)
        torch.testing.assert_close(result(), x + bias)
        assert _looked_up() == (1, 0, 0)
        monkeypatch.setitem(OPS, "add_bias", replace(OPS["add_bias"], reference=lambda x, bias: x + 2 * bias))
        torch.testing.assert_close(result(), x + bias)  # Inductor's own key does not see it
        assert _looked_up() == (1, 0, 0)
        monkeypatch.setattr(inductor, "source_digest", lambda: "of the changed sources")
        torch.testing.assert_close(result(), x + 2 * bias)
        assert _looked_up() == (0, 1, 0)


def test_the_tag_holds_the_sources_the_users_tag_and_the_constants():
    tags = [inductor.cache_tag(_graph(value)) for value in (None, torch.ones(3), torch.zeros(3), torch.ones(1, 3))]
    tags.append(inductor.cache_tag(_graph(torch.ones(3, dtype=torch.float64))))
    with torch.compiler.config.patch(cache_key_tag="mine"):
        tags.append(inductor.cache_tag(_graph()))
    assert len(set(tags)) == len(tags)
    assert all(source_digest() in tag for tag in tags) and "mine" in tags[-1]
    assert inductor.cache_tag(_graph(torch.ones(3))) == tags[1]


def test_the_digest_changes_with_every_source(tmp_path):
    (tmp_path / "ops").mkdir()
    files = {name: tmp_path / name for name in ("a.py", "ops/b.py", "_native.so")}
    for name, path in files.items():
        path.write_text(name)
    seen = {folder_digest(tmp_path)}
    for path in files.values():
        path.write_text(path.read_text() + "#")
        seen.add(folder_digest(tmp_path))
    files["a.py"].rename(tmp_path / "c.py")
    seen.add(folder_digest(tmp_path))
    assert len(seen) == 5
    (tmp_path / "a.pyc").write_text("compiled")
    assert folder_digest(tmp_path) in seen
    assert Path(joestar.__file__).parent == PACKAGE and source_digest("kernels") != source_digest()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_passes_within_inductor_identify_themselves(device):
    passes = [v for v in inductor.settings(torch.device(device)).values() if callable(v)]
    assert passes and all(isinstance(p, CustomGraphPass) and p.uuid() for p in passes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deterministic_settings_leave_nothing_to_timing(device):
    found = inductor.settings(torch.device(device), deterministic=True)
    assert found["deterministic"] and not found["triton.autotune_pointwise"]
    with torch._inductor.config.patch(found):  # refuses names that it does not know
        assert not torch._inductor.config.triton.autotune_pointwise
    assert "triton.autotune_pointwise" not in inductor.settings(torch.device(device))


_FIRST_STEPS = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.runtime.common import make_step, planted_graph
step = make_step(graph=planted_graph(), backend="inductor")
losses = [loss.item() for loss in list(step.epoch(torch.arange(200), 100))]
found = {**counters["aot_autograd"], **counters["inductor"]}
print(json.dumps([losses, {k: v for k, v in found.items() if "cache" in k}]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    root = PACKAGE.parent
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _FIRST_STEPS], env=env, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    (first, cold), (second, warm) = runs
    assert first == second
    assert cold == {"autograd_cache_miss": 1, "fxgraph_cache_miss": 2, "autograd_cache_saved": 1}
    assert warm == {"autograd_cache_hit": 1, "fxgraph_cache_hit": 2}


@pytest.mark.fuzz
def test_constants_of_a_graph_go_along():
    """``torch.tensor([1.0, 2.0])`` in a model or a loss."""
    graph = planted("tiny")
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 4, 2, graph.num_classes)
    weight = [float(number) for number in range(1, graph.num_classes + 1)]
    losses = []
    for backend in ("inductor", "eager"):
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [2, 2]),
            lambda out, y: F.cross_entropy(out, y, weight=torch.tensor(weight)) * torch.tensor(2.0),
            torch.optim.SGD(net.parameters(), 0.0), backend=backend,
        )  # fmt: skip
        losses.append(next(iter(step.epoch(graph.train_idx, 50))))
    torch.testing.assert_close(*losses)


def test_what_inductor_computes_wrongly_is_refused():
    """PyTorch's formula of this loss reads the slots behind the first -1."""
    graph = planted("tiny")
    graph.ndata["y"] = torch.stack([graph.ndata["y"], *[torch.full_like(graph.ndata["y"], -1)] * 4], 1)
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 4, 2, 5)
    sampler, sgd = joestar.NeighborSampler(graph, [2, 2]), torch.optim.SGD(net.parameters(), 0.1)
    step = joestar.compile(net, sampler, lambda out, y: F.multilabel_margin_loss(out, y), sgd)
    with pytest.raises(CaptureError, match=r"multilabel_margin_loss at .*test_inductor_cache.py.*backend='eager'"):
        next(iter(step.epoch(graph.train_idx, 50)))
