"""``joestar plan``, and training under a budget."""

import json
import re
import warnings

import pytest
import torch
from typer.testing import CliRunner

from joestar.cli import build
from joestar.cli.config import build_config
from joestar.cli.main import app
from joestar.errors import ConfigError, JoestarWarning
from joestar.staged import planning
from joestar.staged.epoch import planned_epoch
from joestar.stages import plan
from tests.runtime.staged_plans import made_up_clock

pytestmark = pytest.mark.usefixtures("cheapest_captures")
SMALL = ["--fanouts", "5,5", "--batch-size", "20", "--hidden", "16"]


def ran(*arguments):
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_plan_is_shown_and_written(tmp_path):
    shown = ran("plan", "cora", "--memory", "15MiB", *SMALL, "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert f"{found['macro_batches']} macro-batches of {found['num_seeds']} seeds" in shown
    assert found["memory"] <= found["budget"] == 15 << 20
    assert "over the bus" in shown
    assert f"working set: {found['working_set']['macro_batch']:,.1f} nodes per seed" in shown
    alone = found["working_set"]["batch_alone"]
    assert found["working_set"]["macro_batch"] <= alone and f"(a batch alone: {alone:,.1f})" in shown


def test_times_of_a_cpu_are_lower_bounds():
    for rough, word in ((False, "about"), (True, "at least")):
        made = plan.Plan(1 << 30, True, parts={"graph": 1}, seconds={"steps": 1.0}, rough=rough)
        assert f"an epoch: {word} " in str(made)
        [row] = planned_epoch(made, [9.0, 2.0], torch.device("cpu"))
        assert row.what.endswith("(at least)") == rough and row.measured == 2


def test_what_fits_is_said():
    shown = ran("plan", "--memory", "1GiB", *SMALL)
    assert "everything fits into 1.0 GiB" in shown and re.search(r"an epoch: at least \S+ \S+ of steps", shown)


def test_a_batch_ahead_is_counted():
    """Where everything fits with it; not in parts."""
    given = ["plan", "cora", *SMALL, "--memory"]
    assert "a step ahead" in ran(*given, "1GiB", "--prefetch") and "ahead" not in ran(*given, "1GiB")
    for more, words in (("15MiB",), "as a whole"), (("40MiB", "--partitions", "parts.npz"), "not for --partitions"):
        done = CliRunner().invoke(app, [*given, *more, "--prefetch"])
        assert done.exit_code != 0 and words in " ".join(done.output.split()) + str(done.exception)


def test_a_plan_for_one_of_several_gpus():
    """As many seeds per step of each, and a share of the epoch's: half as many macro-batches of a size, or smaller."""
    given = ["plan", "cora", "--memory", "15MiB", *SMALL]
    shown = ran(*given, "--gpus", "2")
    assert "that is for one of 2 ranks, with its share of every step" in shown and "ranks" not in ran(*given)
    number, seeds = (
        int(word.replace(",", "")) for word in re.search(r"(\d+) macro-batches of (\S+) seeds", shown).groups()
    )
    assert number == -(-70 // seeds)


def test_what_each_of_several_gpus_holds_is_shown_and_written(tmp_path):
    path = tmp_path / "plan.json"
    given = ["plan", "cora", "--memory", "15MiB", "--fanouts", "5", "--batch-size", "20", "--hidden", "4"]
    shown = ran(*given, "--gpus", "2", "--json", str(path))
    assert "on 2 GPUs, 15.0 MiB of each:" in shown and "-> features over the GPUs: " in shown
    found = json.loads(path.read_text())["over_gpus"]["ways"]
    assert [way["place"] for way in found] == ["replicate", "features", "structure", "host"]
    assert [way["left"] >= 0 for way in found][:2] == [False, True]
    assert "over the GPUs" not in ran(*given)


def test_the_step_that_is_expected_of_several_gpus_is_shown_and_written(tmp_path):
    """Where features are dealt out: if all fits on each GPU, or edges do not, places of features are no question."""
    path = tmp_path / "plan.json"
    given = ["plan", "cora", "--fanouts", "5", "--batch-size", "20", "--hidden", "4", "--gpus", "2", "--memory"]
    shown = ran(*given, "15MiB", "--json", str(path))
    assert "2 GPUs with 13.9 MiB each for them" in shown and "with prefetch=True" in shown
    found = json.loads(path.read_text())["features"]
    assert found["best"] == "shard" and found["room"] == pytest.approx(13.9 * 2**20, rel=0.01)
    computing, (whole, *others) = found["computing"], found["choices"]
    assert whole["seconds"] is whole["step"] is whole["ahead"] is None and computing > 0
    for choice in others:
        assert choice["step"] == computing + choice["seconds"] and choice["ahead"] >= computing
    assert "a step of a rank reads" not in ran(*given, "1GiB") + ran(*given, "8MiB")


def test_training_under_a_budget(tmp_path):
    saved = tmp_path / "model.joestar"
    shown = ran(
        "train", "cora", "--memory", "15MiB", *SMALL, "--epochs", "2", "--backend", "eager", "--save", str(saved)
    )
    assert "hot nodes" in shown
    assert saved.exists()


def test_the_pipeline_as_the_docs_show_it_without_a_gpu(tmp_path):
    """Macro-batches, of which some rows have to be loaded."""
    ran("generate", "papers100M", str(tmp_path / "papers"), "--scale", "0.002")
    given = ["--memory", "64MiB", "--batch-size", "200", "--hidden", "64", "--epochs", "3", "--backend", "eager"]
    shown = ran("train", str(tmp_path / "papers"), *given)
    number, loaded = re.search(r"(\d+) macro-batches of .*\((\d+)% have to be loaded\)", shown).groups()
    assert int(number) > 1 and int(loaded) > 1 and "epoch 3/3" in shown


@pytest.mark.parametrize("over_parts", [False, True])
def test_the_plan_is_said_before_anything_is_allocated(tmp_path, monkeypatch, over_parts):
    parts = tmp_path / "parts.npz"
    if over_parts:
        ran("partition", "cora", "--parts", "8", "--passes", "1", "--out", str(parts))
    given = ["--partitions", str(parts), "--group", "2", "--memory", "40MiB"] if over_parts else ["--memory", "15MiB"]

    def arena(self, plan):
        raise MemoryError("none left")

    monkeypatch.setattr(planning.Planner, "arena", arena)
    done = CliRunner().invoke(app, ["train", "cora", *given, *SMALL, "--backend", "eager"])
    assert isinstance(done.exception, MemoryError) or "none left" in done.output
    assert "macro-batches of" in done.output and "an epoch: " in done.output


def test_training_over_partitions(tmp_path):
    parts = tmp_path / "parts.npz"
    ran("partition", "cora", "--parts", "8", "--passes", "2", "--out", str(parts))
    given = ["cora", "--partitions", str(parts), "--group", "2", "--memory", "40MiB", *SMALL]
    assert "history" in ran("plan", *given)
    assert "for one of 2 ranks" in ran("plan", *given, "--gpus", "2")
    shown = ran("train", *given, "--epochs", "2", "--backend", "eager", "--report", str(tmp_path / "run.json"))
    assert "4 macro-batches" in shown
    history = json.loads((tmp_path / "run.json").read_text())["ledger"]["feeding"]["history"]
    assert [layer["width"] for layer in history] == [16] and history[0]["pushed"] > 0
    flags = {"--group": "2", "--hubs": "2", "--halo-fanout": "2", "--max-age": "2", "--ahead": "2", "--history": "bf16"}
    for flag, value in flags.items():
        done = CliRunner().invoke(app, ["train", "cora", flag, value])
        assert done.exit_code != 0 and f"{flag} is of --partitions FILE" in done.output + str(done.exception)


def test_what_partitions_take_can_be_set(tmp_path):
    """Every option reaches the first stage; with tables of 16 bits a run takes less of the host."""
    parts = tmp_path / "parts.npz"
    ran("partition", "cora", "--parts", "8", "--passes", "1", "--out", str(parts))
    given = {"partitions": str(parts), "group": 2, "history": "bf16", "hubs": 5, "halo_fanout": 3, "max_age": 7}
    stage = build.build_first_stage(build_config(None, {**given, "ahead": "4,3"}))
    assert (stage.group, stage.dtype, stage.hubs, stage.halo_fanout) == (2, torch.bfloat16, 5, 3)
    assert (stage.max_age, stage.fanouts) == (7, [4, 3])
    plain = build.build_first_stage(build_config(None, {"partitions": str(parts)}))
    assert (plain.group, plain.dtype, plain.hubs, plain.halo_fanout) == (1, torch.float32, 0, None)
    assert (plain.max_age, plain.fanouts) == (None, [-1, -1])
    assert build.build_first_stage(build_config(None, {"partitions": str(parts), "ahead": "3"})).fanouts == [-1] * 3
    options = ["cora", "--partitions", str(parts), "--group", "2", "--memory", "40MiB", *SMALL]
    tables = []
    for history in ("fp32", "bf16"):
        ran("plan", *options, "--history", history, "--json", str(tmp_path / "plan.json"))
        tables.append(json.loads((tmp_path / "plan.json").read_text())["host"]["historical embeddings"])
        ran("train", *options, "--history", history, "--epochs", "1", "--backend", "eager")
    assert tables[1] < 0.75 * tables[0]


def test_defaults_of_partitions_are_as_if_they_were_not_given(tmp_path):
    """So that a run can be resumed with either."""
    given = {"partitions": "parts.npz", "layers": 3}
    assert build_config(None, {**given, "history": "fp32", "hubs": 0, "ahead": "3"}) == build_config(None, given)
    file = tmp_path / "run.toml"
    file.write_text('partitions = "parts.npz"\nahead = 2\n')
    assert build_config(file, {"layers": 3}).ahead == (2,)
    for wrong in ("0", "-1", "x", "3,0"):
        with pytest.raises(ConfigError, match=r"--ahead: expected a number of hops \(2\), or picks of every hop"):
            build_config(None, {**given, "ahead": wrong})


def test_what_the_plan_finds_can_be_overridden():
    given = ["plan", "cora", "--memory", "15MiB", *SMALL]
    assert "of 40 seeds; 7 hot nodes" in ran(*given, "--macro-batch", "40", "--hot", "7")
    assert "; 0 hot nodes" in ran(*given, "--hot", "0")
    done = CliRunner().invoke(app, ["plan", "cora", "--hot", "3"])
    assert done.exit_code != 0 and "--memory" in done.output + str(done.exception)


def test_an_impossible_budget_is_refused(monkeypatch):
    done = CliRunner().invoke(app, ["plan", "--memory", "1MiB", *SMALL])
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError) or "too small" in done.output


def test_a_run_goes_on_with_what_was_planned_for_it(monkeypatch, tmp_path):
    """Whatever the machine is found to do the second time: sizes of macro-batches decide what is drawn."""

    def planned(command, *given):
        with warnings.catch_warnings():
            warnings.simplefilter("error", JoestarWarning)
            shown = ran(command, "cora", "--memory", "15MiB", *SMALL, *given)
        return re.search(r"macro-batches of (\d+) seeds; ([\d,]+) hot nodes .*? ([\d,]+) slots", shown).groups()

    def machine(number):
        for module in (plan, planning):
            monkeypatch.setattr(module, "time", made_up_clock(number))

    machine(0)
    trained = ["--backend", "eager", "--checkpoints", str(tmp_path), "--epochs"]
    first = planned("train", *trained, "1")
    machine(1)
    assert planned("plan") != first
    machine(1)
    assert planned("train", *trained, "2", "--resume") == first
