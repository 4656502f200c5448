"""``bench epoch``: every way of feeding trains the same batches; what is counted and expected; tables and files."""

import dataclasses
import functools
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import joestar
from joestar.bench import epoch, epoch_modes, scaling, step
from joestar.bench.busy import busy_share, united
from joestar.bench.planted import planted
from joestar.bench.setting import Setting
from joestar.bench.step import graph_of, network
from joestar.cli import bench as cli
from joestar.cli import bench_commands
from joestar.cli.main import app
from joestar.data.planted import SHAPES
from joestar.errors import ConfigError
from joestar.runtime.seeds import shuffled

SETTING = Setting("mini", models=("sage",), fanouts=(4, 3), hidden=8, batch_size=200, epochs=1, baselines=())
BUDGET = "15MiB"


@pytest.fixture(scope="module")
def eager():
    """Without Inductor, which nothing here is about."""
    patch = pytest.MonkeyPatch()
    patch.setattr(epoch_modes.joestar, "compile", functools.partial(joestar.compile, backend="eager"))
    yield patch
    patch.undo()


@pytest.fixture(scope="module")
def measured(eager):
    """(the result of all modes, how many rows there were whenever it was to be kept, lines)."""
    kept, lines = [], []
    result = epoch.run(SETTING, BUDGET, say=lines.append, keep=lambda found: kept.append(len(found["rows"])))
    return result, kept, lines


@pytest.mark.fuzz
def test_every_mode_is_measured_and_kept_at_once(measured):
    result, kept, lines = measured
    rows = {row["mode"]: row for row in result["rows"]}
    assert tuple(rows) == epoch.MODES and not any(row["note"] for row in result["rows"])
    assert kept == list(range(1, len(epoch.MODES) + 1))
    assert [line.split()[0] for line in lines[1:]] == list(epoch.MODES)
    for row in rows.values():
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0 and row["busy"] is None, "no GPU here"
        assert math.isfinite(row["loss"])
        assert (row["predicted_seconds"] is None) == (row["mode"] == "cpu")
        staged = row["mode"] in ("large-batch", "large-batch-cold", "partitions")
        planned = {"bus", "loads", "steps", "first stage"} if staged else set()
        assert set(row["planned"]) == planned | ({"loads and first stage"} if row["mode"] == "partitions" else set())
        assert set(row["stages"]) == ({"first stage", "load", "steps waited"} if staged else set())
        assert all(0 <= seconds < row["seconds"][-1] for seconds in row["stages"].values())
    whole = math.ceil(planted("mini").train_idx.numel() / SETTING.batch_size)
    assert rows["resident"]["steps"] == rows["cpu"]["steps"] == whole < rows["partitions"]["steps"]
    others = ("large-batch", "large-batch-cold", "partitions", "cpu")
    losses = [rows[mode]["loss"] for mode in epoch.MODES if mode not in others]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.03), "the same batches, but for their order"
    json.dumps(result)


@pytest.mark.fuzz
def test_bytes_over_the_bus(measured):
    """Rows of the second epoch's batches, counted from scratch."""
    rows, graph = {row["mode"]: row for row in measured[0]["rows"]}, planted("mini")
    row_bytes, sampler = 64 * 4, joestar.NeighborSampler(graph, list(SETTING.fanouts))
    order, before, needed, missing = shuffled(graph.train_idx, 0, 1), {0}, 0, 0
    for index, seeds in enumerate(order.split(SETTING.batch_size)):
        ids = set(sampler.sample(graph.keyed(0, 1, index), seeds)[0].srcs.tolist()) - {0}
        needed, missing, before = needed + len(ids), missing + len(ids - before), ids
    assert rows["resident"]["bus"] is None
    assert rows["match"]["bus"] == missing * row_bytes
    assert rows["match"]["match"] == pytest.approx(1 - missing / needed)
    assert rows["pinned"]["bus"] == pytest.approx(needed * row_bytes, rel=0.1), "from other batches"
    assert rows["match-reorder"]["bus"] < rows["match"]["bus"] < rows["pinned"]["bus"]
    assert 0 < rows["cached-match"]["bus"] < rows["match-reorder"]["bus"]
    assert 0 < rows["cached"]["bus"] < rows["pinned"]["bus"]
    assert rows["large-batch"]["bus"] > 0 and rows["cpu"]["bus"] > rows["pinned"]["bus"]
    assert rows["large-batch-cold"]["bus"] > rows["large-batch"]["bus"] and rows["partitions"]["bus"] > 0


def test_too_small_a_budget_is_a_note(eager):
    lines = []
    modes = ("match", "cached", "cached-match", "pinned")
    found = epoch.run(SETTING, "100KiB", modes, lines.append)
    assert all("budget" in row["note"] and not row["seconds"] for row in found["rows"])
    assert all(row["note"] in line for row, line in zip(found["rows"], lines[1:], strict=True))


