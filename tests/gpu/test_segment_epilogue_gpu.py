"""Segment programs with an epilogue, compiled: values of every setting, and training beside a plain loop of PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fusion.layer_forms import Film, Net
from ops.segments import structure
from ops.structures import structures
from ops.test_segment_bias_relu import ACTIVATED, check_activated

import joestar
from joestar.fusion.backend import segment_epilogue
from joestar.kernels import gpu, tune

from .moved import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RUN = on_gpu(gpu.segment_bias_relu)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ACTIVATED)
def test_values(name, dtype, tolerance):
    for s in structures() if name == "film" else [structure("padded", torch.int32)]:
        check_activated(RUN, name, 40, s, dtype, tolerance)


@pytest.mark.parametrize("place", range(4))
def test_every_setting(place, monkeypatch):
    monkeypatch.setattr(tune, "choose", lambda kernel, shape, given, *rest: given[min(place, len(given) - 1)])
    for width in (1, 33, 128, 256):
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
            check_activated(RUN, "film", width, structure("padded", torch.int32), dtype, tolerance)


def test_training(monkeypatch):
    """Two layers of FiLM over all neighbours, without dropout: the losses and weights of a plain loop of PyTorch."""
    made, run = [], segment_epilogue.run
    monkeypatch.setattr(segment_epilogue, "run", lambda graph: made.append(run(graph)))
    monkeypatch.setattr("joestar.fusion.backend.first.FirstPasses.uuid", lambda self: None)
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 400, (2, 3000), generator=random).cuda()
    features, labels = (
        torch.randn(400, 24, generator=random).cuda(),
        torch.randint(0, 5, (400,), generator=random).cuda(),
    )
    torch.manual_seed(1)
    net = Net(Film, 24, 32, 5, layers=2, dropout=0.0).cuda()
    twin = copy.deepcopy(net).double()
    graph = joestar.Graph.from_edge_index(edges.cpu(), 400, {"x": features.cpu(), "y": labels.cpu()}).to("cuda")
    optimizer, others = (torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in (net, twin))
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1, -1]), F.cross_entropy, optimizer)
    found, expected = [], []
    for seeds in torch.randperm(400, generator=random).cuda().split(100):
        found.append(float(step(seeds)))
        loss = F.cross_entropy(_plain(twin, edges, features.double())[seeds], labels[seeds])
        others.zero_grad()
        loss.backward()
        others.step()
        expected.append(float(loss))
    assert sum(made) == 2
    assert found == pytest.approx(expected, rel=1e-4)
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-3, atol=1e-4)


def _plain(net: Net, edges, x):
    """The same of every node of the graph."""
    degree = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)[:, None]
    for conv in net.convs:
        beta, gamma = conv.film(x).chunk(2, 1)
        messages = (gamma[edges[1]] * conv.lin(x)[edges[0]] + beta[edges[1]]).relu()
        x = conv.skip(x) + messages.new_zeros(len(x), messages.shape[1]).index_add(0, edges[1], messages) / degree
        x = x.relu()
    return net.classify(x)
