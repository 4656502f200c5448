"""GraphSAGE, GCN, GAT and GIN against PyG's, with every option, on full graphs and on blocks."""

import pytest
import torch
from torch.testing import assert_close

MODELS = ["GraphSAGE", "GCN", "GAT", "GIN"]
OPTIONS = {
    "default": {},
    "out_channels": {"out_channels": 4},
    "act": {"act": "leaky_relu", "act_kwargs": {"negative_slope": 0.3}, "out_channels": 4},
    "prelu": {"act": "PReLU", "out_channels": 4},
    "no_act": {"act": None, "out_channels": 4},
    "swish": {"act": "swish", "out_channels": 4},
    "batch_norm": {"norm": "batch_norm", "out_channels": 4},
    "batch_norm_kwargs": {"norm": "BatchNorm", "norm_kwargs": {"momentum": 0.3, "affine": False}, "out_channels": 4},
    "act_first": {"norm": "batch_norm", "act_first": True, "out_channels": 4},
    "layer_norm_graph": {"norm": "layer_norm", "out_channels": 4},
    "layer_norm_node": {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "out_channels": 4},
    "layer_norm_plain": {"norm": "layer", "norm_kwargs": {"affine": False}, "out_channels": 4},
    "jk_last": {"jk": "last", "out_channels": 4, "norm": "batch_norm"},
    "jk_cat": {"jk": "cat", "out_channels": 4},
    "jk_cat_without_out": {"jk": "cat", "norm": "layer_norm"},
    "jk_max": {"jk": "max", "out_channels": 4},
    "jk_lstm": {"jk": "lstm", "out_channels": 4},
}
OWN_OPTIONS = {
    "GraphSAGE": {"aggr": "max", "project": True},
    "GCN": {"bias": False},
    "GAT": {"heads": 2, "residual": True},
    "GIN": {"train_eps": True, "eps": 0.2},
}


def _make(parity, name, num_layers=3, **options):
    args = (6, 8, num_layers)
    return getattr(parity.nn, name)(*args, **options), getattr(parity.pyg, name)(*args, **options)


def _run_pyg_on_blocks(theirs, blocks, x, edge_indices):
    """``BasicGNN.forward`` of PyG with a graph of its own for every layer."""
    xs = []
    for i, (conv, norm, block) in enumerate(zip(theirs.convs, theirs.norms, blocks, strict=True)):
        x = conv(x, edge_indices[i])[: block.num_dst]
        if i < theirs.num_layers - 1 or theirs.jk_mode is not None:
            x = theirs.act(x) if theirs.act is not None and theirs.act_first else x
            x = norm(x)
            x = theirs.act(x) if theirs.act is not None and not theirs.act_first else x
            xs.append(theirs.dropout(x))
            x = xs[-1]
    if hasattr(theirs, "jk"):
        x = theirs.jk([value[: blocks[-1].num_dst] for value in xs])
    return theirs.lin(x) if hasattr(theirs, "lin") else x


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("full", ["simple", "mixed"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_options_on_full_graph(parity, full, name, options, training):
    ours, theirs = _make(parity, name, **options)
    ours.train(training), theirs.train(training)
    # float64: normalisation over 24 rows magnifies float32 rounding, and the other tests are in float32
    ours, theirs = ours.double(), theirs.double()
    x = parity.features(full.graph.num_nodes, 6).double()
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("name", MODELS)
def test_float32_with_own_options(parity, full, name):
    ours, theirs = _make(parity, name, out_channels=4, jk="cat", **OWN_OPTIONS[name])
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("jk", [None, "last", "cat", "max", "lstm"])
@pytest.mark.parametrize("name", ["GraphSAGE", "GAT", "GIN"])
def test_sampled_blocks(parity, sampled, name, jk):
    """Every layer on a block of its own, BatchNorm in training mode."""
    blocks = sampled.blocks
    edge_indices = [parity.edge_index(block) for block in blocks]
    ours, theirs = _make(parity, name, num_layers=2, out_channels=4, norm="batch_norm", jk=jk)
    if name == "GIN":  # the MLP's BatchNorm would see PyG's extra rows: PyG's run takes all sources as destinations
        ours.eval(), theirs.eval()
    out = parity.check(
        ours.double(),
        theirs.double(),
        lambda m, x: m(blocks, x),
        lambda m, x: _run_pyg_on_blocks(m, blocks, x, edge_indices),
        [parity.features(blocks[0].num_src, 6).double()],
    )
    assert out.shape == (blocks[-1].num_dst, 4)


@pytest.mark.parametrize("options", [{}, {"jk": "max"}], ids=["plain", "jk"])
@pytest.mark.parametrize(("name", "own"), [*((name, {}) for name in MODELS), ("GCN", {"gcn_norm": "graph"})])
def test_all_neighbours_equal_the_full_graph(parity, simple_graph, name, own, options):
    """Blocks with every neighbour give what PyG gives on the whole graph (GCN: under norm="graph")."""
    own = {"gcn_norm": "graph"} if name == "GCN" else own
    ours = getattr(parity.nn, name)(6, 8, 2, 4, **options, **own)
    theirs = getattr(parity.pyg, name)(6, 8, 2, 4, **options)
    seeds = [9, 0, 23, 4]
    blocks = parity.sample(simple_graph, [-1, -1], seeds)
    edge_index = parity.edge_index(simple_graph)
    parity.check(
        ours,
        theirs,
        lambda m, x: m(blocks, x[blocks[0].srcs.long()]),
        lambda m, x: m(x, edge_index)[seeds],
        [parity.features(simple_graph.num_nodes, 6)],
    )


@pytest.mark.parametrize("name", MODELS)
def test_dropout_draws_as_pyg(parity, full, name):
    own = {"add_self_loops": False} if name == "GAT" else {}  # else attention edges come in another order
    edge_index = parity.edge_index(full.graph)
    ours, theirs = _make(parity, name, out_channels=4, dropout=0.4, **own)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, edge_index), [x])


