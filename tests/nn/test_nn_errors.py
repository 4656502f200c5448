"""What the convolutions and models refuse, and how they say it."""

import pytest
import torch

import joestar.nn as jnn
from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.sampling import NeighborSampler

EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])


@pytest.fixture
def graph():
    return Graph.from_edge_index(EDGES, 5)


@pytest.fixture
def blocks(graph):
    return NeighborSampler(graph, [2, 2]).sample(graph, torch.tensor([0, 1], dtype=graph.indices.dtype))


CONSTRUCTORS = {
    "aggr": (lambda: jnn.SAGEConv(3, 4, aggr="median"), "SAGEConv: aggr must be one of sum, add.*got 'median'"),
    "aggr_list": (
        lambda: jnn.SAGEConv(3, 4, aggr=["mean", "lstm"]),
        r"got \['mean', 'lstm'\].*calls block.pull itself",
    ),
    "aggr_empty": (lambda: jnn.SAGEConv(3, 4, aggr=[]), "non-empty list"),
    "aggr_none": (lambda: jnn.SAGEConv(3, 4, aggr=None), "got None"),
    "lazy": (lambda: jnn.SAGEConv(-1, 4), "positive integer.*got -1 and 4. Sizes cannot be left open"),
    "triple": (lambda: jnn.GATConv((3, 3, 3), 4), r"a pair of them.*got \(3, 3, 3\) and 4"),
    "unknown_option": (lambda: jnn.SAGEConv(3, 4, agr="sum"), "SAGEConv: unknown option 'agr'"),
    "flow": (lambda: jnn.SAGEConv(3, 4, flow="target_to_source"), "flow is supported only as 'source_to_target'"),
    "gcn_cached": (lambda: jnn.GCNConv(3, 4, cached=True), "cached=True is not supported.*out of the step"),
    "gcn_loops": (lambda: jnn.GCNConv(3, 4, normalize=False, add_self_loops=True), "needs normalize=True"),
    "gcn_norm": (lambda: jnn.GCNConv(3, 4, norm="both"), "norm must be one of block, graph; got 'both'"),
    "gcn_aggr": (lambda: jnn.GCNConv(3, 4, aggr="max"), "GCNConv: aggr must be 'sum'.*got 'max'"),
    "gcn_pair": (lambda: jnn.GCNConv((3, 3), 4), "in_channels must be one integer"),
    "gat_edge_dim": (lambda: jnn.GATConv(3, 4, edge_dim=2), "edge_dim needs add_self_loops=False"),
    "gat_fill": (lambda: jnn.GATConv(3, 4, fill_value=1.0), "fill_value is supported only as 'mean'.*got 1.0"),
    "gat_heads": (lambda: jnn.GATConv(3, 4, heads=0), "heads must be a positive integer; got 0"),
    "gat_dropout": (lambda: jnn.GATConv(3, 4, dropout=1.5), "probability from 0 to 1; got 1.5"),
    "gat_aggr": (lambda: jnn.GATConv(3, 4, aggr="max"), "GATConv: aggr must be 'sum'"),
    "gat_v2": (lambda: jnn.GAT(3, 4, 2, v2=True), "GATv2Conv.*not supported"),
    "gat_width": (lambda: jnn.GAT(3, 5, 2, heads=2), "divisible by heads; got 5 and heads=2"),
    "act": (lambda: jnn.GraphSAGE(3, 4, 2, act="rleu"), "act must name a class of torch.nn.modules.*got 'rleu'"),
    "act_class": (lambda: jnn.GraphSAGE(3, 4, 2, act=torch.nn.ReLU), "a module's instance"),
    "norm": (lambda: jnn.GIN(3, 4, 2, norm="instance_norm"), "norm must be 'batch_norm', 'layer_norm'"),
    "norm_class": (lambda: jnn.GIN(3, 4, 2, norm=torch.nn.LayerNorm), "an instance of a module"),
    "jk": (lambda: jnn.GCN(3, 4, 2, jk="sum"), "GCN: jk must be one of last, cat, max, lstm, or None; got 'sum'"),
    "num_layers": (lambda: jnn.GCN(3, 4, 0), "num_layers must be a positive integer; got 0"),
}


