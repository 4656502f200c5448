"""A profile on a GPU: kernels under their phase, layer and line, eager and compiled; idle time; the baseline."""

import pytest
import torch
from profiling import user_model
from profiling.test_origins import line
from torch.nn import functional as F

import joestar
from joestar.bench.profile import EAGER, profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def layers(row) -> list[str]:
    """The layers of a kernel, of which a fused one may have several, without the product within them."""
    return [name.removesuffix(".other").removesuffix(".own") for name in row.layer.split(", ")]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gpu_kernels_are_told_by_layer_and_line(backend):
    graph = joestar.load("cora").to("cuda")
    model = user_model.Net(1433, 64, 7).cuda()
    sampler = joestar.NeighborSampler(graph, [4, 3, 2])
    optimizer = torch.optim.Adam(model.parameters())
    report = profile(
        model, sampler, F.cross_entropy, optimizer, graph.train_idx, 70, steps=5, ablation=False, backend=backend
    )  # fmt: skip
    rows = report.profile.kernels
    assert not any(word in row.name for row in rows for word in ("Compiled", "Backward", "##", "aten::"))
    for phase in ("forward", "backward"):
        lines = {(name, row.source.partition(": ")[0]) for row in rows if row.phase == phase for name in layers(row)}
        assert {("layers.0", line("update")), ("layers.1", line("update"))} <= lines, lines
    assert any(row.shape and row.layer for row in rows)
    work = [row for row in rows if row.phase in ("forward", "backward")]
    known = sum(row.microseconds for row in work if row.layer)
    assert known > 0.8 * sum(row.microseconds for row in work)
    assert set(report.profile.phases) == {"sampling", "forward", "backward", "optimizer", "idle"}
    assert "What to do next" in str(report)


def test_plain_pytorch_stands_beside_on_a_gpu():
    graph = joestar.load("cora").to("cuda")
    model = joestar.nn.GraphSAGE(1433, 64, 2, 7).cuda()
    report = profile(
        model, joestar.NeighborSampler(graph, [4, 3]), F.cross_entropy, torch.optim.Adam(model.parameters()),
        graph.train_idx, 70, steps=5, backend="eager",
    )  # fmt: skip
    (beside,) = report.profile.baselines
    assert beside.milliseconds > 0 and beside.kernels > 50 and beside.bytes > 0
    assert [stage.stage for stage in report.profile.stages] == [EAGER, "+ fusion", "+ CUDA graph"]
