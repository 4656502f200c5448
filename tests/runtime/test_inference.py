"""``joestar.inference`` gives what the model gives for blocks of the whole graph, in ranges of any size."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import joestar
from joestar import fn
from joestar.bench.user_models import FOLDER, MODELS, example
from joestar.errors import CaptureError, ConfigError, GraphError, SeedError
from joestar.fusion import run_passes
from joestar.runtime import inference as inference_module
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


@pytest.fixture(scope="module")
def graph():
    return nasty_graph()


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


def network(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_layers": 2, "out_channels": CLASSES, "dropout": 0.5} | options
    net = getattr(joestar.nn, name)(WIDTH, 8, **options).double()
    for module in net.modules():  # statistics that are not those of nothing
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net


@pytest.mark.parametrize(("name", "options"), CASES)
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
def test_user_models(name):
    graph, module = nasty_graph(), example(FOLDER, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    for key, value in graph.edata.items():
        graph.edata[key] = value.double()
    torch.manual_seed(0)
    check(module.Net(WIDTH, 8, 2, CLASSES, 0.5, **options).double(), graph)


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


@pytest.mark.parametrize("model", [Residuals, Messages, AcrossNodes, Ids, Among])
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
    fused = [value for value in found.plan.order if value.target is torch.ops.joestar.edge_map.default]
    assert fused and all(found.plan.access[value].segments for value in fused)


@pytest.mark.parametrize(("name", "edges"), [("GCN", []), ("GAT", [(0, 1)])])
def test_graphs_of_few_edges(name, edges):
    graph = joestar.Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, 3)
    graph.ndata["x"] = torch.randn(3, WIDTH, dtype=torch.float64)
    check(network(name), graph)


# --- nothing else changes ---


def test_rows_of_some_nodes(graph):
    net = network("GraphSAGE")
    found = Inference(net, graph)
    every = found.run(progress=False)
    idx = torch.tensor([7, 0, 7, 60])
    assert torch.equal(found.run(idx, batch_size=9, progress=False), every[idx])
    assert every.shape == (NODES, CLASSES) and not every.requires_grad
    for wrong in ([1, NODES], torch.tensor([NODES]), torch.tensor([], dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(SeedError, match="idx"):
            found.run(wrong)


def test_flags_and_random_generators_stay(graph):
    net = network("GAT", norm="batch_norm")
    net.train()
    net.norms[0].eval()
    flags = [module.training for module in net.modules()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    joestar.inference(net, graph, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in net.modules()] == flags
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.is_grad_enabled()


def test_a_result_is_a_tensor_of_its_own(graph):
    class Nothing(nn.Module):
        def forward(self, blocks, x):
            return x[: blocks[-1].num_dst].to(torch.float64)

    found = joestar.inference(Nothing(), graph, layers=1)
    assert torch.equal(found, graph.ndata["x"]) and found.data_ptr() != graph.ndata["x"].data_ptr()


def test_parameters_may_change_in_between(graph):
    net = network("GCN")
    found = Inference(net, graph)
    found.run(progress=False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    torch.testing.assert_close(found.run(progress=False), in_one_piece(net, graph, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "dtype"), [("GraphSAGE", torch.bfloat16), ("GAT", torch.float16)])
def test_short_features_under_autocast(name, dtype):
    graph, net = nasty_graph(dtype), network(name).float()
    with torch.autocast("cpu", dtype):
        expected = in_one_piece(net, graph, 2)
    found = joestar.inference(net, graph, autocast=dtype, batch_size=7)
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


def test_progress_bar(graph, capfd):
    joestar.inference(network("GraphSAGE"), graph, progress=True)
    shown = capfd.readouterr()
    assert "122/122" in shown.err and not shown.out, "two stages of 61 nodes"
    joestar.inference(network("GraphSAGE"), graph)
    assert not capfd.readouterr().err, "no terminal"


# --- from a compiled step ---


def test_a_step_predicts_and_scores_from_all_neighbours(graph):
    net = network("GraphSAGE")
    sampler, idx = joestar.NeighborSampler(graph, [2, 2]), torch.arange(0, NODES, 2)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, backend="eager", execution="exact")
    for _ in range(2):
        list(step.epoch(idx, 20))
        expected = in_one_piece(net, graph, 2)
        net.train()
        torch.testing.assert_close(step.predict(idx, full=True), expected[idx], rtol=1e-10, atol=1e-10)
        right = (expected.argmax(1) == graph.ndata["y"])[idx].double().mean().item()
        assert step.evaluate(idx, full=True) == {"accuracy": pytest.approx(right)}


# --- memory ---


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation gives, views aside."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point and tensor._base is None:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return result


def test_a_range_stays_within_the_budget():
    """Values per edge would be 80 times as large as what is allowed, and the rows of a layer fit just so."""
    nodes, degree = 2000, 40
    src = torch.randint(0, nodes, (nodes * degree,), generator=torch.Generator().manual_seed(0))
    graph = joestar.Graph.from_edge_index(torch.stack([src, torch.arange(nodes).repeat_interleave(degree)]), nodes)
    graph.ndata["x"] = torch.randn(nodes, WIDTH, dtype=torch.float64)
    graph.edata["f"] = torch.randn(graph.num_edges, 3, dtype=torch.float64)
    graph.edata["w"] = torch.randn(graph.num_edges, dtype=torch.float64)
    net, found = Messages(), None
    found = Inference(net, graph, 2)
    per_edge, rows = graph.num_edges * 8 * 8, nodes * 8 * 8
    with Largest() as free:
        expected = found.run(progress=False)
    assert free.bytes == per_edge, "what is to be avoided"
    with Largest() as tight:
        torch.testing.assert_close(found.run(memory_budget=5 * rows, progress=False), expected, rtol=1e-10, atol=1e-10)
    assert tight.bytes <= 3 * rows, "what the budget leaves beside two layers' rows of all nodes"


def test_what_only_aggregates_stores_nothing_per_edge(graph):
    found = Inference(network("GraphSAGE"), graph)
    assert not any(stage.edge_bytes for stage in found.plan.stages)
    assert {value.space for stage in found.plan.stages for value in stage.outputs} == {found.plan.values.nodes}


def test_a_budget_that_is_too_small(graph):
    found = Inference(network("GraphSAGE"), graph)
    with pytest.raises(ConfigError, match=r"memory_budget of 100 B is too small: stage 1 of 2 keeps .*61 rows of 4"):
        found.run(memory_budget=100)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="memory_budget must be a positive number of bytes"):
            found.run(memory_budget=wrong)


def test_a_budget_that_one_node_exceeds(graph):
    found = Inference(Messages(), graph, 2)
    rows = NODES * 8 * 8
    with pytest.raises(
        ConfigError, match=r"in stage \d node 1 alone, with \d+ in-edges, needs .* store nothing per edge"
    ):
        found.run(memory_budget=2 * rows + 8000)


# --- what cannot be ---


class Random(Base):
    def forward(self, blocks, x):
        h = F.dropout(self.first(x), 0.5)
        for block in blocks:
            h = block.pull(fn.copy_u(h), "mean")
        return self.last(h)


class Counts(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, blocks, x):
        self.calls.add_(1)
        for block in blocks:
            x = block.pull(fn.copy_u(x), "mean")
        return self.last(self.first(x))


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, blocks, x):
        x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        for block in blocks:
            x = block.pull(fn.copy_u(x), "mean")
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Random, r"test_inference\.py:\d+ in forward: h = F\.dropout.*is random in evaluation mode.*training=self"),
        (Counts, r"test_inference\.py:\d+ in forward: self\.calls\.add_.*writes to a buffer in evaluation mode"),
        (Frozen, r"test_inference\.py:\d+ in forward: x = F\.batch_norm.*would update its running statistics"),
    ],
)
def test_what_is_refused_names_the_line(graph, model, message):
    with pytest.raises(CaptureError, match=re.compile(message, re.DOTALL)):
        Inference(model(), graph, 2)


def test_unusable_arguments(graph):
    net = network("GraphSAGE")
    with pytest.raises(ConfigError, match=r"does not say how many blocks it takes.*layers="):
        joestar.inference(Residuals(), graph)
    net.num_layers, shorter = 2, network("GraphSAGE", num_layers=3)
    shorter.num_layers = 2
    with pytest.raises(ConfigError, match=r"was run with 2 blocks.*did not read its parameter convs\.2"):
        joestar.inference(Zipped(), graph)
    with pytest.raises(ConfigError, match="expected 2 blocks"):
        joestar.inference(net, graph, layers=3)
    for wrong in (0, 2.0, True):
        with pytest.raises(ConfigError, match="layers must be a positive integer"):
            joestar.inference(net, graph, layers=wrong)
    with pytest.raises(ConfigError, match="batch_size"):
        joestar.inference(net, graph, batch_size=0)
    with pytest.raises(GraphError, match="has no features"):
        joestar.inference(net, joestar.Graph.from_csc(graph.indptr, graph.indices))
    with pytest.raises(GraphError, match=r"needs a joestar\.Graph"):
        joestar.inference(net, "cora")
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        joestar.inference("net", graph)
    with pytest.raises(ConfigError, match="autocast"):
        joestar.inference(net, graph, autocast=torch.int8)
    with pytest.raises(ConfigError, match="expected 7 features"):
        joestar.inference(joestar.nn.GraphSAGE(7, 8, 2, CLASSES).double(), graph)


class Zipped(Base):
    """Says 2 where it has 3 layers; ``zip`` drops one silently."""

    num_layers = 2

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([joestar.nn.SAGEConv(WIDTH, WIDTH).double() for _ in range(3)])
        del self.first, self.second, self.skip, self.last, self.table

    def forward(self, blocks, x):
        for conv, block in zip(self.convs, blocks, strict=False):
            x = conv(block, x)
        return x
