"""``bench epoch --gpus``, ``--processes``: processes that train the same, what is counted of them, and their errors."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from joestar.bench import scaling
from joestar.bench.ranks import Row, Task, measure
from joestar.bench.setting import Setting
from joestar.cli.bench_scaling import bench_scaling, tables
from joestar.cli.main import app
from joestar.distributed.reduction import TILE
from joestar.errors import ConfigError, DistributedError
from tests.distributed import scenarios
from tests.distributed.ranks import results

SETTING = Setting("tiny", models=("sage", "gat"), fanouts=(3, 2), hidden=8, batch_size=20, epochs=1, dropout=0.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(result, lines, number of rows whenever they were kept)."""

    def launch(world: int, task: Task) -> list[dict]:
        if world == 1:
            return scenarios.measured(task.text())
        return results(world, scenarios.measured, task.text(), folder=tmp_path_factory.mktemp("ranks"))[0]

    lines, kept = [], []
    result = scaling.run(SETTING, (1, 2), "eager", lines.append, lambda r: kept.append(len(r["rows"])), launch)
    return result, lines, kept


@pytest.mark.fuzz
def test_every_model_on_every_number_of_processes(measured):
    result, lines, kept = measured
    rows = {(row["model"], row["world"]): Row(**row) for row in result["rows"]}
    assert list(rows) == [("sage", 1), ("gat", 1), ("sage", 2), ("gat", 2)] and kept == [2, 4]
    assert [line.partition(":")[0] for line in lines] == ["sage  on 1", "gat   on 1", "sage  on 2", "gat   on 2"]
    for (model, world), row in rows.items():
        assert len(row.seconds) == 2 and min(row.seconds) > 0 and row.setup > 0 and math.isfinite(row.loss)
        assert row.speedup == pytest.approx(rows[model, 1].median / row.median)
        assert row.batch == 20 * world and row.steps == {1: 25, 2: 13}[world]
        assert row.seeds_per_second == pytest.approx(500 / row.median)
    json.dumps(result)


@pytest.mark.fuzz
def test_sums_over_ranks_are_counted(measured):
    for row in (Row(**row) for row in measured[0]["rows"]):
        if row.world == 1:
            assert row.reduced_bytes == row.link_bytes == row.reduce_us == row.share == 0
            continue
        model = scaling_network(row.model)
        parameters = sum(-(-p.numel() // 16) * 16 for p in model.parameters())
        tiles = -(-parameters // TILE) + 1  # the last one has the loss and the mark of an overflow
        assert row.reduced_bytes == 4 * TILE * tiles
        assert row.link_bytes == row.reduced_bytes  # 2 (N - 1) / N of it
        assert row.share == pytest.approx(row.reduce_us * row.steps / (row.median * 1e6)) and row.share > 0


def scaling_network(name: str):
    """The model that was measured."""
    from joestar.bench.step import graph_of, network

    return network(name, graph_of("shuffled", "cpu", SETTING), SETTING)


@pytest.mark.fuzz
def test_processes_train_what_one_trains_with_their_batches_together(measured):
    with scenarios.cheaper(scenarios.quick):
        one = measure(Task(replace(SETTING, batch_size=40, models=("sage",)), "eager"))
    two = next(row for row in measured[0]["rows"] if (row["model"], row["world"]) == ("sage", 2))
    assert two["loss"] == pytest.approx(one[0]["loss"], rel=1e-5)


@pytest.mark.fuzz
def test_the_tables_fit_a_terminal(measured):
    rows = [Row(**row) for row in measured[0]["rows"]] + [Row("gin", 2, note="rank 1 of 2 ended with code 1: odd")]
    (_, times), (_, sums) = tables(rows)
    assert len(times) >= 5 and times[-1].split()[:3] == ["gat", "2", "40"]
    assert sums[-1] == "gin on 2: rank 1 of 2 ended with code 1: odd"
    assert all(len(line) <= 80 for line in (*times, *sums))


def test_a_job_that_fails_is_a_row_that_says_so():
    def launch(world, task):
        if world == 2:
            raise DistributedError("rank 1 of 2 ended with code 1: out of memory")
        return [vars(Row("sage", world, seconds=[2.0, 1.0]))]

    setting, lines = replace(SETTING, models=("sage",)), []
    result = scaling.run(setting, (1, 2, 4), "eager", lines.append, launch=launch)
    assert [row["note"] for row in result["rows"]] == ["", "rank 1 of 2 ended with code 1: out of memory", ""]
    assert [row["speedup"] for row in result["rows"]] == [1.0, None, 1.0]


def test_what_cannot_be_run_is_said_before():
    for worlds, setting, words in (
        ((), SETTING, "must be positive, and differ"),
        ((1, 1), SETTING, "must be positive, and differ; got 1,1"),
        ((1,), replace(SETTING, precision="fp64"), "unknown precision 'fp64'"),
        ((999,), replace(SETTING, device="cuda"), "999 GPUs are wanted, and PyTorch finds"),
    ):
        with pytest.raises(ConfigError, match=words):
            scaling.run(setting, worlds)
    with pytest.raises(ConfigError, match="unknown backend 'odd'"):
        scaling.run(SETTING, (1,), "odd")
    with pytest.raises(ConfigError, match="not both"):
        bench_scaling(SETTING, "1", "2", None, Console(file=io.StringIO()))


def test_processes_are_told_who_they_are(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "RANK" not in scaling.environment_of(0, 1, 5)
    own = scaling.environment_of(1, 2, 5)
    assert (own["RANK"], own["WORLD_SIZE"], own["MASTER_PORT"], own["OMP_NUM_THREADS"]) == ("1", "2", "5", "3")


@pytest.mark.fuzz
@pytest.mark.skipif(torch.cuda.is_available(), reason="--processes take the device that is given")
def test_the_command_starts_the_processes_by_itself(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--shape", "tiny", "--fanouts", "2,2", "--hidden", "4", "--batch-size", "50", "--epochs", "1"]
    words = ["bench", "epoch", "--processes", "1,2", "--backend", "eager", "--json", str(file), *words]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "100", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["world"], row["note"]) for row in rows] == [(1, ""), (2, "")] and "per link" in done.output
    with pytest.raises(DistributedError, match=r"rank \d of 2 ended with code 1: .*No dataset 'odd'"):
        scaling.started(2, Task(replace(SETTING, dataset="odd"), "eager"))
