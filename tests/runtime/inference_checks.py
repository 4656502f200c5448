"""What the tests of inference over the whole graph share: a nasty graph, models, and the comparison."""

import torch
from torch import nn
from torch.nn import functional as F

import joestar
from joestar import fn
from joestar.runtime.inference import Inference

NODES, WIDTH, CLASSES = 61, 6, 4


def nasty_graph(dtype=torch.float64) -> joestar.Graph:
    """Directed; node 0 is isolated, node 1 has an edge from every node, edges occur twice, some nodes have loops."""
    random = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(1, NODES, (180,), generator=random) for _ in range(2))
    hub = torch.stack([torch.arange(1, NODES), torch.ones(NODES - 1, dtype=torch.int64)])
    loops = torch.arange(5, 15).expand(2, -1)
    edges = torch.cat([torch.stack([src, dst]), hub, torch.stack([src, dst])[:, :40], loops], 1)
    graph = joestar.Graph.from_edge_index(edges, NODES)
    graph.ndata["x"] = torch.randn(NODES, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    graph.ndata["kind"] = torch.randint(0, 3, (NODES,), generator=random)
    graph.ndata["y"] = torch.randint(0, CLASSES, (NODES,), generator=random)
    graph.edata["f"] = torch.randn(graph.num_edges, 3, generator=random, dtype=torch.float64).to(dtype)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=random, dtype=torch.float64).to(dtype)
    return graph


def in_one_piece(model: nn.Module, graph: joestar.Graph, layers: int) -> torch.Tensor:
    """The model in evaluation mode on blocks of the whole graph, operation by operation."""
    everything = torch.arange(graph.num_nodes)
    blocks = joestar.NeighborSampler(graph, [-1] * layers).sample(graph, everything)
    model.eval()
    with torch.no_grad():
        return model(blocks, graph.ndata["x"][blocks[0].srcs])


def check(model: nn.Module, graph: joestar.Graph, layers: int = 2, tolerance: float = 1e-10) -> Inference:
    """Compares ranges of 1, 7 and all nodes with the whole; gives the captured program."""
    expected = in_one_piece(model, graph, layers)
    found = Inference(model, graph, layers)
    for rows in (1, 7, None):
        got = found.run(batch_size=rows, progress=False)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    return found


def network(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_layers": 2, "out_channels": CLASSES, "dropout": 0.5} | options
    net = getattr(joestar.nn, name)(WIDTH, 8, **options).double()
    for module in net.modules():  # statistics that are not those of nothing
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net


class Base(nn.Module):
    """Two layers with a few weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(width, 8).double() for width in (WIDTH, 8))
        self.skip, self.last = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
        self.table = nn.Embedding(NODES, 8).double()


class Residuals(Base):
    """Rows of the input are read again in both layers; several aggregations in a layer."""

    def forward(self, blocks, x):
        one, two = blocks
        h = self.first(one.pull(fn.copy_u(x), "mean")) + self.skip(x[: one.num_dst])
        h = F.gelu(h) + one.pull(fn.copy_u(self.skip(x)), "max")
        z = torch.cat([two.pull(fn.copy_u(h), "sum"), h[: two.num_dst]], 1).view(-1, 2, 8).mean(1)
        return self.last(self.second(z) * self.skip(x[: two.num_dst]).sigmoid())


class Messages(Base):
    """Functions of both ends and of edge data, attention by hand, normalised over each node's edges."""

    def message(self, edges):
        return F.elu(edges.src["h"] - edges.dst["h"]) * edges.data["f"].sum(1, keepdim=True)

    def forward(self, blocks, x):
        h = self.first(x)
        for block in blocks:
            own = h[: block.num_dst]
            score = block.apply_edges(fn.u_dot_v(h, own)).tanh() + block.edata["w"]
            alpha = block.edge_softmax(score.squeeze(-1) if score.dim() > 1 else score)
            got = block.pull(self.message, "sum", src={"h": h}, dst={"h": own})
            h = self.second(block.pull(fn.u_mul_e(h, alpha), "sum") + got) + own
        return self.last(h)
