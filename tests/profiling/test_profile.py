"""A real, small profile, and the command."""

import contextlib
import copy
import functools
import json
import re
import shlex
import threading
from datetime import datetime

import numpy as np
import pytest
import torch
from captures import cheaper, real
from torch.nn import functional as F
from typer.testing import CliRunner

import joestar
from joestar.bench.beside import NotComparableError, pyg_step
from joestar.bench.profile import EAGER, TRACED, _Run, copy_bandwidth, profile
from joestar.bench.step import logical_bytes
from joestar.cli.main import app
from joestar.cli.profile import command
from joestar.errors import ConfigError, SeedError
from joestar.profile.clocks import clocks, once
from joestar.profile.ledger import FIRST_BACKWARD, Report
from joestar.runtime import tuning
from tests.runtime.common import CLASSES, FEATURES, planted_graph

from .test_html import Page

pytestmark = pytest.mark.usefixtures("cheapest_captures", "texts")

STEPS, BATCH, HIDDEN = 3, 50, 8


@pytest.fixture(scope="module")
def parts():
    graph = joestar.load("cora")
    torch.manual_seed(1)
    model = joestar.nn.GraphSAGE(1433, HIDDEN, 2, 7, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sampler = joestar.NeighborSampler(graph, [4, 3])
    blocks = sampler.sample(graph, graph.train_idx)
    F.cross_entropy(model(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][graph.train_idx]).backward()
    optimizer.step()
    return model, sampler, optimizer, graph


@pytest.fixture(scope="module")
def profiled(parts):
    """The report, what was said, and whether the caller's things are as before."""
    model, sampler, optimizer, graph = parts
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state, lines = torch.get_rng_state(), []
    made = profile(
        model, sampler, F.cross_entropy, optimizer, graph.train_idx, BATCH, steps=STEPS, warm_up=1, say=lines.append,
        backend="eager",
    )  # fmt: skip
    assert torch.equal(state, torch.get_rng_state())
    now = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(before[0][name], now[0][name]) for name in before[0])
    assert now[1]["param_groups"] == before[1]["param_groups"]
    for index, moments in before[1]["state"].items():
        assert all(torch.equal(value, now[1]["state"][index][name]) for name, value in moments.items())
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())
    assert model.training
    return made, lines


def test_profile_is_complete(profiled, parts):
    report, lines = profiled
    found = report.profile
    assert 0 < found.p20 <= found.milliseconds <= found.p80
    assert (found.steps, found.epoch_steps) == (STEPS, 3)
    assert list(found.phases) == ["sampling", "forward", "backward", "optimizer", "bookkeeping", "set-up of the epoch"]
    assert sum(found.phases.values()) == pytest.approx(found.milliseconds)
    assert all(found.phases[name] > 0 for name in ("sampling", "forward", "backward", "optimizer"))
    names = {(kernel.phase, kernel.name) for kernel in found.kernels}
    assert {("sampling", "joestar::sample_cols"), ("forward", "aten::mm"), ("backward", "aten::mm")} <= names
    assert ("optimizer", "aten::_fused_adam_") in names
    micros = [kernel.microseconds for kernel in found.kernels]
    assert micros == sorted(micros, reverse=True)
    assert [stage.stage for stage in found.stages] == [EAGER, "+ fusion"]
    assert found.stages[-1].milliseconds == found.milliseconds
    assert found.stages[0].kernels > found.stages[1].kernels > 20
    assert len(lines) == 3 and lines[1] == f"+ fusion: {found.milliseconds:.3f} ms/step"
    assert found.peak_bytes >= 0 and found.bus == {} and found.copy_bandwidth > 0
    assert report.counters.steps == 1 + 1 + STEPS + 1 + TRACED
    assert report.programs[0].batch == BATCH
    assert sum(row.rewrites for row in report.programs[0].passes if row.name == "sample-gather-aggregate") == 1


def test_plain_pytorch_stands_beside(profiled):
    report, lines = profiled
    (beside,) = report.profile.baselines
    assert re.fullmatch(r"PyTorch eager, layers of PyG \d+\.\d+\.\d+\S*", beside.stage) and beside.milliseconds > 0
    assert lines[-1].startswith(beside.stage) and beside.kernels > 50 and report.profile.no_baseline == ""
    assert "times as fast as PyTorch eager, layers of PyG" in Page(report.to_html()).text


