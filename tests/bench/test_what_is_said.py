"""Figures, files and words of measurements: percentiles, JSON that every reader takes, settings that cannot be."""

import json
import os

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from joestar.bench import measure, passes, scaling, user_models
from joestar.bench.measure import Timing, time_steps
from joestar.bench.setting import Setting
from joestar.cli.files import check_writable, write_json
from joestar.cli.main import app
from joestar.errors import ConfigError
from joestar.profile.files import as_json
from joestar.profile.numbers import parse_bytes


@pytest.mark.parametrize("count", [1, 2, 5, 20, 31])
def test_percentiles_are_those_of_numpy(count):
    """The upper one of five steps was the slowest of them."""
    times = np.random.default_rng(count).exponential(size=count)
    found = Timing.of(times.tolist())
    assert [found.p20, found.median, found.p80] == pytest.approx(np.percentile(times, [20, 50, 80]))
    assert found.steps == count


def test_steps_in_groups_are_counted(monkeypatch):
    """What was counted on a GPU were groups."""

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: None

        def elapsed_time(self, after):
            return 30.0

    monkeypatch.setattr(measure.torch.cuda, "Event", Event)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda device: None)
    calls = []
    found = time_steps(lambda: calls.append(1), 25, 0, torch.device("cuda"), 10)
    assert (found.median, found.steps, len(calls)) == (3.0, 20, 20)


def test_json_has_no_words_of_its_own(tmp_path):
    """Rows without figures have a loss of NaN, which most readers of JSON refuse."""

    def refused(word):
        raise AssertionError(word)

    content = {"rows": [{"loss": float("nan"), "seconds": (1.5, float("inf"))}], "note": "nan", "steps": 3}
    write_json(str(tmp_path / "rows.json"), content)
    wanted = {"rows": [{"loss": None, "seconds": [1.5, None]}], "note": "nan", "steps": 3}
    assert json.loads((tmp_path / "rows.json").read_text(), parse_constant=refused) == wanted
    assert json.loads(as_json(wanted)) == wanted


def test_files_are_written_to_what_links_lead_to(tmp_path):
    """A link was replaced, and the file that it leads to stayed as it was."""
    (tmp_path / "far").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "far" / "rows.json")
    for step in (1, 2):
        write_json(str(tmp_path / "link.json"), {"step": step})
        assert (tmp_path / "link.json").is_symlink()
        assert json.loads((tmp_path / "far" / "rows.json").read_text()) == {"step": step}
    assert os.listdir(tmp_path / "far") == ["rows.json"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    """For root, whose folder /dev may be written to, too."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "lost.json").symlink_to(tmp_path / "no" / "rows.json")
    with pytest.raises(ConfigError, match="a device or a pipe"):
        check_writable(str(tmp_path / "pipe"), "--json")
    with pytest.raises(ConfigError, match="no is not a folder that can be written to"):
        check_writable(str(tmp_path / "lost.json"), "--json")
    with open(tmp_path / "printed.txt", "w") as printed:  # where the table goes
        for name in ("/dev/stdout", f"/dev/fd/{printed.fileno()}", f"/proc/self/fd/{printed.fileno()}"):
            with pytest.raises(ConfigError, match="a device or a pipe"):
                check_writable(name, "--json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("step --models none", "no model is given"),
        ("step --fanouts ,", "no fanout is given"),
        ("step --ids ,", "no order of ids is given"),
        ("epoch --modes none", "no mode is given"),
        ("epoch --ids shuffeld", "unknown order of ids 'shuffeld'"),
        ("inference --ids shuffeld", "unknown order of ids 'shuffeld'"),
        ("inference --budget nan", "a number of GiB above 0"),
        ("inference --budget inf", "a number of GiB above 0"),
        ("inference --budget 0", "a number of GiB above 0"),
        ("epoch --budget 0", "--budget must be a number of bytes"),
        ("epoch --budget 0.5b", "--budget must be a number of bytes"),
        ("user --models none", "no model is given"),
        ("passes --models none", "no model is given"),
        ("passes --models sage", "needs as many training nodes"),
        ("kernels --only (", "--only takes a regular expression"),
    ],
)
def test_what_measures_nothing_or_something_else_is_refused(given, message):
    """Before any work: these ended with empty tables, in a traceback, or measured other ids than the rows said."""
    name, *flags = given.split()
    shape = [] if name == "kernels" else ["--shape", "tiny"]
    failed = CliRunner().invoke(app, ["bench", name, *shape, *flags])
    assert failed.exit_code == 2, failed.output
    assert message in " ".join(failed.stderr.split()) and "Graph(" not in failed.output


def test_several_processes_measure_one_order_of_ids():
    """The second one was left out without a word."""
    setting = Setting(shape="tiny", models=("sage",), ids=("shuffled", "planted"))
    with pytest.raises(ConfigError, match="one order of ids"):
        scaling.run(setting, (1,), launch=lambda world, task: [])


def test_sizes_of_nothing_are_none():
    for text in ("0", "0 GiB", "0.2", "0.0001k"):
        with pytest.raises(ConfigError, match="must be a number of bytes"):
            parse_bytes(text)
        assert parse_bytes(text, "hot", least=0) == 0


def test_a_full_batch_is_needed():
    setting = user_models.UserSetting(shape="tiny", models=("sage",), batch_size=501)
    with pytest.raises(ConfigError, match="a batch of 501 needs"):
        passes.run(setting)
