"""Scripts set defaults and modes of PyTorch; steps, predictions and loading must not depend on them."""

import contextlib

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
import joestar.data
from joestar.bench.planted import planted
from joestar.errors import CaptureError, ConfigError
from tests.runtime.common import CLASSES, FEATURES, default_dtype, planted_graph

IDX = torch.arange(0, 90)


@contextlib.contextmanager
def both():
    with default_dtype(torch.float64), torch.device("meta"):
        yield


ENVIRONMENTS = {
    "float64": lambda: default_dtype(torch.float64),
    "device": lambda: torch.device("meta"),
    "both": lambda: both(),
}


def _parts(model: str):
    torch.manual_seed(0)
    graph = planted_graph(nodes=400)
    options = {"dropout": 0.4, "norm": "batch_norm"} if model == "GraphSAGE" else {"dropout": 0.4}
    net = getattr(joestar.nn, model)(FEATURES, 8, 2, out_channels=CLASSES, **options)
    return net, joestar.NeighborSampler(graph, [3, 2], seed=7)


def _results(model: str, environment, train_only: bool) -> list[torch.Tensor]:
    """Losses, parameters, logits and gradients of a few steps, every form of use, made within the environment."""
    net, sampler = _parts(model)
    with environment:
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        step = joestar.compile(net, sampler, F.cross_entropy, optimizer, backend="eager")
        results = list(step.epoch(IDX, 40))
        if not train_only:
            results += [step(IDX[:10]), step.predict(IDX[:30])]
            rows = joestar.compile(net, sampler, backend="eager")(IDX[:20])
            rows.sum().backward()
            results += [rows, *(p.grad for p in net.parameters())]
            assert 0 <= step.evaluate(IDX[:30])["accuracy"] <= 1
    return [*results, *net.state_dict().values()]


@pytest.mark.parametrize(
    ("model", "names", "train_only"),
    [("GraphSAGE", ["both"], False), pytest.param("GAT", ["device"], True, marks=pytest.mark.fuzz),
     pytest.param("GraphSAGE", ["float64", "device"], False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_defaults_change_nothing(model, names, train_only):
    with cheaper(cheapest):
        expected = _results(model, contextlib.nullcontext(), train_only)
    for name in names:
        found = _results(model, ENVIRONMENTS[name](), train_only)
        for was, now in zip(expected, found, strict=True):
            torch.testing.assert_close(now, was, rtol=0, atol=0)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_graphs_are_loaded_and_planted_as_ever(tmp_path, name):
    random = np.random.default_rng(0)
    edges, x, y = random.integers(0, 30, (2, 90)), random.standard_normal((30, 4)), np.arange(30) % 3
    arrays = {"edge_index": edges.astype(np.int32), "symmetric": np.uint8(0), "x": x.astype(np.float32), "y": y}
    np.savez_compressed(tmp_path / "mine.npz", **arrays)
    joestar.data.save(planted("tiny"), tmp_path / "folder")

    def graphs():
        matrix = scipy.sparse.coo_array((np.ones(90, np.float32), (edges[0], edges[1])), shape=(30, 30))
        loaded = [joestar.data.load(tmp_path / name) for name in ("mine.npz", "folder")]
        return [joestar.Graph.from_scipy(matrix), planted("tiny"), *loaded]

    expected = graphs()
    with ENVIRONMENTS[name]():
        found = graphs()
    for graph, was in zip(found, expected, strict=True):
        assert torch.equal(graph.indptr, was.indptr) and torch.equal(graph.indices, was.indices)
        assert graph.ndata.keys() == was.ndata.keys()
        for key, value in {**was.ndata, **was.edata}.items():
            now = {**graph.ndata, **graph.edata}[key]
            assert now.dtype == value.dtype and torch.equal(now, value)


AMBIENT = {
    "a step": lambda step: next(step.epoch(IDX, 40)),
    "the second step": lambda step: _second(step),
    "a single step": lambda step: step(IDX[:10]),
    "predictions": lambda step: step.predict(IDX),
    "scores": lambda step: step.evaluate(IDX),
    "exact scores": lambda step: step.evaluate(IDX, full=True),
    "exact inference": lambda step: joestar.inference(step.model, step.graph),
    "a loop of one's own": lambda step: joestar.compile(step.model, step.sampler, backend="eager")(IDX),
}


def _second(step):
    epoch = step.epoch(IDX, 40)
    with torch.autocast("cpu", enabled=False):
        next(epoch)
    next(epoch)


def _small(**options):
    net, sampler = _parts("GraphSAGE")
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    return joestar.compile(net, sampler, F.cross_entropy, adam, backend="eager", **options)


@pytest.mark.parametrize("use", AMBIENT)
@pytest.mark.every(3)
@pytest.mark.usefixtures("shared_captures")
def test_autocast_around_a_step_is_refused(use):
    """A program has its own: in plain PyTorch the model would run in 16 bits."""
    step = _small()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match=r"autocast=torch.bfloat16\b"):
        AMBIENT[use](step)
    assert step.predict(IDX).dtype == torch.float32  # nothing of it is left


@pytest.mark.fuzz
@pytest.mark.parametrize("execution", ["padded", pytest.param("exact", marks=pytest.mark.fuzz)])
def test_autocast_around_a_step_that_has_it_changes_nothing(execution):
    options = {"autocast": torch.bfloat16, "execution": execution}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = _small(**options)
        around = [*step.epoch(IDX, 40), step.predict(IDX[:30])]
    with cheaper(cheapest):
        step = _small(**options)
        assert all(map(torch.equal, around, [*step.epoch(IDX, 40), step.predict(IDX[:30])]))


def test_autocast_of_another_dtype_is_refused():
    step = _small(autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ConfigError, match=r"autocast=torch.float16\b"):
        step(IDX[:10])


class Within(torch.nn.Module):
    """Autocast where PyTorch's tutorials have it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, blocks, x):
        return self.net(blocks, x)


def test_autocast_within_a_model_is_refused_with_what_to_write():
    net, sampler = _parts("GraphSAGE")
    step = joestar.compile(Within(net), sampler, backend="eager")
    with pytest.raises(CaptureError, match=r"torch.autocast within the model.*compile\(..., autocast=torch.bfloat16\)"):
        step(IDX)


def test_validation_of_distributions_is_as_it_was():
    """TorchDynamo switches it off for the whole process."""
    normal = torch.distributions.Normal
    torch.distributions.Distribution.set_default_validate_args(True)  # another test may have called TorchDynamo
    _small()(IDX[:10])
    with pytest.raises(ValueError, match="scale"):
        normal(torch.zeros(1), -torch.ones(1))
