"""What the parameters of a model of ``(x, edge_index)`` are given, by their names and defaults."""

import pytest
import torch

import joestar
from joestar.errors import ConfigError
from joestar.pyg.call import arguments_of
from pyg.common import toy_graph


def _forward(parameters: str) -> torch.nn.Module:
    namespace = {}
    exec(f"def forward(self, {parameters}): pass", namespace)
    return type("Model", (torch.nn.Module,), namespace)()


@pytest.mark.parametrize(
    ("parameters", "features"),
    [
        ("h, edge_index, x=None", "h"),
        ("edge_index, h, x=None", "h"),
        ("h, edge_index, n_id, edge_weight, x=None", "h"),
        ("h, /, edge_index, *, x=None", "h"),
        ("n_id, edge_index, edge_weight, x=None", "x"),
        ("edge_index, x=None, h=None", "x"),
        ("x, edge_index, h=None", "x"),
        ("edge_index, h", "h"),
    ],
)
def test_which_parameter_has_the_features(parameters, features):
    """A default of ``x`` stays where another parameter, without one, can be nothing but the features."""
    graph = toy_graph(("edge_weight",))
    graph.ndata["n_id"] = torch.arange(60)
    found = dict(arguments_of(_forward(parameters), graph))
    assert [name for name, kind in found.items() if kind == "x"] == [features]
    assert (found["edge_index"], found.get("n_id", "node"), found.get("edge_weight", "edge")) == (
        "edges",
        "node",
        "edge",
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("edge_index, edge_attr, x=None", r"takes edge_attr, and the graph .* \(edge_attr=None\)"),
        ("edge_index, edge_attr", "takes edge_attr"),
        ("batch_size, edge_index, x=None", "takes batch_size: Joestar trims"),
        ("batch_size, edge_index", "takes batch_size: Joestar trims"),
        ("h, edge_index, k, x=None", "takes k"),
        ("h, x, edge_index", "takes h, .* where a sampler sets it in its blocks, it"),
    ],
)
def test_what_is_named_as_something_else_is_not_the_features(parameters, words):
    with pytest.raises(ConfigError, match=words):
        arguments_of(_forward(parameters), toy_graph(()))


class Takes(torch.nn.Module):
    """Features under another name; ``x``, which has a default, is not given."""

    def forward(self, h, edge_index, x=None):
        return 2 * h if x is None else x


@pytest.mark.usefixtures("cheapest_captures")
def test_features_under_another_name_than_a_default():
    graph, seeds = toy_graph(), torch.tensor([3, 40])
    step = joestar.compile(Takes(), joestar.NeighborSampler(graph, [3]), backend="eager", execution="exact")
    assert torch.equal(step(seeds), 2 * graph.ndata["x"][seeds])
    assert torch.equal(step.predict(seeds, full=True), 2 * graph.ndata["x"][seeds])


class OfSampler(torch.nn.Module):
    def forward(self, x, edge_index, edge_weight=None):
        return x if edge_weight is None else -x


class Sets:
    """Sets a weight of the edges, which the graph has not."""

    def __init__(self, graph):
        self.graph = graph

    def sample(self, graph, seeds):
        block = graph[:, seeds].individual_sample(3)
        block.edata["edge_weight"] = torch.ones_like(block.eids, dtype=torch.float64)
        return [block]


@pytest.mark.usefixtures("cheapest_captures")
def test_full_inference_has_the_defaults_of_what_only_a_sampler_sets():
    graph, seeds = toy_graph(), torch.tensor([3, 40])
    step = joestar.compile(OfSampler(), Sets(graph), backend="eager", execution="exact")
    assert torch.equal(step(seeds), -graph.ndata["x"][seeds])
    assert torch.equal(step.predict(seeds, full=True), graph.ndata["x"][seeds])