@pytest.mark.parametrize(("construct", "message"), CONSTRUCTORS.values(), ids=CONSTRUCTORS.keys())
def test_constructor(construct, message):
    with pytest.raises(ConfigError, match=r"(?s)" + message):
        construct()


def test_number_of_blocks(blocks):
    with pytest.raises(ConfigError, match=r"GraphSAGE: expected 3 blocks, one for each layer; got 2.*3 fanouts"):
        jnn.GraphSAGE(3, 4, 3)(blocks, torch.randn(blocks[0].num_src, 3))


def test_blocks_of_another_kind():
    with pytest.raises(ConfigError, match=r"a list of joestar Blocks.*got Tensor"):
        jnn.GraphSAGE(3, 4, 2)(torch.randn(5, 3), EDGES)


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GAT", "GIN"])
def test_rows_of_x(blocks, name):
    rows = blocks[0].num_src + 1
    with pytest.raises(
        ConfigError, match=rf"Conv: expected features \[{rows - 1}, F\].*got \[{rows}, 3\].*blocks\[0\].srcs"
    ):
        getattr(jnn, name)(3, 4, 2)(blocks, torch.randn(rows, 3))


def test_features_of_x(graph):
    with pytest.raises(ConfigError, match=r"SAGEConv: expected 3 features in every row .in_channels.; got 4"):
        jnn.GraphSAGE(3, 4, 2)(graph, torch.randn(5, 4))
    with pytest.raises(ConfigError, match=r"got \[5\]"):
        jnn.GraphSAGE(3, 4, 2)(graph, torch.randn(5))


def test_rows_of_a_pair(graph):
    with pytest.raises(ConfigError, match=r"destinations .block.num_dst.; got .4, 3."):
        jnn.SAGEConv(3, 4)(graph, (torch.randn(5, 3), torch.randn(4, 3)))


def test_edge_index_instead_of_a_block():
    with pytest.raises(ConfigError, match=r"SAGEConv: expected conv.block, x.*got Tensor.*from_edge_index"):
        jnn.SAGEConv(3, 4)(EDGES, torch.randn(5, 3))


def test_gcn_inputs(graph, blocks):
    x, weight = torch.randn(5, 3), torch.rand(5)
    with pytest.raises(ConfigError, match=r"expected one tensor of source rows; got a pair"):
        jnn.GCNConv(3, 4)(graph, (x, x))
    with pytest.raises(ConfigError, match=r"edge_weight cannot be combined with add_self_loops=True"):
        jnn.GCNConv(3, 4)(graph, x, edge_weight=weight)
    x, weight = torch.randn(blocks[0].num_src, 3), torch.rand(blocks[0].num_edges)
    with pytest.raises(ConfigError, match=r"defined on a Graph only"):
        jnn.GCNConv(3, 4, add_self_loops=False)(blocks[0], x, edge_weight=weight)
    with pytest.raises(ConfigError, match=r"improved=True on a sampled Block needs norm='graph'"):
        jnn.GCNConv(3, 4, improved=True)(blocks[0], x)


def test_edge_values(graph):
    x, values = torch.randn(5, 3), torch.rand(5)
    with pytest.raises(ConfigError, match=r"GIN: its convolution has no edge_weight"):
        jnn.GIN(3, 4, 2)(graph, x, edge_weight=values)
    with pytest.raises(ConfigError, match=r"GCN: its convolution has no edge_attr"):
        jnn.GCN(3, 4, 2)(graph, x, edge_attr=values)
    with pytest.raises(ConfigError, match=r"edge_weight needs one tensor for each of 2 layers.*got 3"):
        jnn.GCN(3, 4, 2, add_self_loops=False)(graph, x, edge_weight=[values] * 3)
    with pytest.raises(ConfigError, match=r"edge_attr came, but the layer was constructed without edge_dim"):
        jnn.GAT(3, 4, 2)(graph, x, edge_attr=values)
