"""``joestar.inference`` gives what the model gives for blocks of the whole graph, in ranges of any size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import joestar
from joestar import fn
from joestar.bench.user_models import FOLDER, MODELS, example
from joestar.fusion import run_passes
from joestar.runtime import inference as inference_module

from .inference_checks import CLASSES, NODES, WIDTH, Base, Messages, Residuals, check, nasty_graph, network

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(scope="module")
def graph():
    return nasty_graph()


# --- the library's models ---

OPTIONS = (
    {}, {"norm": "batch_norm", "jk": "cat"}, {"norm": "layer_norm", "jk": "max", "act": "elu"},
    {"jk": "lstm", "num_layers": 3}, {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act_first": True},
)  # fmt: skip
PER_MODEL = {
    "GraphSAGE": (
        {"aggr": ["mean", "max"]}, {"project": True, "normalize": True}, {"aggr": "min", "root_weight": False}
    ),
    "GCN": ({"improved": True, "gcn_norm": "graph"}, {"gcn_norm": "graph"}, {"normalize": False}),
    "GIN": ({"train_eps": True},),
    "GAT": ({"heads": 2}, {"heads": 4, "add_self_loops": False, "residual": True}, {"heads": 2, "concat": False}),
}  # fmt: skip
CASES = [*zip(PER_MODEL, OPTIONS[1:], strict=True), ("GAT", OPTIONS[1])]
CASES += [(name, more[0]) for name, more in PER_MODEL.items()]
SLOW = [(name, OPTIONS[1]) for name in ("GCN", "GIN")]
SLOW += [(name, options) for name, more in PER_MODEL.items() for options in more[1:]]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.every(2)
def test_models(graph, name, options):
    net = network(name, **options)
    check(net, graph, net.num_layers)


def dense(graph: joestar.Graph) -> torch.Tensor:
    """``A[v, u]``: number of edges u -> v."""
    src, dst, _ = graph.coo()
    return torch.zeros(NODES, NODES, dtype=torch.float64).index_put_(
        (dst.long(), src.long()), torch.ones(1).double(), True
    )


def test_sage_is_that_of_dense_matrices(graph):
    net = network("GraphSAGE")
    mean = dense(graph)
    mean = mean / mean.sum(1, keepdim=True).clamp(min=1)
    h = graph.ndata["x"]
    for position, conv in enumerate(net.convs):
        h = conv.lin_l(mean @ h) + conv.lin_r(h)
        h = h if position else h.relu()
    torch.testing.assert_close(joestar.inference(net, graph), h, rtol=1e-10, atol=1e-10)


def test_gcn_is_that_of_dense_matrices(graph):
    """Out-degrees of sources, in-degrees of destinations, as in a block of all nodes; one loop per node."""
    net = network("GCN")
    adjacency = dense(graph).fill_diagonal_(1.0)
    scaled = adjacency / (adjacency.sum(0).sqrt() * adjacency.sum(1, keepdim=True).sqrt())
    h = graph.ndata["x"]
    for position, conv in enumerate(net.convs):
        h = scaled @ conv.lin(h) + conv.bias
        h = h if position else h.relu()
    torch.testing.assert_close(joestar.inference(net, graph), h, rtol=1e-10, atol=1e-10)


def test_gcn_by_degrees_of_the_graph_is_the_forward_pass_over_the_graph(graph):
    simple, net = graph.remove_self_loops(), network("GCN", gcn_norm="graph").eval()
    simple.ndata["x"] = graph.ndata["x"]
    with torch.no_grad():
        found = joestar.inference(net, simple)
        torch.testing.assert_close(found, net(simple, simple.ndata["x"]), rtol=1e-10, atol=1e-10)


def test_on_a_symmetric_graph_it_is_the_forward_pass_over_the_graph(graph):
    both, net = graph.to_bidirected(), network("GCN").eval()
    with torch.no_grad():
        torch.testing.assert_close(joestar.inference(net, both), net(both, both.ndata["x"]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name", ["GAT", *(pytest.param(n, marks=pytest.mark.slow) for n in ("GraphSAGE", "GCN", "GIN"))]
)
def test_float32_to_1e_5(name):
    check(network(name).float(), nasty_graph(torch.float32), tolerance=1e-5)


# --- models as users write them ---


SIMILAR = ("degree_biased_sampler", "jumping_knowledge", "update_first", "residual_norm")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SIMILAR else n for n in MODELS])
@pytest.mark.every(2)
def test_user_models(name):
    graph, module = nasty_graph(), example(FOLDER, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    for key, value in graph.edata.items():
        graph.edata[key] = value.double()
    torch.manual_seed(0)
    check(module.Net(WIDTH, 8, 2, CLASSES, 0.5, **options).double(), graph)


class AcrossNodes(Base):
    """Means over all nodes of a set, and a softmax among them: computed at once."""

    def forward(self, blocks, x):
        h = self.first(blocks[0].pull(fn.copy_u(x - x.mean(0)), "mean"))
        h = h * torch.softmax(h.sum(1), 0)[:, None] * h.shape[0]
        h = blocks[1].pull(fn.copy_u(h), "sum") / len(h)
        return self.last(h) - self.last(h).std(0)


class Ids(Base):
    """Embeddings of nodes and of their kinds, degrees, loops, and aggregation against the edges."""

    def forward(self, blocks, x):
        one, two = blocks
        h = self.first(x) + self.table(one.srcs) + self.table.weight[one.srcdata["kind"]]
        h = one.add_self_loops().pull(fn.copy_u(h), "mean") * one.in_degrees().clamp(min=1).to(h.dtype).rsqrt()[:, None]
        h = h / (1 + two.out_degrees().to(h.dtype))[:, None] + one.graph_degrees("dst")[:, None]
        back = two.reverse().pull(fn.copy_u(h[: two.num_dst]), "sum")
        return self.last(two.pull(fn.copy_u(self.second(h + back)), "mean"))


class Among(Base):
    """Attention among the parts of each row, a recurrence over them, rows in more dimensions than two."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 4, batch_first=True, dropout=0.0).double()

    def forward(self, blocks, x):
        h = self.first(x).unflatten(1, (2, 4))
        for block in blocks:
            h = block.pull(fn.copy_u(h), "mean") + h[: block.num_dst]
            h = F.scaled_dot_product_attention(h, h, h)
            h = self.cell(h)[0].transpose(1, 2).reshape(-1, 2, 4).softmax(1)
            h = (
                torch.stack([h, h.flip(2)]).amax(0)
                + torch.einsum("nhd,hd->nh", h, self.second.weight[:2, :4])[..., None]
            )
        h = h.flatten(1)
        return self.last(h)[:, [2, 0, 1, 3]].sort(dim=1).values - self.last(h).topk(2, dim=1)[0].sum(1, keepdim=True)


