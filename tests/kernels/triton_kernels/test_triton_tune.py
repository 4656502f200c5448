"""The choice of launch settings: timed once, remembered on disk, never in the way."""

import json
import threading

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.kernels import tune

CANDIDATES = [{"ROWS": 2, "num_warps": 2}, {"ROWS": 4, "num_warps": 4}, {"ROWS": 1, "num_warps": 1}]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Settings that were timed; the last candidate is the fastest."""
    seen = []

    def milliseconds(launch, config):
        seen.append(config)
        return 1.0 / config["ROWS"] if config["ROWS"] > 1 else 0.1

    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "_milliseconds", milliseconds)
    monkeypatch.setattr(tune, "_may_time", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    tune.forget()
    torch.use_deterministic_algorithms(False)
    yield seen
    tune.forget()


def _choose(candidates=CANDIDATES, work=tune.SMALL, device=CUDA, **options):
    return tune.choose("kernel", (torch.float32, 100), candidates, lambda config: None, work, device, **options)


def test_the_fastest_is_chosen_and_remembered(timed):
    assert _choose() == CANDIDATES[2]
    assert timed == CANDIDATES
    assert _choose() == CANDIDATES[2]
    tune.forget()
    assert _choose() == CANDIDATES[2]
    assert timed == CANDIDATES
    content = json.loads(tune.cache_file().read_text())
    assert content["best"] == {tune._code(): {"kernel Test GPU torch.float32 100": CANDIDATES[2]}}


def test_candidates_are_compiled_before_the_first_is_timed(timed, monkeypatch):
    compiled = []

    def compile_all(launches):
        assert not timed
        compiled.extend(launch() for launch in launches)

    monkeypatch.setattr(tune, "compile_all", compile_all)
    tune.choose("kernel", (1,), CANDIDATES, lambda config: config, tune.SMALL, CUDA)
    assert compiled == timed == CANDIDATES
    tune.choose("kernel", (1,), CANDIDATES, lambda config: config, tune.SMALL, CUDA)
    assert compiled == CANDIDATES, "what is known is not compiled"


def test_what_is_not_worth_timing_takes_the_default(timed):
    assert _choose(work=tune.SMALL - 1) == CANDIDATES[0]
    assert _choose(CANDIDATES[1:2]) == CANDIDATES[1]
    assert _choose(device=torch.device("cpu")) == CANDIDATES[0]
    assert not timed


def test_within_a_capture_what_is_known_is_used(timed, monkeypatch):
    monkeypatch.setattr(tune, "_may_time", lambda device: False)
    assert _choose() == CANDIDATES[0]
    monkeypatch.setattr(tune, "_may_time", lambda device: True)
    _choose()
    monkeypatch.setattr(tune, "_may_time", lambda device: False)
    assert _choose() == CANDIDATES[2]


def test_settings_that_are_no_candidates_any_more_are_timed_again(timed):
    _choose()
    assert _choose(CANDIDATES[:2]) == CANDIDATES[1]
    assert len(timed) == 5


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 0, "best": {}}', '{"format": 2, "best": 3}', '{"format": 1}']
)
def test_a_damaged_file_counts_as_empty(timed, content):
    tune.cache_file().parent.mkdir()
    tune.cache_file().write_text(content)
    assert _choose() == CANDIDATES[2]
    assert json.loads(tune.cache_file().read_text())["format"] == 2


def test_a_folder_that_cannot_be_written_costs_only_the_memory(timed, monkeypatch):
    monkeypatch.setenv("JOESTAR_CACHE", "/dev/full")
    assert _choose() == CANDIDATES[2]
    assert _choose() == CANDIDATES[2]
    assert timed == CANDIDATES


def test_sums_are_reset_after_timing(timed):
    resets = []
    _choose(reset=lambda: resets.append(len(timed)))
    assert resets == [3]


def test_size_classes_are_powers_of_two():
    assert [tune.size_class(n) for n in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 0, 1, 2, 2, 3, 10, 11]


def test_no_timing_without_a_gpu():
    assert not tune._may_time(torch.device("cpu"))


def test_deterministic_runs_take_the_first_settings_whatever_is_known(timed):
    assert _choose() == CANDIDATES[2]
    with tune.deterministic():
        assert tune.is_deterministic() and _choose() == CANDIDATES[0]
        with tune.deterministic(False), tune.deterministic():
            assert _choose() == CANDIDATES[0]
        seen = []
        thread = threading.Thread(target=lambda: seen.append(_choose()))  # as autograd's
        thread.start()
        thread.join()
        assert seen == [CANDIDATES[0]]
    assert not tune.is_deterministic() and _choose() == CANDIDATES[2]
    torch.use_deterministic_algorithms(True)
    assert _choose() == CANDIDATES[0]
    torch.use_deterministic_algorithms(False)
    assert timed == CANDIDATES


def test_other_code_measures_anew_and_both_are_kept(timed, monkeypatch):
    _choose()
    for part, version in (("source_digest", lambda part: "other"), ("torch", None), ("triton", None)):
        with monkeypatch.context() as patch:
            if version is None:
                patch.setattr(f"{part}.__version__", "0.1")
            else:
                patch.setattr(tune, part, version)
            tune.forget()
            timed.clear()
            assert _choose() == CANDIDATES[2] and timed == CANDIDATES, part
    tune.forget()
    timed.clear()
    assert _choose() == CANDIDATES[2] and not timed
    assert len(json.loads(tune.cache_file().read_text())["best"]) == 4


def test_writers_at_the_same_time_lose_nothing(timed):
    def store(first):
        for number in range(first, first + 12):
            tune._store(f"kernel {number}", {"ROWS": number})

    threads = [threading.Thread(target=store, args=(first,)) for first in range(0, 48, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tune._load() == {f"kernel {number}": {"ROWS": number} for number in range(48)}
    assert sorted(path.name for path in tune.cache_file().parent.iterdir()) == ["tune.json", "tune.lock"]
