"""Features in shards, within one process: what belongs to whom, how it is loaded, and what the op gives."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
from joestar.distributed.peer_memory import PeerMemory
from joestar.errors import CaptureError, ConfigError, DataError, DistributedError, GraphError
from joestar.graph_api.row_source import source_of
from joestar.lowering.loss import check_labels
from joestar.ops.dense.gather_shards import gather_shards as reference
from joestar.runtime.inference import Inference
from joestar.store import FeatureStore, Sharded, choose_hot, shard
from joestar.store.sharded import STRIPE, fill_shard, keep_hottest, shard_rows
from joestar.store.spread import hotness
from tests.distributed.shard_scenarios import Rows
from tests.store.test_features import some_graph

ops = torch.ops.joestar


def sharded(x: torch.Tensor, world: int = 3, dtype: torch.dtype | None = None, wants: int = 0) -> Sharded:
    """As ranks have it, their memory being this process'."""
    dtype = dtype or x.dtype
    pieces = [torch.full((shard_rows(x.shape[0], world), *x.shape[1:]), torch.nan, dtype=dtype) for _ in range(world)]
    for rank, piece in enumerate(pieces):
        fill_shard(x, piece, rank, world, piece_bytes=1 << 12)
    return Sharded(PeerMemory(pieces, 0, []), x.shape, dtype, torch.device("cpu"), wants)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 64 * 6, 64 * 6 + 1, 64 * 17 + 5])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_row_is_with_one_owner(rows, world):
    x = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + 1
    store = sharded(x, world)
    held = torch.cat([piece.flatten() for piece in store.shards])
    assert held.isfinite().sum() == x.numel()  # nothing twice
    assert torch.equal(store.rows(torch.arange(rows)), x)
    sizes = [int(piece[:, 0].isfinite().sum()) for piece in store.shards]
    assert max(sizes) - min(sizes) <= STRIPE


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_the_op_is_indexing(ids, shape):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(500, *shape, generator=random, dtype=torch.float64)
    store = sharded(x)
    index = torch.randint(0, 500, (200,), generator=random).to(ids)
    assert torch.equal(store.rows(index), x[index.long()])
    store.keep(torch.randperm(500, generator=random)[:70])
    assert torch.equal(store.cache, x[store.hot])
    args = (store.shards, store.pointers, STRIPE, store.cache, store.slot_of, index)
    assert torch.equal(store.rows(index), x[index.long()]) and torch.equal(reference(*args), x[index.long()])
    torch.library.opcheck(ops.gather_shards.default, args, test_utils=("test_schema", "test_faketensor"))
    store.cache += 1  # hot rows are read from the cache
    wanted = (store.slot_of[index.long()] >= 0).view(-1, *[1] * len(shape))
    assert torch.equal(store.rows(index), torch.where(wanted, x[index.long()] + 1, x[index.long()]))
    with pytest.raises(RuntimeError, match="not trained"):
        ops.gather_shards([s.requires_grad_() for s in store.shards], store.pointers, STRIPE, None, None, index)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_loading_converts_and_reads_any_strides(dtype):
    x = torch.randn(7, 300).t()
    assert torch.equal(sharded(x, 2, dtype).rows(torch.arange(300)), x.to(dtype))


def trained(graph, **options):
    torch.manual_seed(0)
    model = joestar.nn.GraphSAGE(6, 8, 2, 3).double()
    sampler = joestar.NeighborSampler(graph, [3, 2])
    step = joestar.compile(
        model, sampler, F.cross_entropy, torch.optim.Adam(model.parameters(), 0.01), backend="eager", **options
    )
    losses = [loss.item() for _ in range(2) for loss in step.epoch(torch.arange(64), 16)]
    return losses, step.predict(torch.arange(40)), step.predict(torch.arange(40), full=True), step


def test_training_predictions_and_exact_inference_are_those_of_a_tensor():
    plain, stored = some_graph(), some_graph()
    plain.ndata["x"] = plain.ndata["x"].double()
    store = sharded(plain.ndata["x"], wants=120 * 4 + 30 * 48)
    stored.ndata["x"] = store
    with cheaper(cheapest):
        expected = trained(plain)
    got = trained(stored)
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    text = got[3].report().programs[0].graph_after
    assert text.count("gather_shards.default(") == 1 and "sample_aggregate" not in text
    assert "sample_aggregate" in expected[3].report().programs[0].graph_after  # which reads in place
    assert store.hot.numel() == 30 and store.wants == 0  # compile has chosen them
    score = hotness(joestar.NeighborSampler(stored, [3, 2]), 1000)
    assert torch.equal(store.hot, choose_hot(score, 30))
    assert not any(name == "x" or "shard" in name for name in got[3].state_dict()["model"])
    store.close()
    store.close()  # nothing more
    with pytest.raises(DistributedError, match="gave it back"):
        got[3].predict(torch.arange(4))


@pytest.mark.fuzz
def test_exact_inference_gathers_some_rows_at_a_time():
    graph = some_graph()
    x, model = graph.ndata["x"], joestar.nn.GraphSAGE(6, 8, 2, 3)
    expected = joestar.inference(model, graph)
    for store in (sharded(x), FeatureStore(x, "cpu", hot=torch.arange(0, 120, 3))):
        if isinstance(store, Sharded):
            store.keep(torch.arange(30))
        graph.ndata["x"] = store
        torch.testing.assert_close(joestar.inference(model, graph, batch_size=40), expected)
        stage = Inference(model, graph).plan.stages[0]
        assert not [value.target for value in stage.whole if "gather" in str(value.target)]


