"""Models of PyG on a GPU: the step as one CUDA graph trains as PyG does on the same subgraphs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from pyg.common import expected, toy_graph

import joestar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["GCN", "GAT", "GraphSAGE", "PNA", "RGCN"])
def test_training_is_that_of_pyg(name, backend):
    from torch_geometric import nn as gnn

    torch.backends.cuda.matmul.allow_tf32 = False
    data = {"GCN": ("edge_weight",), "RGCN": ("edge_type",)}.get(name, ())
    near = toy_graph(data, dtype=torch.float32)
    graph = near.to("cuda")
    torch.manual_seed(0)
    degrees = torch.tensor([4, 9, 12, 8, 5, 2])
    more = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": degrees} if name == "PNA" else {}
    if name == "RGCN":
        called = "x, edge_index, edge_type"
        layers = [(gnn.RGCNConv(8, 8, 3), f"{called} -> x"), torch.nn.ReLU(), (gnn.RGCNConv(8, 4, 3), f"{called} -> x")]
        model = gnn.Sequential(called, layers).cuda()
    else:
        model = getattr(gnn, name)(8, 8, num_layers=2, out_channels=4, **more).cuda()
    other = copy.deepcopy(model).cpu()  # PyG takes any of a node's loops on a GPU, the last one there
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=2)
    same = joestar.NeighborSampler(near, [4, 3], seed=2)
    sgd, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, other))
    step = joestar.compile(model, sampler, F.cross_entropy, sgd, backend=backend, warm_up=4)
    for number, batch in enumerate(([3, 17, 40, 5, 59, 8], [22, 31, 22, 0, 44, 12], [1, 2, 3, 51, 5, 6]), 1):
        seeds = torch.tensor(batch, device="cuda")
        ours, seeds = float(step(seeds)), seeds.cpu()
        theirs.zero_grad()
        loss = F.cross_entropy(expected(other, same, seeds, (2, -1 - number, 0), data), near.ndata["y"][seeds])
        loss.backward()
        theirs.step()
        assert ours == pytest.approx(loss.item(), rel=1e-4)
    for mine, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-3, atol=1e-5)
