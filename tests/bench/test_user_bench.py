"""``joestar bench user`` runs; its baseline samples what it says."""

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.bench import user_models
from joestar.bench.user_baselines import DegreeBiasedBlocks, NeighborBlocks, PygModel
from joestar.bench.user_models import MODELS, UserSetting, example, run
from joestar.cli.main import app
from joestar.errors import ConfigError

from .easy import easy_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

SEEDS = torch.arange(50)


@pytest.fixture(scope="module")
def graph():
    return easy_graph()


def _check(graph, nodes, blocks):
    """Destinations first, each block feeds the next, every edge is one of the graph's; the table of ids is clean."""
    assert torch.equal(nodes[:50], SEEDS) and nodes.unique().numel() == nodes.numel()
    assert blocks[-1].num_dst == 50
    src, dst, _ = graph.coo()
    known = set((src.long() * graph.num_nodes + dst).tolist())
    for block in blocks:
        ends = nodes[block.edge_index[0]] * graph.num_nodes + nodes[block.edge_index[1]]
        assert set(ends.tolist()) <= known
        assert int(block.edge_index[1].max()) < block.num_dst


def test_neighbours_come_with_the_features_of_their_edges(graph):
    src, dst, _ = graph.coo()
    features = torch.stack([src, dst], 1).float()
    sampler = NeighborBlocks(graph.indptr, graph.indices, [4, 3], features)
    nodes, blocks = sampler.blocks(SEEDS)
    _check(graph, nodes, blocks)
    assert (sampler.local == -1).all()
    degrees = torch.bincount(blocks[-1].edge_index[1], minlength=50)
    assert torch.equal(degrees, graph.in_degrees()[:50].clamp(max=4))
    for block in blocks:
        assert torch.equal(nodes[block.edge_index].T.float(), block.edge_attr)


def test_degree_biased_blocks_pick_as_many_nodes_as_asked(graph):
    sampler = DegreeBiasedBlocks(graph.indptr, graph.indices, [100, 150])
    nodes, blocks = sampler.blocks(SEEDS)
    _check(graph, nodes, blocks)
    assert (sampler.local == -1).all()
    assert 50 < blocks[0].num_dst <= 150 and nodes.numel() <= 300
    # Every edge of the graph between the picked sources and the destinations is there.
    picked = torch.zeros(graph.num_nodes, dtype=torch.bool)
    picked[nodes[blocks[-1].edge_index[0]]] = True
    src, dst, _ = graph.coo()
    assert blocks[-1].edge_index.shape[1] == int((picked[src.long()] & (dst < 50)).sum())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(3)
def test_baseline_learns(name, graph):
    module = example(UserSetting().folder, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    torch.manual_seed(0)
    model = PygModel(name, 16, 32, 2, graph.num_classes, 0.0, **options)
    if name == "degree_biased_sampler":
        sampler = DegreeBiasedBlocks(graph.indptr, graph.indices, [200, 200])
    else:
        edges = graph.edata["f"] if "edge_channels" in options else None
        sampler = NeighborBlocks(graph.indptr, graph.indices, [5, 5], edges)
    optimizer, losses = torch.optim.Adam(model.parameters(), 2e-3 if name == "pna" else 1e-2), []
    for seeds in [part for _ in range(12) for part in graph.train_idx.split(100)]:
        nodes, blocks = sampler.blocks(seeds)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(graph.ndata["x"][nodes], blocks), graph.ndata["y"][seeds.long()])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_command_line(apart, monkeypatch, tmp_path):
    """``apart``: one row in a process of its own, as all of them are; each takes time to start."""
    alone = user_models._measured

    def measured(name, how, setting):
        if how == "eager" and apart:
            return alone(name, how, setting)
        return user_models._row(name, how, setting, torch.get_num_threads())

    monkeypatch.setattr(user_models, "_measured", measured)
    monkeypatch.setattr(joestar, "compile", functools.partial(joestar.compile, backend="eager"))
    file = tmp_path / "user.json"
    arguments = ["bench", "user", "--shape", "tiny", "--models", "edge_features", "--steps", "2", "--batch-size", "50"]
    arguments += ["--fanouts", "3,2", "--hidden", "8", "--baselines", "eager,kept"]
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        found = CliRunner().invoke(app, [*arguments, "--precision", "tf32", "--json", str(file)])
        assert torch.backends.cuda.matmul.allow_tf32, "the process of a row has the precision that was asked for"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found.exit_code == 0, found.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["how"] for row in rows] == ["joestar", "eager", "kept"]
    for row in rows:
        assert row["model"] == "edge_features" and row["step"]["steps"] == 2 and row["step"]["median"] > 0
    for wrong, message in (
        (["--shape", "huge"], "unknown shape"), (["--models", "sage"], "unknown model 'sage'"),
        (["--baselines", "compile"], "unknown baseline"), (["--precision", "bf16"], "unknown precision"),
        (["--examples", str(tmp_path)], "checkout"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2 and message in refused.output, refused.output


def test_a_batch_that_is_larger_than_the_training_set_is_refused():
    with pytest.raises(ConfigError, match="batch"):
        run(UserSetting("tiny", models=("pna",), batch_size=10_000))