def test_single_layer(parity, full):
    ours, theirs = _make(parity, "GraphSAGE", num_layers=1, out_channels=4)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("name", ["GraphSAGE", "GAT"])
def test_pair_of_channels(parity, full, name):
    options = {} if name == "GraphSAGE" else {"heads": 2}
    ours = getattr(parity.nn, name)((6, 6), 8, 2, 4, **options)
    theirs = getattr(parity.pyg, name)((6, 6), 8, 2, 4, **options)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


def test_edge_weights_and_features(parity, full):
    edge_index = parity.edge_index(full.graph)
    x = parity.features(full.graph.num_nodes, 6)
    weight = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(0)) + 0.1
    ours, theirs = _make(parity, "GCN", out_channels=4, add_self_loops=False)
    parity.check(
        ours, theirs, lambda m, x: m(full.graph, x, edge_weight=weight), lambda m, x: m(x, edge_index, weight), [x]
    )
    attr = torch.randn(edge_index.shape[1], 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = _make(parity, "GAT", out_channels=4, add_self_loops=False, edge_dim=3)
    parity.check(
        ours,
        theirs,
        lambda m, x: m([full.graph] * 3, x, edge_attr=[attr] * 3),
        lambda m, x: m(x, edge_index, edge_attr=attr),
        [x],
    )


def test_norm_instance_and_callable_act(parity, full):
    options = {"norm": torch.nn.LayerNorm(8), "act": torch.tanh, "out_channels": 4}
    for name in MODELS:
        ours, theirs = _make(parity, name, **options)
        x = parity.features(full.graph.num_nodes, 6)
        parity.check(ours, theirs, lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("options", [{}, {"norm": "batch_norm", "jk": "lstm"}], ids=["plain", "norm_jk"])
@pytest.mark.parametrize("name", MODELS)
def test_same_seed_gives_same_weights(parity, name, options):
    states = []
    for module in (parity.nn, parity.pyg):
        torch.manual_seed(0)
        states.append(getattr(module, name)(6, 8, 2, 4, **options).state_dict())
    assert list(states[0]) == list(states[1])
    for key, value in states[1].items():
        assert_close(states[0][key], value)


@pytest.mark.parametrize("name", MODELS)
def test_reset_parameters(parity, name):
    model = getattr(parity.nn, name)(6, 8, 2, 4, norm="batch_norm", jk="lstm")
    parity.randomize(model)
    randomized = {key: value.clone() for key, value in model.state_dict().items() if value.is_floating_point()}
    model.reset_parameters()
    stale = [key for key, value in randomized.items() if torch.equal(value, model.state_dict()[key])]
    assert stale == []
    assert repr(model) == repr(getattr(parity.pyg, name)(6, 8, 2, 4))


@pytest.mark.parametrize("name", MODELS)
def test_autocast(parity, simple_graph, name):
    model = getattr(parity.nn, name)(6, 8, 2, 4, norm="layer_norm", jk="lstm")
    x = parity.features(simple_graph.num_nodes, 6)
    exact = model(simple_graph, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(simple_graph, x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), exact, rtol=0.05, atol=0.05)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