def test_rows_are_expected_to_take_what_those_of_some_batches_took(eager, monkeypatch):
    """Every mode that reads rows in its steps, or beside them, tries the rows that it would read: a row of half of the
    table takes twice as long as one of the other half, whatever the planner knows of this machine's bus."""
    graph, tried, buffers = planted("mini"), [], set()
    far = torch.arange(graph.num_nodes) % 2

    def seconds(device, work) -> float:
        tried.clear()
        work()
        return sum(tried)

    def took(ids) -> None:
        tried.append(0.001 * (ids.numel() + int(far[ids.long()].sum())))

    rows, load = epoch_modes.FeatureStore.rows, epoch_modes.RowBuffer.load
    monkeypatch.setattr(epoch_modes, "seconds_of", seconds)
    monkeypatch.setattr(epoch_modes.FeatureStore, "rows", lambda self, ids: (took(ids), rows(self, ids))[1])

    def loaded(self, ids, to) -> None:
        buffers.add(self)
        took(ids)
        load(self, ids, to)

    monkeypatch.setattr(epoch_modes.RowBuffer, "load", loaded)
    monkeypatch.setattr(epoch_modes, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # windows take no time
    for mode, beside in (("pinned", False), ("cached", False), ("match", True), ("match-reorder", True)):
        net = network("sage", graph, SETTING)
        job = epoch_modes.Job(graph, net, torch.optim.SGD(net.parameters(), 0.1), SETTING, 1 << 24, torch.device("cpu"))
        job.__dict__["planner"] = SimpleNamespace(step_seconds=lambda: 0.001, workspace=lambda: 0)
        fed = epoch_modes.MODES[mode](job)
        latest = list(tried)[: epoch_modes.TRIED]  # a window is loaded once more behind these
        assert len(latest) == epoch_modes.TRIED
        each = sum(latest) / len(latest)
        assert each > 0.1
        assert fed.seconds == pytest.approx(job.steps * (max(0.001, each) if beside else 0.001 + each))
        if mode == "pinned":
            assert fed.bus() / job.row_bytes / job.steps * 0.001 < each < 2 * fed.bus() / job.row_bytes * 0.001
    assert all((buffer.slot_of >= 0).sum() == buffer.hot for buffer in buffers), "what was tried is not there"
    assert job.seconds() == pytest.approx(job.steps * 0.001)


def test_windows_that_are_sampled_ahead_may_be_what_takes_longest(eager, monkeypatch):
    """As expected of an epoch: the time of a window's rows beside the next one, if rows alone take next to none."""
    graph, clock, windows = planted("mini"), [0.0], []
    call = epoch_modes.Windows.__call__

    def slow(self, window):
        windows.append(call(self, window))
        clock[0] += 8.0 if window == 2 else 100.0
        return windows[-1]

    monkeypatch.setattr(epoch_modes.Windows, "__call__", slow)
    monkeypatch.setattr(epoch_modes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    net = network("sage", graph, SETTING)
    job = epoch_modes.Job(graph, net, torch.optim.SGD(net.parameters(), 0.1), SETTING, 1 << 24, torch.device("cpu"))
    fed = epoch_modes.MODES["match-reorder"](job)
    assert len(windows) == 3 and fed.seconds == pytest.approx(job.steps * 8.0 / len(windows[1]))


def test_unknown_words_are_refused():
    with pytest.raises(ConfigError, match="unknown mode 'fast'"):
        epoch.run(SETTING, BUDGET, ("fast",))
    with pytest.raises(ConfigError, match="unknown precision 'fp8'"):
        epoch.run(dataclasses.replace(SETTING, precision="fp8"), BUDGET)


def test_a_share_of_a_shape_with_features_of_16_bits(eager):
    setting = dataclasses.replace(
        SETTING, shape="mag240m-c", scale=0.0001, precision="fp16", fanouts=(3, 2), batch_size=60
    )
    lines = []
    found = epoch.run(setting, "1GiB", ("match-reorder", "cpu"), lines.append)
    assert "12,175 nodes" in lines[0] and "x[12175, 768]" in lines[0]
    assert not any(row["note"] for row in found["rows"]), found["rows"]
    assert all(0 < row["loss"] < 10 for row in found["rows"])
    assert found["rows"][0]["bus"] % (768 * 2) == 0


def test_widths_that_are_given(eager):
    """Columns of features and heads of attention are those that were asked for, in the graph and in the model."""
    setting = dataclasses.replace(
        SETTING, shape="tiny", models=("gat",), heads=2, features=24, precision="fp16", batch_size=100, dropout=0.0
    )
    graph = graph_of("shuffled", "cpu", setting)
    assert graph.ndata["x"].shape == (2_000, 24) and graph.ndata["x"].dtype == torch.float16
    assert [conv.heads for conv in network("gat", graph, setting).convs] == [2, 2]
    lines = []
    (row,) = epoch.run(setting, "1GiB", ("resident",), lines.append)["rows"]
    assert "x[2000, 24]" in lines[0] and not row["note"] and 0 < row["loss"] < 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": 0}, "--features must be at least 1; got 0"),
        ({"features": 8, "dataset": "cora"}, "--dataset cora has features of its own"),
        ({"heads": 0}, "--heads must be at least 1; got 0"),
        ({"heads": 3, "models": ("gat",)}, "--hidden 8 is no multiple of --heads 3"),
        ({"models": ("gate",)}, "unknown model 'gate'"),
    ],
)
def test_widths_that_cannot_be_are_refused_before_the_graph_is_made(monkeypatch, given, message):
    monkeypatch.setattr(step, "planted", lambda *_args, **_more: pytest.fail("a graph was made"))
    monkeypatch.setattr(step.joestar, "load", lambda *_args, **_more: pytest.fail("a graph was loaded"))
    setting = dataclasses.replace(SETTING, **given)
    with pytest.raises(ConfigError, match=message):
        epoch.run(setting, BUDGET)
    with pytest.raises(ConfigError, match=message):
        scaling.run(setting, (1, 2))


