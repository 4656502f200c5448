"""Models that compute with node ids over macro-batches, in CUDA graphs: as over the whole graph on the GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from tests.runtime.staged_plans import BATCH, EDGES, NODES, Whole, plans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Net(nn.Module):
    """Features know their nodes: by a table, by arithmetic, by numbers of the graph."""

    def __init__(self):
        super().__init__()
        self.net, self.table = joestar.nn.GraphSAGE(8, 6, 2, 4), nn.Embedding(NODES, 8)

    def forward(self, blocks, x):
        srcs, graph = blocks[0].srcs, blocks[0].graph
        known = (srcs % 5) / 5 + srcs / graph.num_nodes + graph.in_degrees()[srcs.long()] / graph.num_edges
        return self.net(blocks, x + self.table(srcs) + known[:, None])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_ids_are_those_of_the_whole_graph(monkeypatch, backend):
    plans(monkeypatch)(cold=400)
    torch.manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, EDGES)), NODES)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    graph.train_idx = torch.randperm(NODES)[:100]
    found = []
    for staged in (True, False):
        torch.manual_seed(1)
        net = Net().cuda()
        here = graph if staged else graph.to("cuda")
        step = joestar.compile(
            net, joestar.NeighborSampler(here, [3, 3], seed=5), F.cross_entropy,
            torch.optim.Adam(net.parameters(), 0.01), backend=backend, **({"memory": "1GiB"} if staged else {}),
        )  # fmt: skip
        if staged:
            step.first_stage = Whole(48)
        losses = [loss.item() for _ in range(2) for loss in step.epoch(here.train_idx, BATCH)]
        found.append((torch.tensor(losses), step.predict(here.train_idx, 20).cpu()))
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=2e-3, atol=2e-3)
