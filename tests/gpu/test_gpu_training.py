"""The same program on a GPU: identical samples, losses that agree with the CPU's."""

import pytest
import torch
import torch.nn.functional as F

import joestar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _graph(device: str) -> joestar.Graph:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 2000, (2, 20000), generator=random)
    labels = torch.randint(0, 5, (2000,), generator=random)
    features = torch.randn(2000, 16, generator=random) + F.one_hot(labels, 16)
    return joestar.Graph.from_edge_index(edges, 2000, {"x": features, "y": labels}).to(device)


def _losses(device: str, model: str, backend: str) -> list[float]:
    torch.manual_seed(0)
    graph = _graph(device)
    net = getattr(joestar.nn, model)(16, 32, num_layers=2, out_channels=5, dropout=0.5, norm="layer_norm").to(device)
    sampler = joestar.NeighborSampler(graph, [5, 4], seed=3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, backend=backend)
    return [loss.item() for _ in range(2) for loss in step.epoch(torch.arange(1000, device=device), 128)]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", ["GraphSAGE", "GCN", "GAT", "GIN"])
def test_losses_agree_with_the_cpu(model, backend):
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = _losses("cpu", model, "eager")
    assert _losses("cuda", model, backend) == pytest.approx(expected, rel=1e-3)


def test_samples_are_identical():
    seeds = torch.arange(300)
    cpu = joestar.NeighborSampler(_graph("cpu"), [5, 4], seed=9)
    gpu = joestar.NeighborSampler(_graph("cuda"), [5, 4], seed=9)
    ours, theirs = cpu.sample(cpu.graph, seeds), gpu.sample(gpu.graph, seeds.cuda())
    for a, b in zip(ours, theirs, strict=True):
        for name in ("indptr", "indices", "srcs", "dsts"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu()), name
