"""Models as users write them: every execution computes what the same model in PyG's layers does, and they learn."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, real

import joestar
from joestar.bench.user_baselines import PygModel, TorchBlock
from joestar.bench.user_models import FOLDER, MODELS, example
from tests.runtime.common import CLASSES, FEATURES, planted_graph

pytestmark = [pytest.mark.usefixtures("cheapest_captures"), pytest.mark.every(3)]

SEEDS = torch.arange(0, 150)  # an isolated node and a hub are among them


@pytest.fixture(scope="module")
def graph():
    return planted_graph(dtype=torch.float64)


def options_of(name: str, graph) -> dict:
    """Further arguments of the model, and the edge features it reads in float64."""
    module = example(FOLDER, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    for key, value in graph.edata.items():
        graph.edata[key] = value.double()
    return options


def make(name: str, graph, dropout: float = 0.0, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    options = options_of(name, graph)
    return example(FOLDER, name).Net(FEATURES, 16, layers, CLASSES, dropout, **options).double()


def sampler_of(name: str, graph, layers: int = 2):
    module = example(FOLDER, name)
    if hasattr(module, "sampler"):
        return module.sampler(graph, [60, 90, 120][:layers])
    return joestar.NeighborSampler(graph, [5, 4, 3][:layers], seed=3)


def in_pyg(name: str, graph, net, blocks) -> torch.Tensor:
    """Logits of the PyG model with the same parameters on the same blocks."""
    layers, options = len(blocks), options_of(name, graph)
    model = PygModel(name, FEATURES, 16, layers, CLASSES, 0.0, **options).double()
    ours, theirs = dict(net.named_parameters()), dict(model.named_parameters())
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    edge_data = graph.edata["f"] if "edge_channels" in options else None
    converted = []
    for block in blocks:
        dst = torch.repeat_interleave(torch.arange(block.num_dst), block.in_degrees())
        features = None if edge_data is None else edge_data[block.eids]
        converted.append(TorchBlock(torch.stack([block.indices.long(), dst]), block.num_dst, features))
    x = graph.ndata["x"][blocks[0].srcs]
    return torch.func.functional_call(model, ours, (x, converted))


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


ONE_EACH = ((1, "exact"), (3, "padded"))
"""Two layers are trained both ways below."""


def cases():
    """``make test`` takes one of each for every other model, and the other of the next."""
    for number, name in enumerate(MODELS):
        for layers, execution in itertools.product((1, 3), ("exact", "padded")):
            fuzz = pytest.mark.fuzz if (layers, execution) != ONE_EACH[number % 2] else ()
            marks = fuzz if (layers, execution) in ONE_EACH else pytest.mark.slow
            yield pytest.param(name, execution, layers, marks=marks, id=f"{name}-{layers}-{execution}")


@pytest.mark.parametrize(("name", "execution", "layers"), list(cases()))
def test_loss_and_gradients_are_those_of_the_pyg_model(name, execution, layers, graph):
    net = make(name, graph, layers=layers)
    sampler = sampler_of(name, graph, layers)
    compiled = joestar.compile(net, sampler, execution=execution, backend="eager", slack=0.5)
    labels = graph.ndata["y"][SEEDS]
    loss = F.cross_entropy(compiled(SEEDS), labels)
    loss.backward()
    gradients = {key: value.grad.clone() for key, value in net.named_parameters()}
    net.zero_grad()

    blocks = sampler.sample(graph.keyed(getattr(sampler, "seed", 0), 0, 1), SEEDS)  # the key of the first call
    expected = F.cross_entropy(in_pyg(name, graph, net, blocks), labels)
    expected.backward()
    assert_close(loss, expected)
    for key, value in net.named_parameters():
        assert value.grad.abs().max() > 0, key
        assert_close(gradients[key], value.grad)
    assert compiled.counters.fallbacks == 0
    assert (compiled.counters.warm_up_batches > 0) == (execution == "padded")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(4)
def test_padded_training_equals_exact_training_and_learns(name, graph):
    def losses(execution: str) -> tuple[list[float], joestar.Step]:
        net = make(name, graph, dropout=0.2)
        optimizer = torch.optim.Adam(net.parameters(), 2e-3 if name == "pna" else 2e-2)  # its rows are 13 times as wide
        step = joestar.compile(
            net, sampler_of(name, graph), F.cross_entropy, optimizer, execution=execution, backend="eager", slack=0.5
        )
        return [x.item() for _ in range(4) for x in list(step.epoch(torch.arange(730), 100))], step

    padded, step = losses("padded")
    exact, other = losses("exact")
    assert padded == pytest.approx(exact, rel=1e-6)  # losses of an epoch are kept as float32; parameters are not
    for key, value in step.model.named_parameters():
        torch.testing.assert_close(value, other.model.get_parameter(key), rtol=1e-7, atol=1e-7)
    assert sum(padded[-8:]) < 0.8 * sum(padded[:8])
    counters = step.report().counters
    assert counters.fallbacks == counters.exact_steps == 0 and counters.padded_steps == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_inductor_computes_the_same(name, graph):
    net, sampler = make(name, graph), sampler_of(name, graph)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), slack=0.5)
    before = {key: value.detach().clone() for key, value in net.named_parameters()}
    (loss,) = step.epoch(SEEDS, SEEDS.numel(), shuffle=False)
    assert step.report().counters.padded_steps == 1

    again = make(name, graph)
    blocks = sampler.sample(graph.keyed(getattr(sampler, "seed", 0), 0, 0), SEEDS)
    expected = F.cross_entropy(in_pyg(name, graph, again, blocks), graph.ndata["y"][SEEDS])
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # losses of an epoch are kept as float32
    for key, value in again.named_parameters():
        assert_close((before[key] - net.get_parameter(key).detach()) / 0.1, value.grad)


def test_the_degree_biased_sampler_prefers_nodes_of_high_degree(graph):
    sampler = example(FOLDER, "degree_biased_sampler").sampler(graph, [60])
    seeds, degrees = torch.arange(2, 202), graph.in_degrees()
    candidates = graph[:, seeds].compact().srcs[seeds.numel() :]
    drawn = [sampler.sample(graph.keyed(0, 0, draw), seeds)[0] for draw in range(20)]
    for block in drawn:
        assert block.num_src <= seeds.numel() + 60 and torch.equal(block.dsts, seeds.int())
    picked = torch.cat([block.srcs[seeds.numel() :] for block in drawn])
    assert degrees[picked].double().mean() > 1.05 * degrees[candidates].double().mean()


RUN = ("degree_biased_sampler", "edge_features", "residual_norm")
"""Scripts that are run in ``make test``: with a sampler, with features of edges, with neither. All are a call of one
function, with what the next test looks at."""


@pytest.mark.parametrize("name", MODELS)
def test_a_script_hands_over_what_it_defines(name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    calls, module = [], example(FOLDER, name)
    monkeypatch.setattr("on_cora.train", lambda *args, **options: calls.append((args, options)))
    module.main(["--epochs", "1"])
    parts = {key: getattr(module, key) for key in ("sampler", "prepare") if hasattr(module, key)}
    given = {key: value for key, value in calls[0][1].items() if value is not None}
    assert len(calls) == 1 and calls[0][0] == (module.__doc__, module.Net)
    assert given == {**parts, "argv": ["--epochs", "1"]}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in RUN else pytest.mark.slow) for n in MODELS])
def test_a_script_runs(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    with cheaper(real):
        step = example(FOLDER, name).main(["--backend", "eager", "--epochs", "1"])
    counters = step.report().counters
    assert counters.padded_steps > 0 and counters.fallbacks == 0
    assert "best validation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_runs_from_a_shell():
    arguments = [sys.executable, "examples/user_models/two_aggregators.py", "--backend", "eager", "--epochs", "1"]
    done = subprocess.run(arguments, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "best validation" in done.stdout


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_short_and_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert 30 <= len(text.splitlines()) <= 80
    assert f"python examples/user_models/{name}.py [--backend eager] [--epochs" in text


def test_every_file_of_the_folder_is_measured():
    assert {path.stem for path in Path(FOLDER).glob("*.py")} == {*MODELS, "on_cora"}
