"""GCNConv against PyG's on full graphs, and against its definitions on blocks."""

import warnings
from itertools import combinations

import pytest
import torch
from torch.testing import assert_close

OPTIONS = {
    "default": {},
    "no_loops": {"add_self_loops": False},
    "no_normalize": {"normalize": False},
    "no_bias": {"bias": False},
}


@pytest.mark.parametrize("norm", ["block", "graph"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_full_graph(parity, full, options, norm):
    ours, theirs = parity.nn.GCNConv(6, 5, norm=norm, **options), parity.pyg.GCNConv(6, 5, **options)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("norm", ["block", "graph"])
def test_improved(parity, simple_graph, norm):
    edge_index = parity.edge_index(simple_graph)
    ones = torch.ones(edge_index.shape[1])  # without weights PyG forgets the 2 in A + 2 I
    x = parity.features(simple_graph.num_nodes, 6)
    parity.check(
        parity.nn.GCNConv(6, 5, improved=True, norm=norm),
        parity.pyg.GCNConv(6, 5, improved=True),
        lambda m, x: m(simple_graph, x),
        lambda m, x: m(x, edge_index, ones),
        [x],
    )


@pytest.mark.parametrize("options", [{"normalize": False}, {"add_self_loops": False}], ids=["plain", "normalized"])
def test_edge_weight(parity, full, options):
    edge_index = parity.edge_index(full.graph)  # edge values follow the graph's order
    weight = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(2)) + 0.1
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(
        parity.nn.GCNConv(6, 5, **options),
        parity.pyg.GCNConv(6, 5, **options),
        lambda m, x, w: m(full.graph, x, edge_weight=w),
        lambda m, x, w: m(x, edge_index, w),
        [x, weight],
        tolerance=2e-5,
    )


def test_edge_weight_on_block(parity, sampled):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    weight = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(2))
    parity.check(
        parity.nn.GCNConv(6, 5, normalize=False),
        parity.pyg.GCNConv(6, 5, normalize=False),
        lambda m, x, w: m(block, x, edge_weight=w),
        lambda m, x, w: m(x, edge_index, w)[: block.num_dst],
        [parity.features(block.num_src, 6), weight],
    )


def _dense(parity, block, loops: bool) -> torch.Tensor:
    """Number of edges from every source to every destination ``[num_dst, num_src]``; one self-loop each if asked."""
    src, dst = parity.edge_index(block)
    dense = torch.zeros(block.num_dst, block.num_src, dtype=torch.float64)
    dense.index_put_((dst, src), torch.ones(src.shape[0], dtype=torch.float64), accumulate=True)
    if loops:
        diagonal = torch.arange(block.num_dst)
        dense[diagonal, diagonal] = 1.0
    return dense


def _power(degrees: torch.Tensor) -> torch.Tensor:
    return torch.where(degrees > 0, degrees.double().clamp(min=1) ** -0.5, 0.0)


@pytest.mark.parametrize("loops", [True, False])
def test_block_norm_on_sampled_block(parity, sampled, loops):
    block = sampled.blocks[0]
    conv = parity.nn.GCNConv(6, 5, add_self_loops=loops)
    parity.randomize(conv)
    x = parity.features(block.num_src, 6)
    dense = _dense(parity, block, loops)
    scaled = _power(dense.sum(1))[:, None] * dense * _power(dense.sum(0))
    expected = scaled @ x.double() @ conv.lin.weight.double().t() + conv.bias.double()
    assert_close(conv(block, x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"improved": True}, {"add_self_loops": False}], ids=["loops", "improved", "no"]
)
def test_graph_norm_on_all_edges_is_the_full_layer(parity, simple_graph, options):
    conv = parity.nn.GCNConv(6, 5, norm="graph", **options)
    parity.randomize(conv)
    x = parity.features(simple_graph.num_nodes, 6)
    seeds = [9, 3, 22, 1]
    (block,) = parity.sample(simple_graph, [-1], seeds)
    out = conv(block, x[block.srcs.long()])
    assert_close(out, conv(simple_graph, x)[seeds], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"improved": True}, {"add_self_loops": False}], ids=["loops", "improved", "no"]
)
def test_graph_norm_is_unbiased(parity, options):
    """The mean over every equally likely sample of 2 out of 4 neighbours is the layer on the whole graph."""
    edges = torch.tensor([[1, 2, 3, 4, 0, 2, 4], [0, 0, 0, 0, 1, 1, 3]])
    graph = parity.Graph.from_edge_index(edges, 5)
    conv = parity.nn.GCNConv(6, 5, norm="graph", **options).double()
    parity.randomize(conv)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outs = []
    for picks in combinations([1, 2, 3, 4], 2):
        srcs = torch.tensor([0, *picks])
        block = parity.Block(torch.tensor([0, 2]), torch.tensor([1, 2]), srcs, srcs[:1], graph)
        outs.append(conv(block, x[srcs]))
    assert_close(torch.stack(outs).mean(0), conv(graph, x)[:1])


def test_graph_norm_gradient(parity, sampled):
    block = sampled.blocks[0]
    conv = parity.nn.GCNConv(3, 2, norm="graph").double()
    x = parity.features(block.num_src, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: conv(block, x), (x, *conv.parameters()))


def test_zero_degrees_keep_weight_gradients_finite(parity):
    graph = parity.Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 3)
    weight = torch.zeros(2, requires_grad=True)
    conv = parity.nn.GCNConv(4, 4, add_self_loops=False)
    conv(graph, torch.randn(3, 4), edge_weight=weight).sum().backward()
    assert torch.isfinite(weight.grad).all()


def test_bfloat16_degrees_are_exact(parity):
    """301 = 300 neighbours and a self-loop is no bfloat16; the factors are computed in float32."""
    hub = torch.stack([torch.arange(1, 301), torch.zeros(300, dtype=torch.long)])
    graph = parity.Graph.from_edge_index(hub, 301)
    conv = parity.nn.GCNConv(4, 4)
    x = torch.randn(301, 4, generator=torch.Generator().manual_seed(0))
    exact = conv(graph, x)
    rounded = conv.bfloat16()(graph, x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded.float(), exact, rtol=0.03, atol=0.03)


def test_same_seed_gives_same_weights(parity):
    torch.manual_seed(0)
    ours = parity.nn.GCNConv(6, 5)
    torch.manual_seed(0)
    theirs = parity.pyg.GCNConv(6, 5)
    assert_close(ours.lin.weight, theirs.lin.weight)
    assert repr(ours) == repr(theirs)


@pytest.mark.usefixtures("cheapest_captures")
def test_loops_of_the_graph_are_warned_of():
    import joestar

    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]])
    looped = joestar.Graph.from_edge_index(edges, 3, {"x": torch.randn(3, 4), "y": torch.tensor([0, 1, 0])})
    for graph, norm, options, warned in (
        (looped, "graph", {}, True), (looped.remove_self_loops(), "graph", {}, False), (looped, "block", {}, False),
        (looped, "graph", {"add_self_loops": False}, False),
    ):  # fmt: skip
        net = joestar.nn.GCN(4, 8, 2, 2, gcn_norm=norm, **options)
        sampler = joestar.NeighborSampler(graph, [2, 2])
        for use in (lambda n=net, s=sampler: joestar.compile(n, s), lambda n=net, g=graph: joestar.inference(n, g)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                use()
            texts = [str(w.message) for w in said if "remove_self_loops" in str(w.message)]
            assert bool(texts) == warned, (norm, options)
