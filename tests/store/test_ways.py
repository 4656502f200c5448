"""What of a graph every GPU holds: the first way in which all fits."""

import pytest
import torch

import joestar
from joestar.distributed.address_range import GRANULE
from joestar.errors import ConfigError
from joestar.profile.numbers import human_bytes
from joestar.store import FeatureStore, plan_graph
from joestar.store.sharded import shard_rows
from joestar.store.structure import part_bytes

NODES, EDGES, ROW = 10_000, 3_000_000, 256


def large_graph() -> joestar.Graph:
    """Edges of 11.4 MiB, features of 2.4 MiB."""
    indptr = torch.linspace(0, EDGES, NODES + 1, dtype=torch.float64).long()
    graph = joestar.Graph.from_csc(indptr, torch.zeros(EDGES, dtype=torch.int32), validate=False)
    graph.ndata["x"], graph.ndata["y"] = torch.ones(NODES, ROW // 4), torch.zeros(NODES, dtype=torch.int64)
    return graph


GRAPH = large_graph()
BASE = 8 * (NODES + 1) + 8 * NODES
NEEDS = {
    "replicate": BASE + 4 * EDGES + NODES * ROW,
    "features": BASE + 4 * EDGES + shard_rows(NODES, 4) * ROW,
    "structure": BASE + part_bytes(4 * EDGES, 4) + shard_rows(NODES, 4) * ROW,
    "host": BASE,
}


@pytest.mark.parametrize("place", NEEDS)
def test_the_first_that_fits(place):
    beside = 1 << 20
    plan = plan_graph(GRAPH, 4, NEEDS[place] + beside, beside)
    assert [way.place for way in plan.ways] == list(NEEDS)
    assert {way.place: way.bytes - beside for way in plan.ways} == NEEDS
    assert plan.best.place == place and plan.best.left == 0
    smaller = plan_graph(GRAPH, 4, NEEDS[place] + beside - 1, beside).best
    assert (smaller and smaller.place) == dict(zip(NEEDS, [*NEEDS, None][1:], strict=False)).get(place)


def test_edges_are_dealt_out_in_whole_pages_of_gpus():
    assert part_bytes(4 * EDGES, 4) == 2 * GRANULE and part_bytes(5, 4) == GRANULE


def test_it_says_what_each_way_takes():
    text = str(plan_graph(GRAPH, 4, "8MiB"))
    assert text.splitlines()[0] == "on 4 GPUs, 8.0 MiB of each:"
    assert "   everything on every GPU: 14.0 MiB per GPU (offsets 78.1 KiB, edges 11.4 MiB" in text
    assert (
        f"-> features and edges over the GPUs: {human_bytes(NEEDS['structure'])} per GPU" in text
        and "left for hot rows" in text
    )
    assert "-> in macro-batches: joestar.compile(memory=...)" in str(plan_graph(GRAPH, 4, 1000))


def test_one_process_has_the_host_behind_its_device():
    plan = plan_graph(GRAPH, room=NEEDS["host"])
    assert [way.place for way in plan.ways] == ["replicate", "host"] and plan.best.place == "host"
    moved = plan.apply(GRAPH, device="cpu")
    assert isinstance(moved.ndata.sources["x"], FeatureStore) or moved.ndata["x"] is not None
    assert torch.equal(moved.indices, GRAPH.indices) and "x" not in GRAPH.ndata.sources
    whole = plan_graph(GRAPH, room=NEEDS["replicate"]).apply(GRAPH, device="cpu")
    assert whole is GRAPH


def test_features_that_have_their_place_are_left_there():
    graph = large_graph()
    graph.ndata["x"] = FeatureStore(graph.ndata["x"], "cpu", "pinned")
    plan = plan_graph(graph, room=NEEDS["replicate"] - NODES * ROW)
    assert plan.best.place == "replicate" and plan.best.left == 0
    assert plan.apply(graph, device="cpu").ndata.sources["x"] is graph.ndata.sources["x"]


def test_what_fits_nowhere_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"the graph does not fit:\non 1 GPU, 1000 B of each"):
        plan_graph(GRAPH, room=1000).apply(GRAPH)
    with pytest.raises(ConfigError, match="room"):
        plan_graph(GRAPH, room="much")
