"""Edges in parts over the ranks' memories: what is sampled, trained and predicted keeps every bit."""

import pytest

from tests.distributed import shard_scenarios as scenarios
from tests.distributed.ranks import results
from tests.distributed.test_training import BATCH


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return results(2, scenarios.structures, BATCH, folder=tmp_path_factory.mktemp("structures"))


def check_bits(ranks) -> None:
    for rank in ranks:
        for how in scenarios.FANOUTS:
            first, *others = rank[how]
            assert all(each == first for each in others) and first == ranks[0][how][0], how
        losses = [rank[how][0]["losses"] for how in ("uniform", "weighted", "all neighbours")]
        assert losses[0] != losses[1] != losses[2] != losses[0]


def test_two_ranks_train_and_predict_the_same_bits_with_edges_in_parts(two):
    """Cut within rows, all on one rank, and at pages; one row has a fifth of all edges."""
    check_bits(two)


@pytest.mark.fuzz
def test_four_ranks_sample_from_parts_what_each_samples_alone(tmp_path):
    for rank in results(4, scenarios.edges_read, 200_000, folder=tmp_path):
        assert rank["wrong"] == []


@pytest.mark.fuzz
def test_so_do_four(tmp_path):
    check_bits(results(4, scenarios.structures, BATCH // 2, folder=tmp_path))


WORDS = {
    "graphs": ["DistributedError: the ranks differ at joestar.store.shard_structure", "graph.indices: torch."],
    "place": ["DistributedError", "place: None on rank 0, host on rank 1"],
    "hosts": ["ConfigError: joestar.store.shard_structure shares memory", "rank 0 on near, rank 1 on far"],
    "loading": ["DistributedError", "(loading edges) failed on rank 1: OSError: the file is gone"],
    "reading": ["DistributedError", "(reading edges) failed on rank 0: DataError: what is read from the parts"],
    "room": ["ConfigError: edges of 9.4 KiB do not fit into host memory", "1000 B are free", "memory=..."],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_is_said_on_every_rank(two, name):
    for rank in two:
        for words in WORDS[name]:
            assert words in rank["told"][name]


def test_gpus_that_do_not_reach_one_another_fall_back_to_the_host(two):
    first, second = (rank["told"]["without links"] for rank in two)
    assert first.startswith("True GPUs do not read one another's memory (made up): edges stay in page-locked host")
    assert second == "True "  # one rank says it


def test_a_graph_without_edges(two):
    assert [rank["told"]["no edges"] for rank in two] == ["5 0 torch.int32"] * 2
