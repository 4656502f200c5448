"""``joestar.inference`` in use: what stays as it is, a compiled step, memory, and what cannot be."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import joestar
from joestar import fn
from joestar.errors import CaptureError, ConfigError, GraphError, SeedError
from joestar.runtime.inference import Inference

from .inference_checks import CLASSES, NODES, WIDTH, Base, Messages, Residuals, in_one_piece, nasty_graph, network

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.fixture(scope="module")
def graph():
    return nasty_graph()


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


# --- several results ---


class Structured(Base):
    """A dict of rows of two layers, two views of one tensor, the features, and a number."""

    def forward(self, blocks, x):
        one, two = blocks
        n = two.num_dst
        hidden = self.first(one.pull(fn.copy_u(x), "mean")).relu()
        left, right = self.second(two.pull(fn.copy_u(hidden), "sum")).chunk(2, 1)
        return {"logits": self.last(hidden[:n]), "parts": (left, right), "x": x[:n], "layers": 2, "none": None}


@pytest.mark.parametrize("rows", [7, None])
def test_a_structure_comes_back_as_it_is(graph, rows):
    expected, idx = in_one_piece(Structured(), graph, 2), torch.tensor([7, 0, 7, 60])
    found = Inference(Structured(), graph, 2)
    every, some = (found.run(ids, batch_size=rows, progress=False) for ids in (None, idx))
    torch.testing.assert_close(every, expected, rtol=1e-10, atol=1e-10)
    picked = tree_map(lambda value: value[idx] if isinstance(value, torch.Tensor) else value, expected)
    torch.testing.assert_close(some, picked, rtol=1e-10, atol=1e-10)
    tensors = [every["logits"], *every["parts"], every["x"], graph.ndata["x"]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


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


def test_a_step_scores_a_structure_from_all_neighbours(graph):
    net = Structured()
    step = joestar.compile(
        net, joestar.NeighborSampler(graph, [2, 2]), lambda out, y: F.cross_entropy(out["logits"], y),
        torch.optim.SGD(net.parameters(), 0.1), backend="eager", execution="exact",
    )  # fmt: skip
    expected = in_one_piece(net, graph, 2)["logits"]
    right = (expected.argmax(1) == graph.ndata["y"]).double().mean().item()
    assert step.evaluate(torch.arange(NODES), full=True) == {"accuracy": pytest.approx(right)}


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


class Stacked(Base):
    """Rows stand in the second dimension of what is stored."""

    def forward(self, blocks, x):
        (block,) = blocks
        every = torch.stack([x[: block.num_dst], block.pull(fn.copy_u(x), "mean")])
        return self.last(self.first(every.sum(0)))


def test_a_budget_is_said_to_be_too_small_with_the_sizes_of_the_graph(graph):
    with pytest.raises(ConfigError, match=r"the largest of them 5\.7 KiB \(2 rows of 61x6\)"):
        Inference(Stacked(), graph, 1).run(memory_budget=6000)


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
        (Random, r"test_inference_use\.py:\d+ in forward: h = F\.dropout.*is random in evaluation mode.*training=self"),
        (Counts, r"test_inference_use\.py:\d+ in forward: self\.calls\.add_.*writes to a buffer in evaluation mode"),
        (Frozen, r"test_inference_use\.py:\d+ in forward: x = F\.batch_norm.*would update its running statistics"),
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