@pytest.mark.parametrize("kind", ["GraphSAGE", "GCN", "GIN", "GAT"])
def test_plain_pytorch_has_the_same_model_and_learns(parts, kind):
    _, sampler, _, graph = parts
    model = getattr(joestar.nn, kind)(1433, 8, 2, 7, **({"add_self_loops": False} if kind == "GAT" else {}))
    step = pyg_step(model, sampler, F.cross_entropy, torch.optim.Adam(model.parameters(), 0.02))
    losses = [float(step(graph.train_idx)) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.AdamW(ps, 0.02, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, 0.5, momentum=0.5),
        lambda ps: torch.optim.Adam(ps, 0.02, betas=(0.5, 0.9)),
    ],
)
def test_plain_pytorch_takes_the_same_optimizer(parts, optimizer, monkeypatch):
    model, sampler, _, graph = parts
    made = []
    given = optimizer(model.parameters())
    original = type(given).__init__

    def spy(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self.defaults)

    monkeypatch.setattr(type(given), "__init__", functools.wraps(original)(spy))
    step = pyg_step(model, sampler, F.cross_entropy, given)
    assert step(graph.train_idx).isfinite()
    assert made == [given.defaults]


def test_a_failure_of_plain_pytorch_does_not_lose_the_profile(parts, monkeypatch):
    model, sampler, optimizer, graph = parts

    def failing(*args):
        raise RuntimeError("no kernel of pyg-lib\nand more")

    monkeypatch.setattr("joestar.bench.profile.pyg_step", failing)
    run = _Run(model, sampler, F.cross_entropy, optimizer, graph.train_idx, BATCH, 1, 0)
    assert run.beside(print, None) == ([], "Plain PyTorch could not be timed: RuntimeError, no kernel of pyg-lib.")


def test_what_has_no_counterpart_in_plain_pytorch_says_so(parts, monkeypatch):
    model, sampler, optimizer, graph = parts
    sage = joestar.nn.GraphSAGE
    cases = {
        "models of joestar.nn only, not for Linear": (torch.nn.Linear(2, 2), sampler),
        "GraphSAGE with default settings only": (sage(1433, 8, 2, 7, norm="batch"), sampler),
        "with default settings": (sage(1433, 8, 2, 7, aggr="max"), sampler),
        "GAT with default settings": (joestar.nn.GAT(1433, 8, 2, 7), sampler),
        "without replacement only": (model, joestar.NeighborSampler(graph, [4, 3], replace=True)),
    }
    for words, (other, drawn) in cases.items():
        with pytest.raises(NotComparableError, match=words):
            pyg_step(other, drawn, F.cross_entropy, optimizer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotComparableError, match="PyG is not installed"):
        pyg_step(model, sampler, F.cross_entropy, optimizer)


def test_the_run_can_be_repeated(profiled):
    report, _ = profiled
    wanted = {"batch_size": str(BATCH), "timed steps": str(STEPS), "loss": "cross_entropy", "backend": "eager"}
    assert wanted.items() <= report.settings.items()
    assert report.settings["optimizer"].startswith("Adam(lr=0.01, betas=(0.9, 0.999)")
    env = report.environment
    assert env.cpu and env.processors >= 1 and env.memory > 1 << 28
    assert abs(datetime.now() - datetime.strptime(report.date[:16], "%Y-%m-%d %H:%M")).total_seconds() < 3600
    text = Page(report.to_html()).text
    assert env.cpu in text and report.date in text and "lr=0.01" in text


def test_compile_time_is_apart_from_the_steps(profiled):
    seconds = profiled[0].counters.seconds
    assert {"prepare", FIRST_BACKWARD, "forward", "backward", "optimizer"} <= set(seconds)
    assert [name for name, _, _ in clocks(profiled[0])] == ["forward", "optimizer", "backward"]
    assert len(once(profiled[0])) == 2
    per_step = {name: mean for name, _, mean in clocks(profiled[0])}
    steps = profiled[0].counters.steps
    assert per_step["forward"] == pytest.approx(seconds["forward"] / steps * 1e3)
    assert per_step["backward"] == pytest.approx(seconds["backward"] / (steps - 1) * 1e3)
    assert profiled[0].compile_seconds > seconds[FIRST_BACKWARD]


def test_logical_bytes_are_those_of_the_first_batch(profiled, parts):
    _, sampler, _, graph = parts
    blocks = sampler.sample(graph.keyed(0), graph.train_idx[:BATCH])
    counts = [BATCH, blocks[1].num_src, blocks[0].num_src]
    edges = [blocks[0].num_edges, blocks[1].num_edges]
    assert profiled[0].profile.logical_bytes == logical_bytes(counts, edges, 1433, HIDDEN, 4)


