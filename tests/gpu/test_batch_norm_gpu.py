"""Batch norm of rows, compiled: values of every dtype, the same bits every time, and training beside plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fusion.layer_forms import Net, Sage
from ops.batch_norms import SHAPES, compare

import joestar
from joestar.kernels import gpu

from .moved import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_values_and_sums(dtype):
    compare(on_gpu(gpu.batch_norm_rows), on_gpu(gpu.batch_norm_rows_sums), dtype, (*SHAPES, (70_001, 128, 70_000)))


def test_the_same_every_time():
    x, by = (torch.randn(100_003, 100, device="cuda") + 3 for _ in range(2))
    weight, count = torch.randn(100, device="cuda"), torch.tensor(99_000, device="cuda")
    first = None
    for _ in range(60):
        made = gpu.batch_norm_rows(x, weight, weight, count, 1e-5)
        made = (*made, gpu.batch_norm_rows_sums(by, x, count, made[1], made[3]))
        first = first or made
        assert all(torch.equal(again, once) for again, once in zip(made, first, strict=True))


@pytest.mark.usefixtures("exact_products")
def test_training():
    """Two layers of SAGE over all neighbours: losses, weights and running averages of a plain loop of PyTorch."""
    random = torch.Generator().manual_seed(0)
    edges, features = torch.randint(0, 400, (2, 3000), generator=random), torch.randn(400, 24, generator=random)
    labels = torch.randint(0, 5, (400,), generator=random)
    torch.manual_seed(1)
    net = Net(Sage, 24, 32, 5, layers=2, norm="batch", dropout=0.0).cuda()
    twin = copy.deepcopy(net).double()
    graph = joestar.Graph.from_edge_index(edges, 400, {"x": features, "y": labels}).to("cuda")
    optimizer, others = (torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in (net, twin))
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1, -1]), F.cross_entropy, optimizer)
    edges, features, labels = edges.cuda(), features.double().cuda(), labels.cuda()
    found, expected = [], []
    for seeds in torch.randperm(400, generator=random).cuda().split(100):
        found.append(float(step(seeds)))
        loss = F.cross_entropy(_plain(twin, edges, features, seeds), labels[seeds])
        others.zero_grad()
        loss.backward()
        others.step()
        expected.append(float(loss))
    assert sum(place.pattern == "batch-norm" and place.fired for place in step.report().programs[0].places) == 2
    assert found == pytest.approx(expected, rel=1e-4)
    for mine, other in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-3, atol=1e-4)


def _plain(net: Net, edges, x, seeds):
    """The seeds' logits, of their two-hop neighbourhood: statistics are those of the nodes that a batch has."""
    near = torch.isin(edges[1], seeds)
    once = torch.cat([seeds, edges[0][near]]).unique()
    for conv, norm, rows in zip(net.convs, net.norms, (once, seeds), strict=True):
        degree = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)[:, None]
        near = torch.zeros(len(x), x.shape[1], dtype=x.dtype, device=x.device).index_add(0, edges[1], x[edges[0]])
        y = F.relu(norm(conv.left(near[rows] / degree[rows]) + conv.right(x[rows])))
        x = y.new_zeros(len(x), y.shape[1]).index_copy(0, rows, y)
    return net.classify(x[seeds])
