"""Two GPUs train what one trains: the steps of both as CUDA graphs with the all-reduce inside. Needs two GPUs."""

import pytest
import torch

from tests.distributed import differing_scenarios, scenarios, sum_scenarios
from tests.distributed.ranks import results, run
from tests.distributed.test_peer_sum import PIECES, compare
from tests.distributed.test_training import BATCH, close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NAMES = ["plain_run", "tight", "few_seeds", "losses_of"]


@pytest.fixture(
    scope="module", params=["0 kernel", "1 kernel", "device nccl"], ids=["late", "early", "on the device, by NCCL"]
)
def two(tmp_path_factory, request):
    """Words of ranks: with the gradients, from host to host, summed behind the sampling; what sums gradients up."""
    word, by = request.param.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOESTAR_TEST_DEVICE", "cuda")
        patch.setenv("JOESTAR_EARLY_WORD", word)
        patch.setenv("JOESTAR_RANK_SUM", by)
        outcomes = run(2, scenarios.all_of, NAMES, BATCH, folder=tmp_path_factory.mktemp("ranks"), seconds=500.0)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.text
    return [outcome.result for outcome in outcomes]


@pytest.fixture(scope="module")
def one():
    with pytest.MonkeyPatch.context() as patch, scenarios.cheaper(scenarios.quick):
        patch.setenv("JOESTAR_TEST_DEVICE", "cuda:0")
        return {name: getattr(scenarios, name)(2 * BATCH) for name in ("plain_run", "few_seeds", "losses_of")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_within_a_graph_are_those_of_plain_tensors_and_the_same_on_all_gpus(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("JOESTAR_TEST_DEVICE", "cuda")
    world = min(4, torch.cuda.device_count())
    compare(results(world, sum_scenarios.captured, dtype, 60, folder=tmp_path), dtype, PIECES)


@pytest.mark.parametrize("name", ["plain_run", "few_seeds", "losses_of"])
def test_two_gpus_train_what_one_trains(two, one, name):
    for rank in two:
        seeds = rank[name].pop("seeds", None)
        assert seeds is None or len(seeds) == 3
        close(rank[name], {key: value for key, value in one[name].items() if key != "seeds"}, 1e-8)


def test_overflows_on_either_gpu_are_redone_together(two):
    first, second = (rank["tight"] for rank in two)
    assert first["padded"]["overflows"] == second["padded"]["overflows"] >= 2
    for rank in (first, second):
        for name in ("losses", "state"):
            close(rank["padded"][name], rank["exact"][name], 1e-8)


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "rank 1 failed: ValueError: made up by the last rank"), ("hangs", "rank 1"), ("is killed", "rank 1")],
)
def test_one_gpu_that_fails_ends_the_other(tmp_path, monkeypatch, how, words):
    monkeypatch.setenv("JOESTAR_TEST_DEVICE", "cuda")
    first, last = run(2, differing_scenarios.one_fails, how, 20.0, folder=tmp_path, seconds=60.0)
    assert first.code not in (0, None) and words in first.text
    assert last.code not in (0, None)
