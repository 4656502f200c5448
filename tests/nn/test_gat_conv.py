"""GATConv against PyG's, on full graphs and sampled blocks."""

import pytest
import torch
from torch.testing import assert_close

OPTIONS = {
    "default": {},
    "heads": {"heads": 3},
    "mean_of_heads": {"heads": 3, "concat": False},
    "slope": {"heads": 2, "negative_slope": 0.05},
    "no_loops": {"heads": 2, "add_self_loops": False},
    "no_bias": {"heads": 2, "bias": False},
    "residual": {"heads": 2, "residual": True},
    "residual_mean": {"heads": 2, "residual": True, "concat": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_full_graph(parity, full, options):
    ours, theirs = parity.nn.GATConv(6, 4, **options), parity.pyg.GATConv(6, 4, **options)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_sampled_block(parity, sampled, options):
    """PyG on the square graph over the block's sources; its first rows are the destinations'."""
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.GATConv(6, 4, **options),
        parity.pyg.GATConv(6, 4, **options),
        lambda m, x: m(block, x),
        lambda m, x: m(x, edge_index)[: block.num_dst],
        [parity.features(block.num_src, 6)],
    )


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("in_channels", [6, (6, 6)], ids=["shared", "separate"])
def test_bipartite_pair(parity, sampled, in_channels, loops):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    options = {"heads": 2, "add_self_loops": loops, "residual": True}
    parity.check(
        parity.nn.GATConv(in_channels, 4, **options),
        parity.pyg.GATConv(in_channels, 4, **options),
        lambda m, a, b: m(block, (a, b)),
        lambda m, a, b: m((a, b), edge_index, size=(block.num_src, block.num_dst)),
        [parity.features(block.num_src, 6), parity.features(block.num_dst, 6, seed=1)],
    )


def test_separate_weights_of_unequal_width(parity, sampled):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.GATConv((6, 3), 4, heads=2, add_self_loops=False),
        parity.pyg.GATConv((6, 3), 4, heads=2, add_self_loops=False),
        lambda m, a, b: m(block, (a, b)),
        lambda m, a, b: m((a, b), edge_index, size=(block.num_src, block.num_dst)),
        [parity.features(block.num_src, 6), parity.features(block.num_dst, 3, seed=1)],
    )


def test_separate_weights_from_one_tensor(parity, sampled):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.GATConv((6, 6), 4, heads=2),
        parity.pyg.GATConv((6, 6), 4, heads=2),
        lambda m, x: m(block, x),
        lambda m, x: m(x, edge_index)[: block.num_dst],
        [parity.features(block.num_src, 6)],
    )


def test_pair_without_destinations(parity, sampled):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.GATConv(6, 4, heads=2, add_self_loops=False),
        parity.pyg.GATConv(6, 4, heads=2, add_self_loops=False),
        lambda m, x: m(block, (x, None)),
        lambda m, x: m((x, None), edge_index, size=(block.num_src, block.num_dst)),
        [parity.features(block.num_src, 6)],
    )


@pytest.mark.parametrize("width", [3, None], ids=["vectors", "scalars"])
def test_edge_features(parity, full, width):
    edge_index = parity.edge_index(full.graph)  # edge features follow the graph's order
    shape = (edge_index.shape[1],) if width is None else (edge_index.shape[1], width)
    edge_attr = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    options = {"heads": 2, "edge_dim": width or 1, "add_self_loops": False}
    parity.check(
        parity.nn.GATConv(6, 4, **options),
        parity.pyg.GATConv(6, 4, **options),
        lambda m, x, e: m(full.graph, x, edge_attr=e),
        lambda m, x, e: m(x, edge_index, edge_attr=e),
        [parity.features(full.graph.num_nodes, 6), edge_attr],
    )


def test_attention_dropout(parity, full):
    """With edges in the same order and the same seed, PyG's dropout draws the same mask."""
    edge_index = parity.edge_index(full.graph)
    options = {"heads": 2, "dropout": 0.5, "add_self_loops": False}
    run = lambda m, x: m(full.graph, x)  # noqa: E731
    x = parity.features(full.graph.num_nodes, 6)
    ours, theirs = parity.nn.GATConv(6, 4, **options), parity.pyg.GATConv(6, 4, **options)
    trained = parity.check(ours, theirs, run, lambda m, x: m(x, edge_index), [x])
    evaluated = parity.check(ours.eval(), theirs.eval(), run, lambda m, x: m(x, edge_index), [x])
    assert full.graph.num_edges == 0 or not torch.equal(trained, evaluated)


def test_attention_weights(parity, sampled):
    block = sampled.blocks[0]
    conv = parity.nn.GATConv(6, 4, heads=2)
    x = parity.features(block.num_src, 6)
    out, (looped, alpha) = conv(block, x, return_attention_weights=True)
    assert_close(out, conv(block, x))
    assert alpha.shape == (looped.num_edges, 2)
    count = int(looped.indptr[-1])
    sums = torch.zeros(block.num_dst, 2).index_add(0, parity.edge_index(looped)[1], alpha[:count])
    assert_close(sums, torch.ones(block.num_dst, 2))


@pytest.mark.parametrize("in_channels", [6, (6, 3)], ids=["shared", "separate"])
def test_same_seed_gives_same_weights(parity, in_channels):
    options = {"heads": 2, "edge_dim": 3, "add_self_loops": False, "residual": True}
    torch.manual_seed(0)
    ours = parity.nn.GATConv(in_channels, 4, **options)
    torch.manual_seed(0)
    theirs = parity.pyg.GATConv(in_channels, 4, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value)
    assert repr(ours) == repr(theirs)