def test_report_of_a_real_run_is_a_page_and_json(profiled, tmp_path):
    report, _ = profiled
    page = Page(report.to_html())
    assert "http" not in report.to_html()
    assert "joestar::sample_cols" in page.text and "+ fusion" in page.text and "Graph(cora: 2,708 nodes" in page.text
    assert f"{report.programs[0].sets[0].bound:,}" in page.text
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert "Stages of compiling" in str(report)


def test_report_of_a_step_that_was_not_profiled(parts):
    model, sampler, _, graph = parts
    fresh = copy.deepcopy(model)
    step = joestar.compile(fresh, sampler, F.cross_entropy, torch.optim.Adam(fresh.parameters()), backend="eager")
    assert "take a step first" in Page(step.report().to_html()).text
    list(step.epoch(graph.train_idx, BATCH))
    text = Page(step.report().to_html()).text
    assert "3 of 3 ran as one static program" in text and "Step, host clock" in text


def test_without_ablation_and_other_models(parts):
    _, sampler, _, graph = parts
    model = joestar.nn.GCN(1433, 4, 2, 7)
    report = profile(
        model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), graph.train_idx, 1000,
        steps=1, warm_up=0, ablation=False, backend="eager",
    )  # fmt: skip
    assert report.profile.stages == [] and report.profile.logical_bytes is None
    assert report.profile.epoch_steps == 1 and report.programs[0].batch == 140
    assert ("optimizer", "aten::_fused_sgd_") in {(kernel.phase, kernel.name) for kernel in report.profile.kernels}


def test_untimed_steps_by_default(parts, monkeypatch):
    model, sampler, optimizer, graph = parts
    monkeypatch.setattr("joestar.bench.profile.WARM_UP", {"cpu": 2})
    report = profile(
        model, sampler, F.cross_entropy, optimizer, graph.train_idx, 140, steps=1, ablation=False, backend="eager"
    )
    assert report.counters.steps == 1 + 2 + 1 + 1 + TRACED


