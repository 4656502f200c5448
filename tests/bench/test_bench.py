"""The benchmarks run, on graphs of the promised shape, against a baseline that computes the same thing."""

import json

import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.bench.baselines import BlockModel, EagerStep, TorchSampler
from joestar.bench.planted import SHAPES, Shape, planted
from joestar.bench.step import logical_bytes
from joestar.cli.main import app
from joestar.errors import ConfigError


def test_planted_graph():
    shape = SHAPES["tiny"]
    graph = planted("tiny")
    assert graph.num_nodes == shape.nodes and graph.ndata["x"].shape == (shape.nodes, shape.features)
    assert graph.num_edges / shape.nodes == pytest.approx(shape.degree, rel=0.1)
    assert int(graph.indices.min()) >= 0 and int(graph.indices.max()) < shape.nodes
    assert graph.train_idx.unique().numel() == shape.train
    same = planted("tiny")
    assert torch.equal(graph.indices, same.indices) and torch.equal(graph.ndata["x"], same.ndata["x"])
    src, dst, _ = graph.coo()
    near = (src.long() // shape.community == dst.long() // shape.community).double().mean().item()
    assert near == pytest.approx(shape.inside, abs=0.1)


def test_batches_meet_as_many_nodes_as_in_ogbn_products():
    """The shape of products at a twelfth of its nodes, where a few more neighbours coincide."""
    full = SHAPES["products"]
    small = Shape(**{**full.__dict__, "nodes": 200_000, "features": 1, "train": 20_000})
    graph = planted(small)
    sampler = joestar.NeighborSampler(graph, [15])
    sizes = [
        sampler.sample(graph.keyed(0, 0, i), part)[0].num_src
        for i, part in enumerate(graph.train_idx[:5000].split(1000))
    ]
    assert sum(sizes) / len(sizes) == pytest.approx(14_700, rel=0.06)


def test_unknown_shape():
    with pytest.raises(ConfigError, match="unknown shape 'large'"):
        planted("large")


def test_baseline_samples_distinct_neighbours():
    graph = planted("tiny")
    sampler = TorchSampler(graph.indptr, graph.indices, [4, 3])
    nodes = torch.arange(500)
    row, _ = sampler.neighbours(nodes, 4)
    assert torch.equal(torch.bincount(row, minlength=500), graph.in_degrees()[:500].clamp(max=4))
    ids, blocks = sampler.blocks(torch.arange(50))
    assert ids.unique().numel() == ids.numel() and torch.equal(ids[:50], torch.arange(50))
    edges = {(int(s), int(d)) for d in range(500) for s in graph.indices[graph.indptr[d] : graph.indptr[d + 1]]}
    for edge_index, count in blocks:
        assert int(edge_index[1].max()) < count
        pairs = set(zip(ids[edge_index[0]].tolist(), ids[edge_index[1]].tolist(), strict=True))
        assert {pair for pair in pairs if pair[1] < 500} <= edges
    assert (sampler.local == -1).all(), "the table is left clean"


@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat"])
def test_baseline_learns(model):
    graph = planted("tiny")
    torch.manual_seed(0)
    net = BlockModel(model, 16, 32, 2, graph.num_classes, heads=4, dropout=0.0)
    step = EagerStep(graph, [5, 5], net, torch.optim.Adam(net.parameters(), 1e-2))
    losses = [float(step(part)) for _ in range(12) for part in graph.train_idx.split(100)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_logical_bytes_of_one_layer():
    """10 destinations, 40 edges, 4 features: gathers of 50 rows, the joined matrix of 10 x 8 moved three times."""
    assert logical_bytes([10, 45], [40], 4, 8, 2) == 2 * (50 * 4 + 3 * 10 * 8)


def test_a_whole_measurement_from_the_command_line(tmp_path):
    arguments = ["bench", "step", "--shape", "tiny", "--models", "sage", "--steps", "3", "--batch-size", "50"]
    file = tmp_path / "step.json"
    found = CliRunner().invoke(app, [*arguments, "--fanouts", "3,2", "--hidden", "8", "--json", str(file)])
    assert found.exit_code == 0, found.output
    result = json.loads(file.read_text())
    assert result["setting"]["fanouts"] == [3, 2]
    assert [row["how"] for row in result["rows"]] == ["joestar", "eager"]
    for row in result["rows"]:
        assert row["step"]["p20"] <= row["step"]["median"] <= row["step"]["p80"] and row["step"]["steps"] == 3
        assert row["sampling"]["median"] > 0
    assert result["rows"][0]["counts"][0] == 50 and result["rows"][0]["logical_bytes"] > 0
    for wrong, message in (
        (["--shape", "huge"], "unknown shape"), (["--models", "mlp"], "unknown model"),
        (["--fanouts", "3,x"], "integers by commas"), (["--precision", "int8"], "unknown precision"),
        (["--device", "tpu"], "must be cpu or cuda"), (["--json", str(tmp_path)], "it is a folder"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2 and message in refused.output, refused.output
