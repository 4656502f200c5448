"""Graphs without features: a learned table trains as in a plain PyTorch loop."""

import copy
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ConfigError, GraphError, JoestarWarning, LabelError
from joestar.nn import GraphSAGE, NodeEmbedding

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NODES, CLASSES = 40, 3


def _graph(features: bool = False):
    random = np.random.default_rng(1)
    graph = joestar.Graph.from_edge_index(random.integers(0, NODES, (2, 150)), NODES)
    graph.ndata["y"] = random.integers(0, CLASSES, (NODES, 1), dtype=np.int32)
    if features:
        graph.ndata["x"] = torch.from_numpy(random.standard_normal((NODES, 2)))
    return graph


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.filterwarnings("ignore::joestar.errors.JoestarWarning")
def test_a_table_trains_as_in_a_plain_loop(features):
    torch.manual_seed(0)
    graph = _graph(features)
    net = NodeEmbedding(NODES, 4, GraphSAGE(6 if features else 4, 8, 2, CLASSES)).double()
    plain, before = copy.deepcopy(net), net.table.weight.detach().clone()
    optimizers = [torch.optim.Adam(model.parameters(), 0.05) for model in (net, plain)]
    sampler = joestar.NeighborSampler(graph, [-1, -1])
    step = joestar.compile(net, sampler, F.cross_entropy, optimizers[0], backend="eager")
    assert graph.ndata["y"].dtype == torch.int64 and graph.ndata["y"].shape == (NODES,)
    idx = list(range(0, NODES, 2))
    for _ in range(3):
        losses = list(step.epoch(idx, 8, shuffle=False))
        for start, loss in zip(range(0, len(idx), 8), losses, strict=True):
            seeds = torch.tensor(idx[start : start + 8])
            optimizers[1].zero_grad()
            expected = F.cross_entropy(plain(graph, graph.ndata.get("x"))[seeds], graph.ndata["y"][seeds])
            expected.backward()
            optimizers[1].step()
            torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(net.table.weight, plain.table.weight)
    assert not torch.equal(net.table.weight, before)
    logits = plain(graph, graph.ndata.get("x"))
    for form in (idx, np.array(idx, dtype=np.uint8), range(0, NODES, 2), torch.tensor(idx)):
        torch.testing.assert_close(step.predict(form), logits[idx])
        assert step.evaluate(form) == step.evaluate(torch.tensor(idx))
    torch.testing.assert_close(step.predict(idx, full=True), logits[idx])
    torch.testing.assert_close(joestar.inference(net, graph, idx), logits[idx])


def test_a_model_that_needs_features_says_what_to_do():
    graph = _graph()
    for call in (
        lambda model: joestar.compile(model, joestar.NeighborSampler(graph, [2, 2])),
        lambda model: joestar.inference(model, graph),
    ):
        with (
            warnings.catch_warnings(action="ignore", category=JoestarWarning),
            pytest.raises(
                GraphError,
                match=r"no features, and GraphSAGE.forward takes x: set .*joestar.nn.NodeEmbedding\(graph.num_nodes",
            ),
        ):
            call(GraphSAGE(4, 4, 2, CLASSES))
    for sizes in ((0, 4), (4, 0), (True, 4), (4, 2.0)):
        with pytest.raises(ConfigError, match="must be a positive integer"):
            NodeEmbedding(*sizes, GraphSAGE(4, 4, 2, CLASSES))


def test_float64_features_are_converted_once_for_a_float32_model():
    graph = _graph(features=True)
    with pytest.warns(JoestarWarning, match=r"ndata\['x'\] was float64 and is float32 now, as the model's"):
        step = joestar.compile(
            GraphSAGE(2, 4, 2, CLASSES), joestar.NeighborSampler(graph, [2, 2]), backend="eager", warm_up=2
        )
    assert step([1, 2, 3]).dtype == torch.float32


@pytest.mark.parametrize("loss", [F.cross_entropy, functools.partial(F.cross_entropy, label_smoothing=0.1),
                                  torch.nn.CrossEntropyLoss(), torch.nn.NLLLoss()])  # fmt: skip
@pytest.mark.parametrize("column", [False, True])
def test_class_ids_in_floats_become_ids_where_the_loss_takes_classes(loss, column):
    def compiled(y, loss=loss):
        graph.ndata["y"] = y[:, None] if column else y
        net = GraphSAGE(2, 4, 1, CLASSES)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return joestar.compile(net, joestar.NeighborSampler(graph, [2]), loss, optimizer, backend="eager", warm_up=2)

    graph = joestar.Graph.from_edge_index([[0, 1], [1, 2]], ndata={"x": torch.ones(3, 2)})
    with pytest.warns(JoestarWarning, match="of dtype float32 holds whole numbers: they are int64 class ids now"):
        compiled(torch.tensor([2.0, np.nan, 0.0]))
    assert graph.ndata["y"].tolist() == [2, -100, 0]
    with pytest.raises(LabelError, match=r"takes class ids, and graph.ndata\['y'\] holds 0.5: .* F.mse_loss"):
        compiled(torch.tensor([2.0, 0.5, 0.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.tensor([2.0, 1.0, 0.0]), F.mse_loss)
    assert graph.ndata["y"].dtype == torch.float32
