"""PyG's NeighborLoader as a baseline: its batches as blocks, its step, and what happens where pyg-lib is missing."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import joestar
from joestar.bench import loader as loader_module
from joestar.bench import step as step_module
from joestar.bench.baselines import BlockModel
from joestar.bench.loader import LoaderStep, blocks_of, missing, time_rounds
from joestar.bench.setting import Setting
from joestar.bench.step import run
from joestar.cli.main import app

from .easy import easy_graph


def whole_neighbourhoods(graph, seeds: torch.Tensor, hops: int) -> SimpleNamespace:
    """A batch as NeighborLoader makes it, every neighbour taken, in plain Python: nodes and edges ordered by hop."""
    nodes, local = seeds.tolist(), {int(seed): i for i, seed in enumerate(seeds)}
    edges, num_nodes, num_edges, frontier = [], [len(nodes)], [], list(range(len(nodes)))
    for _ in range(hops):
        before, first = len(nodes), len(edges)
        for dst in frontier:
            for src in graph.indices[graph.indptr[nodes[dst]] : graph.indptr[nodes[dst] + 1]].tolist():
                if src not in local:
                    local[src] = len(nodes)
                    nodes.append(src)
                edges.append((local[src], dst))
        num_nodes.append(len(nodes) - before)
        num_edges.append(len(edges) - first)
        frontier = list(range(before, len(nodes)))
    ids = torch.tensor(nodes)
    batch = SimpleNamespace(
        x=graph.ndata["x"][ids], y=graph.ndata["y"][ids], edge_index=torch.tensor(edges).T, batch_size=len(seeds),
        num_sampled_nodes=num_nodes, num_sampled_edges=num_edges,
    )  # fmt: skip
    batch.to = lambda device, non_blocking: batch
    return batch


@pytest.fixture(scope="module")
def graph():
    return easy_graph()


@pytest.fixture
def here(monkeypatch):
    """Rows are measured in this process, Joestar's without Inductor; ``test_bench.py`` measures as users do."""
    monkeypatch.setattr(step_module, "_measured", step_module._row)
    monkeypatch.setattr(joestar, "compile", functools.partial(joestar.compile, backend="eager"))


def test_blocks_compute_what_the_whole_graph_does(graph):
    torch.manual_seed(0)
    model = BlockModel("sage", 16, 8, 2, graph.num_classes, heads=1, dropout=0.0).eval()
    seeds = graph.train_idx[:4].long().unique()
    batch = whole_neighbourhoods(graph, seeds, 2)
    src, dst, _ = graph.coo()
    everything = [(torch.stack([src.long(), dst.long()]), graph.num_nodes)] * 2
    expected = model(graph.ndata["x"], everything)[seeds]
    torch.testing.assert_close(model(batch.x, blocks_of(batch)), expected, rtol=1e-4, atol=1e-5)


def test_a_step_trains_and_goes_on_after_the_last_batch(monkeypatch, graph):
    torch.manual_seed(0)
    model = BlockModel("sage", 16, 8, 2, graph.num_classes, heads=1, dropout=0.0)
    batches = [whole_neighbourhoods(graph, part.long().unique(), 2) for part in graph.train_idx[:60].split(20)]
    step = LoaderStep(batches, model, torch.optim.Adam(model.parameters(), 1e-2), torch.device("cpu"))
    losses = [float(step()) for _ in range(30)]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    trained = []
    monkeypatch.setattr(LoaderStep, "__call__", lambda step: trained.append(next(step.batches)))
    step.epoch()
    step.epoch(1)
    assert trained == [*batches, batches[0]], "once from the start, then one batch"
    monkeypatch.undo()
    timing = time_rounds(step, 9, 1, 2, torch.device("cpu"))
    assert timing.steps == 8 and 0 < timing.p20 <= timing.median <= timing.p80


def test_without_pyg_lib_the_row_is_left_out_and_the_reason_said(monkeypatch, here):
    monkeypatch.setitem(sys.modules, "pyg_lib", None)
    arguments = ["bench", "step", "--shape", "tiny", "--models", "sage", "--baselines", "loader", "--steps", "1"]
    found = CliRunner().invoke(app, [*arguments, "--batch-size", "50", "--fanouts", "3,2", "--hidden", "8"])
    assert found.exit_code == 0, found.output
    assert "it needs pyg-lib, which cannot be imported here" in " ".join(found.output.split())
    assert "joestar" in found.output


def test_with_pyg_lib_it_is_measured(monkeypatch, here):
    monkeypatch.setitem(sys.modules, "pyg_lib", SimpleNamespace())
    assert missing() is None

    def fake(graph, fanouts, batch_size, workers):
        assert (fanouts, batch_size, workers) == ([3, 2], 50, 2)
        return [whole_neighbourhoods(graph, graph.train_idx[:50].long().unique(), len(fanouts))]

    monkeypatch.setattr(loader_module, "neighbor_loader", fake)
    result = run(Setting("tiny", models=("sage",), fanouts=(3, 2), hidden=8, batch_size=50, steps=4, warm_up=1,
                         baselines=("loader",), workers=2))  # fmt: skip
    assert [row["how"] for row in result["rows"]] == ["joestar", "loader"] and not result["absent"]
    assert result["rows"][1]["step"]["steps"] == 6 and result["rows"][1]["step"]["median"] > 0
    assert all(row["epochs"]["seconds"] > 0 for row in result["rows"])


def test_the_loader_is_given_the_graph_as_it_is(monkeypatch, graph):
    """What NeighborLoader is called with: the edges sorted by destination, pinned batches on a GPU only."""
    seen = {}

    def remember(data, fanouts, nodes, **options):
        seen.update(data=data, fanouts=fanouts, nodes=nodes, **options)
        return []

    monkeypatch.setattr("torch_geometric.loader.NeighborLoader", remember)
    loader_module.neighbor_loader(graph, [3, 2], 50, 2)
    src, dst, _ = graph.coo()
    assert torch.equal(seen["data"].edge_index, torch.stack([src.long(), dst.long()])) and seen["is_sorted"]
    assert (seen["batch_size"], seen["num_workers"], seen["pin_memory"], seen["shuffle"]) == (50, 2, False, True)
