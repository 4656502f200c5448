"""BatchNorm, LayerNorm and JumpingKnowledge against PyG's, and their corner cases."""

import pytest
import torch
from torch.testing import assert_close

from joestar.errors import ConfigError

NORMS = {
    "batch": ("BatchNorm", {}),
    "batch_momentum": ("BatchNorm", {"eps": 1e-3, "momentum": 0.4}),
    "batch_cumulative": ("BatchNorm", {"momentum": None}),
    "batch_untracked": ("BatchNorm", {"track_running_stats": False, "affine": False}),
    "layer_graph": ("LayerNorm", {}),
    "layer_graph_eps": ("LayerNorm", {"eps": 0.1, "affine": False}),
    "layer_node": ("LayerNorm", {"mode": "node"}),
    "layer_node_plain": ("LayerNorm", {"mode": "node", "affine": False}),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "options"), NORMS.values(), ids=NORMS.keys())
def test_parity(parity, name, options, training):
    run = lambda m, x: m(m(x))  # noqa: E731  (twice: running statistics move)
    ours, theirs = getattr(parity.nn, name)(7, **options), getattr(parity.pyg, name)(7, **options)
    x = 3 * parity.features(20, 7) + 1
    parity.check(ours.train(training), theirs.train(training), run, run, [x])
    assert repr(ours) == repr(theirs)
    ours.reset_parameters(), theirs.reset_parameters()
    for key, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[key], value)


def test_layer_norm_of_equal_entries_has_a_finite_gradient(parity):
    x = torch.full((5, 3), 2.0, requires_grad=True)
    out = parity.nn.LayerNorm(3)(x)
    out.sum().backward()
    assert_close(out, torch.zeros(5, 3))
    assert torch.isfinite(x.grad).all()


def test_reset_running_stats(parity):
    norm = parity.nn.BatchNorm(3)
    norm(torch.randn(5, 3))
    norm.reset_running_stats()
    assert_close(norm.module.running_mean, torch.zeros(3))


def test_norm_errors(parity):
    with pytest.raises(ConfigError, match=r"allow_single_element=True is not supported.*two seeds or more"):
        parity.nn.BatchNorm(3, allow_single_element=True)
    with pytest.raises(ConfigError, match=r"mode must be 'graph' or 'node'; got 'row'"):
        parity.nn.LayerNorm(3, mode="row")


@pytest.mark.parametrize("mode", ["cat", "max", "lstm"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_jumping_knowledge(parity, mode, num_layers):
    run = lambda m, *xs: m(list(xs))  # noqa: E731
    xs = [parity.features(9, 5, seed=i) for i in range(num_layers)]
    parity.check(
        parity.nn.JumpingKnowledge(mode, 5, num_layers), parity.pyg.JumpingKnowledge(mode, 5, num_layers), run, run, xs
    )


def test_jumping_knowledge_errors(parity):
    with pytest.raises(ConfigError, match=r"mode must be one of cat, max, lstm; got 'sum'"):
        parity.nn.JumpingKnowledge("sum")
    with pytest.raises(ConfigError, match=r"'lstm' needs channels and num_layers"):
        parity.nn.JumpingKnowledge("lstm")