class Several(Base):
    """Operations with several results, computed for all nodes at once: a cell's state, the largest of layers."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 8).double()

    def forward(self, blocks, x):
        h = self.first(x)
        rows, c, n = [], torch.zeros_like(h), blocks[-1].num_dst
        for block in blocks:
            h, c = self.cell(block.pull(fn.copy_u(h), "mean"), (h[: block.num_dst], c[: block.num_dst]))
            rows.append(h[:n])
        largest, where = torch.stack(rows).max(0)
        return self.last(largest + c + where)


@pytest.mark.every(2)
@pytest.mark.parametrize("model", [Residuals, Messages, AcrossNodes, Ids, Among, Several])
def test_any_program(graph, model):
    check(model(), graph)


@pytest.mark.parametrize("name", ["edge_features", "gatv2"])
def test_messages_in_one_pass(name, monkeypatch):
    """As on a GPU, where messages are computed where they are added up."""
    monkeypatch.setattr(inference_module, "run_passes", lambda *a, **kw: run_passes(*a, **kw | {"device": "cuda"}))
    graph, module = nasty_graph(), example(FOLDER, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    for key, value in graph.edata.items():
        graph.edata[key] = value.double()
    torch.manual_seed(0)
    found = check(module.Net(WIDTH, 8, 2, CLASSES, 0.5, **options).double(), graph)
    fused = [value for value in found.plan.order if value.target is torch.ops.joestar.segment.default]
    assert fused and all(found.plan.access[value].segments for value in fused)


@pytest.mark.parametrize(("name", "edges"), [("GCN", []), ("GAT", [(0, 1)])])
def test_graphs_of_few_edges(name, edges):
    graph = joestar.Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, 3)
    graph.ndata["x"] = torch.randn(3, WIDTH, dtype=torch.float64)
    check(network(name), graph)