class Computed(torch.nn.Module):
    """Looks rows up at numbers that it computes; of padded entries, these may be no rows at all."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.layer = rows, torch.nn.Linear(6, 3)

    def forward(self, blocks, x):
        block = blocks[0]
        degree = block.in_degrees().long()
        own = self.rows(degree - 1 + (degree == 0))  # -1 + 0 where a row is padding
        return self.layer(block.pull(joestar.fn.copy_u(self.rows((block.srcs.long() * 7 + 3) % 120)), "sum") + own)


def test_rows_at_computed_numbers_are_those_of_a_tensor():
    plain, stored = some_graph(), some_graph()
    x = plain.ndata["x"]
    store = stored.ndata["x"] = sharded(x)
    found = []
    for graph, rows in ((plain, lambda ids: torch.index_select(x, 0, ids)), (stored, store.rows)):
        torch.manual_seed(0)
        model = Computed(rows)
        step = joestar.compile(
            model, joestar.NeighborSampler(graph, [3]), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
            backend="eager",
        )  # fmt: skip
        found.append([loss.item() for loss in step.epoch(torch.arange(70), 20)])
        assert step.counters.exact_steps == 0
    assert found[0] == pytest.approx(found[1], rel=1e-5)


READS = {
    "mean of all": lambda block, x: x + block.graph.ndata["x"].mean(),
    "own lookup": lambda block, x: torch.index_select(block.graph.ndata["x"], 0, block.srcs),
    "some": lambda block, x: F.normalize(block.graph.ndata["x"])[block.srcs],
}


@pytest.mark.parametrize("name", READS)
def test_reading_the_table_as_a_whole_is_refused(name):
    class Reads(torch.nn.Module):
        def forward(self, blocks, x):
            return blocks[0].pull(joestar.fn.copy_u(READS[name](blocks[0], x)), "mean")

    graph = some_graph()
    graph.ndata["x"] = sharded(graph.ndata["x"])
    step = joestar.compile(Reads(), joestar.NeighborSampler(graph, [3]), backend="eager")
    with pytest.raises(CaptureError, match="nowhere in one piece"):
        step.predict(torch.arange(20))


def test_a_sampler_without_fanouts_is_watched():
    class Own:
        def __init__(self, graph):
            self.graph = graph

        def sample(self, graph, seeds):
            return [graph[:, seeds].individual_sample(2)]

    graph = some_graph()
    score = hotness(Own(graph), 20)
    assert score.max() > 3 and score.shape == (120,)  # batches in which a node was
    store = sharded(graph.ndata["x"], wants=120 * 4 + 24 * 5 + 7)
    keep_hottest(store, score)
    assert torch.equal(store.hot, choose_hot(score, 5))
    none = sharded(graph.ndata["x"], wants=100)
    keep_hottest(none, score)
    assert none.hot is None


def test_what_ndata_keeps():
    graph = some_graph()
    store = graph.ndata["x"] = sharded(graph.ndata["x"])
    assert graph.ndata["x"].is_meta and graph.ndata["x"].shape == (120, 6)
    assert source_of(copy.deepcopy(graph).ndata, "x") is store and source_of(graph.to("cpu").ndata, "x") is store
    with pytest.raises(ConfigError, match="cannot be saved"):
        pickle.dumps(graph)
    with pytest.raises(ConfigError, match="read by cpu"):
        store.to("cuda:1")
    with pytest.raises(DataError, match="different ids"):
        store.keep(torch.tensor([1, 1]))
    with pytest.raises(ConfigError, match="sharded already"):
        shard(graph.ndata["x"])
    with pytest.raises(ConfigError, match="take one of the two"):
        joestar.compile(joestar.nn.GraphSAGE(6, 8, 1, 3), joestar.NeighborSampler(graph, [2]), memory="1MiB")
    check_labels(graph.ndata["y"])


def test_float64_rows_are_not_dropped_silently():
    graph = some_graph()
    graph.ndata["x"] = sharded(graph.ndata["x"].double())
    model = joestar.nn.GraphSAGE(6, 8, 1, 3)
    with pytest.raises(GraphError, match=r"dtype=torch\.float32"):
        joestar.compile(model, joestar.NeighborSampler(graph, [2]), backend="eager")


class _Unread(Rows):
    def __getitem__(self, rows):
        raise AssertionError("rows were loaded")


def test_alone_it_is_the_tensor():
    x = torch.randn(40, 3)
    graph = some_graph(40)
    graph.ndata["x"] = shard(x, hot="1MiB", device="cpu")
    assert source_of(graph.ndata, "x") is None and torch.equal(graph.ndata["x"], x)
    assert torch.equal(shard(x.numpy(), dtype=torch.bfloat16, device="cpu").table, x.bfloat16())
    assert torch.equal(shard(Rows(x), device="cpu").table, x)
    host = shard(x, hot=40 * 4 + 6 * 12, place="host", device="cpu")
    keep_hottest(host, torch.arange(40).float())
    assert host.tier == "cached" and host.hot.tolist() == [34, 35, 36, 37, 38, 39]
    assert torch.equal(host.rows(torch.arange(40)), x)
    with pytest.raises(DataError, match="float64 are not stored outside"):
        shard(_Unread(x), place="host", dtype=torch.float64, device="cpu")
    with pytest.raises(ConfigError, match="place must be"):
        shard(x, place="moon")
    for wrong, message in (
        (x.long(), "floating-point"),
        (x[:0], "a row and a column"),
        (x[:, :0], "a row and a column"),
    ):
        with pytest.raises(ConfigError, match=message):
            shard(wrong, device="cpu")
    with pytest.raises(ConfigError, match="hot must be"):
        shard(x, hot="much", device="cpu")
