"""Every example runs, and its sampler and model are one graph of ops."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
from joestar.lowering.verify import foreign_nodes
from joestar.runtime import traced as traced_module

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "lightning_cora")
ARGUMENTS = ["--backend", "eager", "--epochs", "1"]

# What the graph of each example must hold besides sampling and a product with a weight matrix.
MODEL_OPS = {
    "train_cora": {"joestar.spmm", "aten.dropout", "aten.cross_entropy_loss"},
    "own_sampler": {"joestar.add_self_loops", "joestar.spmm", "aten.dropout", "aten.cross_entropy_loss"},
    "own_model": {"joestar.spmm", "aten.layer_norm", "aten.cat", "aten.dropout", "aten.cross_entropy_loss"},
    "own_loop": {"joestar.spmm", "joestar.out_degrees", "aten.dropout"},
    "pyg_cora": {"joestar.merge_hops", "joestar.append_loops", "aten.scatter_add_", "aten.cross_entropy_loss"},
    "multilabel": {
        "joestar.edge_softmax", "joestar.spmm", "aten.batch_norm", "aten.dropout", "aten.isnan",
        "aten.binary_cross_entropy_with_logits",
    },
}  # fmt: skip
SAMPLING_OPS = {"joestar.slice_cols", "joestar.rowwise_sample", "joestar.compact", "aten.index_select"}


@functools.cache
def load(name: str):
    """The example as a module, registered: TorchDynamo looks up the globals of what it traces by module name."""
    spec = importlib.util.spec_from_file_location(f"joestar_example_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def op_name(node) -> str:
    """``aten.linear`` for any overload; an empty string for what is no op."""
    return str(node.target).rpartition(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""


@pytest.fixture
def captured(monkeypatch):
    """The graphs as captured, before anything rewrites them: (foreign nodes, names of the ops) each."""
    seen, check = [], traced_module.verify_capture

    def spy(gm, origin):
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        seen.append((foreign_nodes(gm), {op_name(node) for node in calls} - {""}))
        check(gm, origin)

    monkeypatch.setattr(traced_module, "verify_capture", spy)
    return seen


def test_there_is_an_expectation_for_every_example():
    assert set(MODEL_OPS) == set(NAMES)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_graph(name, captured, capsys):
    torch._dynamo.utils.counters.clear()
    step = load(name).main(ARGUMENTS)
    programs = step.report().programs
    assert len(captured) == len(programs) > 0  # one graph for each program: sampling and model together
    assert not torch._dynamo.utils.counters["graph_break"]
    for foreign, ops in captured:
        assert not foreign
        assert {op.partition(".")[0] for op in ops} == {"aten", "joestar"}
    ops = captured[0][1]
    assert ops >= SAMPLING_OPS | MODEL_OPS[name] | {"aten.linear"}
    text = programs[0].graph_before
    for op in SAMPLING_OPS | MODEL_OPS[name]:
        assert f"torch.ops.{op}." in text
    printed = capsys.readouterr().out
    assert "test" in printed


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 80
    assert f"python examples/{name}.py [--backend eager] [--epochs" in text


def test_padded_and_exact_training_of_own_sampler_and_model_agree():
    graph = joestar.load("cora")
    sampler = load("own_sampler").SkipHopSampler(graph, [3, 3])

    def losses(execution: str) -> list[float]:
        torch.manual_seed(0)
        model = load("own_model").MeanMaxNet(1433, 8, num_layers=2, out_channels=7)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        step = joestar.compile(model, sampler, F.cross_entropy, adam, backend="eager", execution=execution, slack=0.5)
        return [loss.item() for _ in range(2) for loss in step.epoch(graph.train_idx, batch_size=50)]

    expected = losses("exact")
    with cheaper(cheapest):
        assert losses("padded") == pytest.approx(expected, rel=1e-4)


def test_skip_hop_edges_end_two_steps_away():
    # A directed path 0 -> 1 -> ... -> 9, with 9 closing on itself; node 0 has no in-edges.
    edges = torch.tensor([[*range(9), 9], [*range(1, 10), 9]])
    graph = joestar.Graph.from_edge_index(edges, 10)
    (block,) = load("own_sampler").SkipHopSampler(graph, [2]).sample(graph.keyed(), torch.tensor([5, 1, 0]))
    ends = [block.srcs[block.indices[a:b]].tolist() for a, b in zip(block.indptr, block.indptr[1:], strict=False)]
    assert ends == [[3], [0], []]  # 5 <- 4 <- 3; 1 <- 0, which has no neighbour and stays; 0 has none
    assert block.srcs[:3].tolist() == [5, 1, 0]
