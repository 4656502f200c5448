"""GINConv and MLP against PyG's."""

import pytest
import torch
from torch.testing import assert_close

from joestar.errors import ConfigError

OPTIONS = {
    "default": {},
    "eps": {"eps": 0.3},
    "train_eps": {"eps": 0.3, "train_eps": True},
    "max": {"aggr": "max"},
}


def _pair(parity, options):
    return (
        parity.nn.GINConv(parity.nn.MLP([6, 7, 5]), **options),
        parity.pyg.GINConv(parity.pyg.MLP([6, 7, 5]), **options),
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_full_graph(parity, full, options):
    ours, theirs = _pair(parity, options)
    x = parity.features(full.graph.num_nodes, 6)
    parity.check(ours.eval(), theirs.eval(), lambda m, x: m(full.graph, x), lambda m, x: m(x, full.edge_index), [x])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_sampled_block_train_mode(parity, sampled, options):
    # BatchNorm over 13 rows divides by small deviations.
    parity.check_block(*_pair(parity, options), sampled.blocks[0], tolerance=3e-5)


def test_reset_restores_eps_and_redraws_nn(parity):
    conv = parity.nn.GINConv(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU()), eps=0.5, train_eps=True)
    before = conv.nn[0].weight.clone()
    parity.randomize(conv)
    conv.reset_parameters()
    assert conv.eps.item() == 0.5
    assert not torch.equal(conv.nn[0].weight, before)


MLPS = {
    "list": ([6, 8, 5], {}),
    "widths": (None, {"in_channels": 6, "hidden_channels": 8, "out_channels": 5, "num_layers": 3}),
    "one_layer": ([6, 5], {}),
    "no_norm": ([6, 8, 5], {"norm": None, "act": "elu", "act_kwargs": {"alpha": 0.5}}),
    "layer_norm": ([6, 8, 5], {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act_first": True}),
    "not_plain_last": ([6, 8, 5], {"plain_last": False, "dropout": 0.2}),
    "dropout": ([6, 8, 8, 5], {"dropout": 0.4}),
    "lists": ([6, 8, 5], {"dropout": [0.1, 0.3], "bias": [True, False]}),
    "no_act": ([6, 8, 5], {"act": None}),
}


@pytest.mark.parametrize(("channels", "options"), MLPS.values(), ids=MLPS.keys())
def test_mlp(parity, channels, options):
    ours, theirs = parity.nn.MLP(channels, **options), parity.pyg.MLP(channels, **options)
    run = lambda m, x: m(x)  # noqa: E731
    parity.check(ours, theirs, run, run, [parity.features(20, 6)])
    assert repr(ours) == repr(theirs)
    assert (ours.in_channels, ours.out_channels) == (theirs.in_channels, theirs.out_channels)


def test_mlp_errors(parity):
    MLP = parity.nn.MLP
    with pytest.raises(ConfigError, match=r"two or more widths; got \[3\]"):
        MLP([3])
    with pytest.raises(ConfigError, match=r"dropout needs one value for each of 2 layers; got 1"):
        MLP([3, 4, 5], dropout=[0.1])
    with pytest.raises(ConfigError, match=r"give num_layers and out_channels too"):
        MLP(in_channels=3, num_layers=2, out_channels=4)


def test_same_seed_gives_same_weights(parity):
    torch.manual_seed(0)
    ours = parity.nn.MLP([6, 8, 5])
    torch.manual_seed(0)
    theirs = parity.pyg.MLP([6, 8, 5])
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value)
