"""Two GPUs over macro-batches train what one GPU trains with the whole graph: arenas, loading, steps as CUDA graphs."""

import pytest
import torch

from tests.distributed import scenarios, staged_scenarios
from tests.distributed.ranks import run
from tests.distributed.test_training import BATCH, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = ["plain_run", "few_seeds", "losses_of", "cut", "tight", "fitted", "from_file"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOESTAR_TEST_DEVICE", "cuda")
        outcomes = run(2, staged_scenarios.all_of, NAMES, BATCH, str(folder), folder=folder, seconds=550.0)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
    return [outcome.result for outcome in outcomes]


@pytest.fixture(scope="module")
def one(folder):
    """On one GPU, which has the whole graph."""
    with pytest.MonkeyPatch.context() as patch, scenarios.cheaper(scenarios.quick):
        patch.setenv("JOESTAR_TEST_DEVICE", "cuda:0")
        dropout, step = scenarios.model_of(dropout=0.4), scenarios.step_of()
        losses = scenarios.epochs_of(step, torch.arange(173, device="cuda:0"), 2 * BATCH)
        plain = {"losses": losses, "state": scenarios.state_of(step)}
        return {
            "plain_run": staged_scenarios.plain_run(2 * BATCH, scenarios.step_of(clip_grad_norm=0.5)),
            "few_seeds": staged_scenarios.few_seeds(2 * BATCH, scenarios.step_of(model=dropout)),
            "losses_of": staged_scenarios.losses_of(2 * BATCH, staged=False),
            "fitted": staged_scenarios.fitted(2 * BATCH, str(folder / "alone"), scenarios.step_of()),
            "cut": plain,
            "from_file": plain,
        }


@pytest.mark.parametrize("name", ["plain_run", "few_seeds", "losses_of", "fitted", "cut", "from_file"])
def test_two_gpus_over_macro_batches_train_what_one_trains(two, one, name):
    for rank in two:
        wanted = {key: value for key, value in one[name].items() if key != "seeds"}
        close({key: rank[name][key] for key in wanted}, wanted, 1e-8)


def test_what_one_rank_has_no_room_for_is_cut_there(two):
    assert [rank["cut"]["cut"] > 0 for rank in two] == [False, True]


def test_features_of_a_file_are_copied_once(two):
    for rank in two:
        assert rank["from_file"]["shared"] == 1


def test_overflows_on_either_gpu_are_redone_together(two):
    first, second = (rank["tight"] for rank in two)
    assert first["padded"]["overflows"] == second["padded"]["overflows"] >= 2
    for rank in (first, second):
        for name in ("losses", "state"):
            close(rank["padded"][name], rank["exact"][name], 1e-8)


@pytest.mark.parametrize("how", ["raises", "interrupted"])
def test_a_pipeline_that_fails_on_one_gpu_ends_both(tmp_path, monkeypatch, how):
    monkeypatch.setenv("JOESTAR_TEST_DEVICE", "cuda")
    first, last = run(2, staged_scenarios.one_fails, how, folder=tmp_path, seconds=60.0)
    assert first.code not in (0, None) and last.code not in (0, None)
    assert "rank 1 failed" in first.text and "finished" not in first.text + last.text
