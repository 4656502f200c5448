"""Where features of several GPUs should be: by room, by what is hot, by bandwidths."""

from dataclasses import replace

import pytest
import torch

import joestar
from joestar.errors import ConfigError
from joestar.profile.numbers import seconds
from joestar.store import HitShares, Speeds, plan_features
from joestar.store.tiers import NVLINK, _planned
from tests.store.test_features import some_graph

NODES, ROW, READ = 64_000, 500, 1000.0
TABLE, SLOTS = NODES * ROW, 4 * NODES
RATES = (1000.0, 100.0, 10.0)
NEEDS = torch.where(torch.arange(NODES) < 640, 99.0, 1.0)  # half of what is read are 640 nodes
HITS = HitShares(NEEDS, NEEDS)


def planned(room: int, world: int = 4):
    return _planned(NODES, ROW, READ, HITS, world, room, RATES)


def test_what_fits_everywhere_is_everywhere():
    plan = planned(TABLE)
    assert plan.best.place == "replicate" and plan.best.seconds == pytest.approx(READ * ROW * 2 / 1e12)
    assert "-> all rows on every GPU" in str(plan) and "1,000 rows of 500 bytes" in str(plan)


def test_hot_rows_and_peers_before_the_host():
    plan = planned(TABLE // 4 + SLOTS + 320 * ROW)
    whole, shard, host = plan.choices
    assert not whole.fits and "does not fit, 30.5 MiB per GPU" in str(plan)
    assert plan.best is shard and shard.hot == 320 and shard.bytes == TABLE // 4 + SLOTS + 320 * ROW
    away = 0.75 / 100e9 + 2 / 1000e9 / 4
    assert shard.share == pytest.approx(0.25)
    assert shard.seconds == pytest.approx(READ * ROW * (0.25 * 2e-12 + 0.75 * away))
    assert host.fits and host.share > 0.6  # all that room is for hot rows
    assert host.seconds == pytest.approx(READ * ROW * (host.share * 2e-12 + (1 - host.share) / 10e9))
    assert "-> hot rows on every GPU, the rest over peers" in str(plan)


def test_the_host_where_shards_do_not_fit_or_there_is_one_gpu():
    small = planned(TABLE // 8)
    assert small.best.place == "host" and not small.choices[1].fits
    assert planned(TABLE // 2, world=1).best.place == "host"


def test_the_expected_step_has_the_reading_of_rows_that_are_not_near():
    """In it, or beside the one before: then the longer of the two."""
    plan = planned(TABLE // 4 + SLOTS + 320 * ROW)
    assert "prefetch" not in str(plan)
    whole, shard, host = plan.choices
    for computing in (1e-6, 1e-3):
        timed = replace(plan, computing=computing)
        assert timed.step(whole) == timed.step_ahead(whole) == float("inf")
        for choice in (shard, host):
            assert timed.step(choice) == computing + choice.seconds
            assert timed.step_ahead(choice) == max(computing, choice.seconds)
    assert "a step in about 1.00 ms, at least 1.00 ms with prefetch=True" in " ".join(str(timed).split())
    everywhere = replace(planned(TABLE), computing=1e-3)
    assert everywhere.step(everywhere.best) == everywhere.step_ahead(everywhere.best) == 1e-3
    assert f", a step in about {seconds(1e-3)}\n" in str(everywhere)


def test_gpus_that_are_not_there_have_the_links_of_an_h200():
    graph = some_graph()
    sampler, given = joestar.NeighborSampler(graph, [3, 2]), {"room": 1200, "world": 4, "computing": 0.5}
    fast, slow = (Speeds(24, 10.0, 10.0, 5.0, device, 10.0) for device in (4000.0, 100.0))
    plan = plan_features(graph, sampler, 20, rates=fast, **given)
    assert plan.rates[1] == NVLINK and plan.computing == 0.5
    assert plan_features(graph, sampler, 20, rates=slow, **given).rates[1] == 50.0


def test_rows_and_hits_come_from_the_sampler():
    graph = some_graph()
    sampler = joestar.NeighborSampler(graph, [3, 2])
    rates = Speeds(24, 10.0, 10.0, 5.0, 1000.0, 10.0)
    plan = plan_features(graph, sampler, 20, room=1200, world=2, rates=rates, peers=100.0)
    assert (plan.table, plan.row, plan.world) == (120 * 24, 24, 2) and 20 < plan.rows < 120
    assert plan.best.place == "host" and 0 < plan.best.share < 1 and plan.best.hot == (1200 - 480) // 24
    with pytest.raises(ConfigError, match="has no 'z'; there is: x, y"):
        plan_features(graph, sampler, name="z")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive whole number; got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive whole number; got 2.5"),
        ({"world": 0}, "world must be a positive whole number; got 0"),
        ({"world": True}, "world must be a positive whole number; got True"),
        ({"peers": 0.0}, "peers must be billions of bytes per second, more than 0; got 0.0"),
        ({"peers": float("nan")}, "peers must be billions of bytes per second"),
        ({"computing": -1e-3}, "computing must be seconds, 0 or more; got -0.001"),
        ({"computing": "1 ms"}, "computing must be seconds, 0 or more; got '1 ms'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given, message):
    """Before anything is sampled or measured; a world of 0 was taken for one that was not given."""
    graph = some_graph()
    with pytest.raises(ConfigError, match=f"plan_features: {message}"):
        plan_features(graph, joestar.NeighborSampler(graph, [3, 2]), **given)
