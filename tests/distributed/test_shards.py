"""Features that are sharded over ranks: every rank trains, predicts and scores as one process does."""

import pytest
import torch

import joestar
from tests.distributed import shard_scenarios as scenarios
from tests.distributed.ranks import results
from tests.distributed.test_training import BATCH, close
from tests.runtime.common import FEATURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def two(folder):
    return results(2, scenarios.all_tiers, BATCH, folder=folder)


@pytest.fixture(scope="module")
def one():
    return scenarios.all_tiers(2 * BATCH)


NAMES = ("losses", "state", "score", "outputs", "full")


def test_two_ranks_with_shards_train_what_one_with_a_tensor_trains(two, one):
    for rank in two:
        ours = rank["ids"]
        for name in NAMES:
            close(ours[name], one["replicated"][name])
            assert ours[name] == two[0]["ids"][name]  # ranks hold other hot rows, which changes no bit
        assert (ours["kind"], ours["program"], ours["hot"]) == ("Sharded ", ["gather_shards"], 50)


def test_rows_of_the_host_are_there_once_for_all_ranks(two):
    for rank in two:
        assert rank["host"] == {"same": True, "tier": "cached", "hot": (4096 - 4 * 400) // (4 * FEATURES)}


@pytest.mark.fuzz
def test_batches_made_a_step_early_change_no_bit_on_any_rank(folder):
    first, second = results(2, scenarios.ahead, BATCH, folder=folder)
    assert first == second
    assert first["prefetch"] == first["plain"] and first["prefetch, counted"] == first["plain, counted"]
    assert first["prefetch, counted"][1] == 2 and first["prefetched"] > 3


def test_memory_is_given_back_at_the_end_of_the_job(two):
    for rank in two:
        assert rank["after"]["same"] and rank["after"]["left"] == 0 and rank["after"]["bytes"] == 0
        assert "shutdown() gave it back" in rank["after"]["told"]


@pytest.mark.fuzz
def test_four_ranks_go_on_where_two_stopped_and_one_where_four_did(folder, tmp_path):
    path = str(tmp_path / "kept")
    (first, _) = results(2, scenarios.resumes, BATCH, path, True, folder=folder)
    assert _largest(joestar.Checkpoints(path).latest()["step"]) < 400  # no rows of nodes
    for rank in results(4, scenarios.resumes, BATCH // 2, path, False, folder=folder):
        close(rank, first)
    close(scenarios.resumes(2 * BATCH, path, False), first)


def _largest(state) -> int:
    """Values of the largest tensor in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return max(map(_largest, inner), default=0)


WORDS = {
    "values": ["DistributedError", "the ranks differ at joestar.store.shard", "x: torch.float32 [300, 4] #"],
    "dtype": ["DistributedError", "stored as: torch.float32 on rank 0, torch.bfloat16 on rank 1"],
    "hot": ["DistributedError", "hot: 2048 bytes on rank 0, 1024 bytes on rank 1"],
    "wrong hot": ["DistributedError", "failed on rank 1: DataError: hot: expected different ids in [0, 300)"],
    "double": ["DataError: features in float64 are not stored outside of the GPU; give dtype=torch.float32"],
    "as double": ["DataError: features in float64 are not stored outside of the GPU; give dtype=torch.float32"],
    "hosts": ["ConfigError", "rank 0 on near, rank 1 on far", "Start the job on one host"],
    "loading": ["DistributedError", "joestar.store.shard (loading) failed on rank 1: OSError: the file is gone"],
    "room": ["ConfigError", "do not fit", "free", "Take "],
    "plan": ["2 GPUs with 14.0 KiB each", "-> hot rows on every GPU, the rest over peers (joestar.store.shard)"],
    "compile": ["DistributedError", "graph.ndata['x']: Sharded(torch.float32 [400,", "on rank 0", "on rank 1"],
}


@pytest.fixture(scope="module")
def told(folder):
    return results(2, scenarios.refused, folder=folder)


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_is_said_on_every_rank(told, name):
    for rank in told:
        for words in WORDS[name]:
            assert words in rank[name]


def test_gpus_that_do_not_reach_one_another_fall_back_to_the_host(told):
    first, second = (rank["without links"] for rank in told)
    assert first.startswith("True FeatureStore GPUs do not read one another's memory (made up): features stay in page-")
    assert second == "True FeatureStore "  # one rank says it


def test_after_all_refusals_the_ranks_are_together_still(told):
    assert [rank["fine"] for rank in told] == [True, True]