def test_impossible_numbers_and_options_are_refused(parts):
    model, sampler, optimizer, graph = parts
    for options, message in (
        ({"steps": 0}, "steps must be an integer of at least 1; got 0"),
        ({"warm_up": -1}, "warm_up must be an integer of at least 0; got -1"),
        ({"steps": True}, "steps must be"),
        ({"execution": "exact"}, "profile sets execution itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile(model, sampler, F.cross_entropy, optimizer, graph.train_idx, BATCH, **options)


@pytest.fixture
def small():
    """(model, sampler, optimizer, graph): a profile of it takes little."""
    graph = planted_graph(nodes=400)
    model = joestar.nn.GraphSAGE(FEATURES, 4, 2, CLASSES)
    return model, joestar.NeighborSampler(graph, [2, 2]), torch.optim.SGD(model.parameters(), 0.1), graph


def test_seeds_and_sizes_are_those_that_an_epoch_takes(small):
    """A mask was taken for the ids 0 and 1; arrays, lists and NumPy's numbers were errors of Python's."""
    model, sampler, optimizer, graph = small
    take = functools.partial(profile, model, sampler, F.cross_entropy, optimizer, ablation=False, backend="eager")
    few, one = torch.arange(60), {"steps": np.int64(1), "warm_up": np.int32(0)}
    for seeds in (few.numpy(), few.tolist(), few.int()):
        found = take(seeds, np.int64(30), **one)
        assert (found.profile.epoch_steps, found.profile.steps, found.programs[0].batch) == (2, 1, 30)
    mask = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for seeds, words in (
        (mask, "seeds is a mask"), (few.float(), "must be int64 or int32"), (few[:0], "seeds is empty"),
        (few.view(2, 30), "must be one-dimensional"), ([graph.num_nodes], "is not a node"), (None, "seeds is None"),
    ):  # fmt: skip
        with pytest.raises(SeedError, match=words):
            take(seeds, 30, **one)


class _Kept(torch.nn.Module):
    """A loss that keeps its running mean, in a buffer and beside it."""

    def __init__(self, *beside):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.scale, self.beside = torch.nn.Parameter(torch.ones(())), beside

    def forward(self, out, y):
        loss = F.cross_entropy(out * self.scale, y)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss


class _Trainer:
    """Has data, which nobody copies with its loss."""

    def __deepcopy__(self, memo):
        raise AssertionError

    def loss(self, out, y):
        return F.cross_entropy(out, y)


@pytest.mark.fuzz
def test_a_loss_is_not_changed(small):
    """Neither what it writes nor the gradients of what it reads, in any stage, nor in plain PyTorch."""
    model, sampler, *_ = small
    whole, lone, uncopied, count = copy.deepcopy(model), _Kept(), _Kept(threading.Lock()), torch.zeros(())
    whole.criterion = _Kept()
    weight = torch.ones((), requires_grad=True)
    weight.grad = given = torch.full((), 7.0)

    def closing(out, y):
        count.add_(1)
        return F.cross_entropy(out * weight, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    modules = model, whole, lone, uncopied
    before = copy.deepcopy([module.state_dict() for module in modules])
    cases = {"part": (whole, whole.criterion), "module": (model, lone), "method": (model, lone.forward),
             "uncopied": (model, uncopied), "function": (model, closing),
             "trainer": (model, _Trainer().loss)}  # fmt: skip
    for name, (trained, loss) in cases.items():
        ablation, optimizer = name in ("module", "function"), torch.optim.SGD(trained.parameters(), 0.1)
        with cheaper(real) if name == "function" else contextlib.nullcontext():  # another trace of it would write
            report = profile(
                trained, sampler, loss, optimizer, torch.arange(40), 20, steps=1, warm_up=0, backend="eager",
                ablation=ablation,
            )  # fmt: skip
        assert len(report.profile.baselines) == ablation
        for was, module in zip(before, modules, strict=True):
            assert all(torch.equal(value, was[key]) for key, value in module.state_dict().items()), name
            assert all(p.grad is None for p in module.parameters()), name
        assert (count.item(), weight.grad is given, given.item()) == (0, True, 7), name


def test_copy_bandwidth_is_of_this_machine():
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e13


def invoke(*arguments):
    return CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def test_command_prints_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "SPAN", 0.0)  # seconds per timing of a candidate
    html, data = tmp_path / "report.html", tmp_path / "report.json"
    shown = invoke(
        "cora", "--model", "gin", "--hidden", "8", "--fanouts", "3,2", "--batch-size", "70", "--steps", "2",
        "--backend", "eager", "--no-ablation", "--tune", "--html", str(html), "--json", str(data),
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    report = Report.load(data)
    assert (report.model, report.profile.steps, report.programs[0].batch) == ("GIN", 2, 70)
    assert report.tuning is not None and report.tuning.candidates
    assert json.loads(data.read_text())["sampler"] == "NeighborSampler(fanouts=[3, 2], replace=False, seed=0)"
    assert html.read_text() == report.to_html()
    assert report.command == (
        "joestar profile cora --model=gin --hidden=8 --fanouts=3,2 --batch-size=70 --backend=eager --steps=2 "
        "--no-ablation --tune"
    )
    assert {"model": "gin", "fanouts": "3,2", "lr": "0.01", "dropout": "0.5"}.items() <= report.settings.items()
    for text in ("A step takes", "Time per phase of a step", f"Wrote {html}", f"Wrote {data}"):
        assert text in shown.output.replace("\n", "") or text in shown.output


def test_the_command_of_a_report_gives_the_same_settings(monkeypatch):
    seen = []
    monkeypatch.setattr("joestar.cli.profile.run", lambda config, steps, *rest: seen.append((config, steps, *rest[:2])))
    assert invoke("cora", "--fanouts=-1,5", "--norm", "batch", "--lr=0.5", "--steps=3").exit_code == 0
    again = shlex.split(command(*seen[0]))
    assert again[:3] == ["joestar", "profile", "cora"]
    assert invoke(*again[2:]).exit_code == 0
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "none/report.html"], "--html none/report.html: expected the path of a file"),
        (["--html", "report.json"], "--html report.json: expected a file name that ends in .html"),
        (["--json", "report.txt"], "--json report.txt: expected a file name that ends in .json"),
        (["--model", "mlp"], "--model: expected one of sage"),
        (["coar"], "No dataset 'coar'"),
    ],
)
def test_command_refuses_before_it_works(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("joestar.cli.profile.profile", lambda *_, **__: pytest.fail("work was started"))
    failed = invoke(*arguments)
    assert failed.exit_code == 2
    assert message in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_settings_of_a_step_only():
    shown = invoke("--help").output
    for flag in ("--model", "--fanouts", "--hidden", "--batch-size", "--steps", "--html", "--json", "--config"):
        assert flag in shown
    for flag in ("--epochs", "--patience", "--save", "--report", "--execution"):
        assert f"{flag} " not in shown