def test_a_head_may_be_as_wide_as_a_single_layer():
    dataclasses.replace(SETTING, models=("gat",), heads=3, fanouts=(4,)).check()  # it has no hidden layer
    dataclasses.replace(SETTING, models=("sage",), heads=3).check()  # and this one no heads


# --- how busy ---


def test_spans_are_united():
    assert united([]) == 0
    assert united([(5, 6), (0, 2), (1, 3), (1.5, 2), (3, 4)]) == 5


def test_a_cpu_has_no_share():
    losses = iter(range(3))
    assert busy_share(losses, torch.device("cpu"), 1.0) is None and next(losses) == 0, "and no step is taken for it"


# --- tables ---


def test_tables_fit_80_columns():
    row = epoch.Row(
        "large-batch", "sage", [1234.567, 1234.567], 1234.5, 12345.6e9, 123 * 2**30, 12345.6, 1234.567, 123 * 2**30,
        0.123, 0.999, 1.0,
    )  # fmt: skip
    modes = [dataclasses.replace(row, mode=mode) for mode in epoch.MODES]
    setting = dataclasses.asdict(SETTING) | {"budget": 24 << 30}
    text = _printed({"setting": setting, "rows": [dataclasses.asdict(row) for row in modes]})
    assert max(map(len, text)) <= 80 and "…" not in "".join(text)
    assert sum(line.count("1234.567") for line in text) == 2 * len(modes) and sum(line.count("1.00") for line in text)
    short = [dataclasses.asdict(epoch.Row("resident", "gat", [2.0, 1.0, 3.0, 2.5], bus=None, ids="shuffled"))]
    short.append(dataclasses.asdict(epoch.Row("cached", "sage", note="no room", ids="shuffled")))
    text = "\n".join(_printed({"setting": setting, "rows": short}))
    assert "2.500" in text and "sage cached: no room" in text and "plan" not in text, "the first epoch does not count"


def _printed(result: dict) -> list[str]:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    cli._epoch_tables(result, console)
    return console.file.getvalue().splitlines()


def test_the_command(eager, tmp_path):
    file = tmp_path / "epoch.json"
    arguments = ["bench", "epoch", "--shape", "mini", "--modes", "match,cached", "--budget", BUDGET, "--epochs", "1"]
    arguments += ["--fanouts", "4,3", "--hidden", "8", "--batch-size", "1000", "--no-busy", "--json", str(file)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert [row["mode"] for row in json.loads(file.read_text())["rows"]] == ["match", "cached"]
    assert "mini, on cpu, fp32, batch 1000, fanouts 4,3, hidden 8" in found.output


def test_the_command_takes_widths(monkeypatch):
    """With modes and with processes: the same setting reaches both, and both say it."""
    seen = []
    monkeypatch.setattr(epoch, "run", lambda setting, *more: seen.append(setting) or _nothing(setting))
    monkeypatch.setattr(scaling, "run", lambda setting, *more: seen.append(setting) or _nothing(setting))
    arguments = ["bench", "epoch", "--models", "sage,gat", "--hidden", "512"]
    for more in ([], ["--gpus", "1,2"], ["--processes", "1,2"]):
        found = CliRunner().invoke(app, [*arguments, "--features", "1024", "--heads", "8", *more])
        assert found.exit_code == 0, found.output
        assert (seen[-1].features, seen[-1].heads, seen[-1].hidden) == (1024, 8, 512)
        assert "hidden 512, 8 heads, 1,024 features" in " ".join(found.output.split())
    CliRunner().invoke(app, arguments)
    assert (seen[-1].features, seen[-1].heads) == (None, 4)
    for wrong, message in (
        (["--features", "0"], "features"), (["--heads", "0"], "heads"), (["--features", "many"], "features"),
        (["--heads", "2", "--models", "sage"], "--heads is of gat, which --models sage does not name"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2 and message in refused.output, refused.output
    assert len(seen) == 4


def _nothing(setting: Setting) -> dict:
    return {"machine": "none", "setting": {**dataclasses.asdict(setting), "budget": 1}, "rows": []}


def test_names_in_help_texts_are_those_there_are():
    assert tuple(SHAPES) == bench_commands.SHAPES
    assert epoch.MODES == bench_commands.MODES
    help_text = CliRunner().invoke(app, ["generate", "--help"]).output
    assert all(name in help_text for name in SHAPES)
