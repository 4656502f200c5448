"""Measured speeds: every one is measured, on what it says, once; the file is remembered and may be damaged."""

import json

import pytest
import torch

from joestar.store import bandwidth
from joestar.store.bandwidth import Speeds, speeds

pytest.importorskip("joestar._native")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The row sizes that were measured."""
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    monkeypatch.setattr(bandwidth, "SOURCE_BYTES", 2**16)
    real, seen = bandwidth.measure, []

    def measure(device, row_bytes):
        seen.append(row_bytes)
        return real(device, row_bytes)

    monkeypatch.setattr(bandwidth, "measure", measure)
    return seen


def test_speeds_are_measured_once(measured, tmp_path):
    first = speeds("cpu", 500)
    assert first.row_bytes == 512 and min(vars(first).values()) > 0
    assert speeds("cpu", 512) == first and measured == [512]
    assert speeds("cpu", 64) != first and measured == [512, 64]
    speeds("cpu", 512, again=True)
    assert measured == [512, 64, 512]
    assert [path.name for path in tmp_path.iterdir()] == ["bandwidth.json"]


OTHERS = '{"format": 9}', '{"format": 1, "speeds": {}}', '{"format": 2, "speeds": {"a": {"row_bytes": 1}}}'


@pytest.mark.parametrize("content", ["", "[1]", *OTHERS])
def test_a_damaged_file_is_measured_anew(measured, content):
    bandwidth.file().write_text(content)
    assert speeds("cpu").zero_copy > 0 and measured == [512]
    assert json.loads(bandwidth.file().read_text())["format"] == 2


def test_speeds_of_wrong_types_do_not_count(measured):
    speeds("cpu")
    content = json.loads(bandwidth.file().read_text())
    for values in content["speeds"].values():
        values["zero_copy"] = "fast"
    bandwidth.file().write_text(json.dumps(content))
    assert speeds("cpu").zero_copy > 0 and len(measured) == 2


def test_nowhere_to_write(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path / "file"))
    assert isinstance(speeds("cpu"), Speeds)
    assert speeds("cpu").row_bytes == 512 and len(measured) == 2


def test_rows_are_taken_as_a_macro_batch_takes_them():
    for every, count in ((4, 250), (16, 62), (64, 15), (256, 3)):
        ids = bandwidth._spread(1001, every)
        assert ids.numel() == count and bool((ids.diff() > 0).all()) and int(ids.max()) < 1001
        assert ids.diff().unique().numel() > min(3, count - 2)


def test_what_is_timed_is_what_it_says(monkeypatch):
    """With a clock that counts calls, each speed is its bytes over one second."""
    monkeypatch.setattr(bandwidth, "SOURCE_BYTES", 2**14)
    monkeypatch.setattr(bandwidth, "_seconds", lambda work: (work(), 1.0)[1])
    found = bandwidth.measure(torch.device("cpu"), 64)
    moved = 2**14 / 4 / 1e9
    expected = Speeds(64, moved, moved, moved, 2 * moved, moved, *(moved / few for few in (4, 16, 64)))
    assert found == expected
    assert found.sparse == {4: moved, 16: moved / 4, 64: moved / 16, 256: moved / 64}
    assert Speeds(64, 1.0, 1.0, 2.0, 1.0, 1.0).sparse == {4: 2.0}


def test_a_launch_is_no_part_of_the_speed_of_rows(monkeypatch):
    """With a clock of 5 s per launch and 1 s per row, a row takes 1 s, however few are read. Where the clock cannot
    tell, launches count."""
    calls = []

    def fill(view, ids, slots, near):
        calls.append(ids.numel())

    def clock(launch):
        def seconds(work):
            calls.clear()
            work()
            return launch + sum(calls) if calls else 1.0

        return seconds

    monkeypatch.setattr(bandwidth, "SOURCE_BYTES", 2**21)
    monkeypatch.setattr(bandwidth, "fill_rows", fill)
    rows = 2**21 // 64
    for launch in (5.0, 1e6):
        monkeypatch.setattr(bandwidth, "_seconds", clock(launch))
        found = bandwidth.measure(torch.device("cpu"), 64).sparse
        counts = {every: rows // every for every in (4, 16, 64, 256)}
        took = {every: count + launch * (launch > rows) for every, count in counts.items()}
        assert found == pytest.approx({every: 64 * count / took[every] / 1e9 for every, count in counts.items()})
