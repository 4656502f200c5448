"""SAGEConv against PyG's, on full graphs and sampled blocks."""

import pytest
import torch
from torch.testing import assert_close

OPTIONS = {
    "default": {},
    "sum": {"aggr": "sum"},
    "add": {"aggr": "add"},
    "max": {"aggr": "max"},
    "min": {"aggr": "min"},
    "several": {"aggr": ["mean", "max", "sum"]},
    "list_of_one": {"aggr": ["min"]},
    "normalize": {"normalize": True},
    "no_root": {"root_weight": False},
    "project": {"project": True},
    "no_bias": {"bias": False},
    "everything": {"aggr": ["min", "add"], "normalize": True, "project": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_full_graph(parity, full, options):
    ours, theirs = parity.nn.SAGEConv(6, 5, **options), parity.pyg.SAGEConv(6, 5, **options)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_sampled_block(parity, sampled, options):
    ours, theirs = parity.nn.SAGEConv(6, 5, **options), parity.pyg.SAGEConv(6, 5, **options)
    parity.check_block(ours, theirs, sampled.blocks[0])


def test_pair_of_features(parity, sampled):
    block = sampled.blocks[0]
    size = (block.num_src, block.num_dst)
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.SAGEConv((6, 3), 5, project=True),
        parity.pyg.SAGEConv((6, 3), 5, project=True),
        lambda m, a, b: m(block, (a, b)),
        lambda m, a, b: m((a, b), edge_index, size=size),
        [parity.features(block.num_src, 6), parity.features(block.num_dst, 3, seed=1)],
    )


def test_pair_without_destinations(parity, sampled):
    block = sampled.blocks[0]
    edge_index = parity.edge_index(block)
    parity.check(
        parity.nn.SAGEConv(6, 5),
        parity.pyg.SAGEConv(6, 5),
        lambda m, x: m(block, (x, None)),
        lambda m, x: m((x, None), edge_index, size=(block.num_src, block.num_dst)),
        [parity.features(block.num_src, 6)],
    )


def test_float64_and_bfloat16(parity, simple_graph):
    conv = parity.nn.SAGEConv(6, 5).double()
    x = parity.features(simple_graph.num_nodes, 6).double()
    exact = conv(simple_graph, x)
    assert exact.dtype == torch.float64
    rounded = conv.bfloat16()(simple_graph, x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded.double(), exact, rtol=0.05, atol=0.05)


def test_same_seed_gives_same_weights(parity):
    torch.manual_seed(0)
    ours = parity.nn.SAGEConv(6, 5, project=True)
    torch.manual_seed(0)
    theirs = parity.pyg.SAGEConv(6, 5, project=True)
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value)


def test_repr(parity):
    assert repr(parity.nn.SAGEConv(6, 5)) == repr(parity.pyg.SAGEConv(6, 5)) == "SAGEConv(6, 5, aggr=mean)"
