"""Features from a store: the same losses, parameters and predictions as from a tensor, whatever the tier."""

import copy
import functools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest
from torch import nn

import joestar
from joestar import fn
from joestar.errors import ConfigError, DataError, GraphError
from joestar.graph_api import Graph
from joestar.graph_api.row_source import source_of
from joestar.nn import GraphSAGE
from joestar.ops import reference
from joestar.sampling import NeighborSampler
from joestar.store import FeatureStore, choose_hot, features, fill_rows, pin, with_pinned_structure

pytest.importorskip("joestar._native")
ops = torch.ops.joestar


def some_graph(nodes: int = 120) -> Graph:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, 900), generator=random)
    x, y = torch.randn(nodes, 6, generator=random), torch.randint(0, 3, (nodes,), generator=random)
    return Graph.from_edge_index(edges, nodes, {"x": x, "y": y})


class OwnInput(nn.Module):
    """Reads features by name besides those handed to it, and drops some of these."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, blocks, x):
        block, x = blocks[0], F.dropout(x, 0.3, self.training)
        return self.layer(torch.cat([block.pull(fn.copy_u(x), "mean"), block.dstdata["x"]], 1))


def trained(graph: Graph, model: nn.Module, **options):
    """(losses, state, predictions, the program's text) of two short epochs."""
    model = copy.deepcopy(model)
    step = joestar.compile(
        model, NeighborSampler(graph, [3, 2][: 2 if isinstance(model, GraphSAGE) else 1]), loss_fn=F.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01), backend="eager", **options,
    )  # fmt: skip
    seeds = torch.arange(64)
    losses = [float(loss) for _ in range(2) for loss in step.epoch(seeds, batch_size=16)]
    text = step.report().programs[0].graph_after
    return losses, model.state_dict(), step.predict(torch.arange(40)), text


WRITES = {
    "tensor": lambda x: x.mul_(2),
    "numpy": lambda x: np.multiply(x.numpy(), 2, out=x.numpy()),
    "data": lambda x: x.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_rows_written_in_place_are_read(write):
    """Also hot ones, and where PyTorch does not count the write."""
    graph = some_graph()
    x = graph.ndata["x"].clone()
    graph.ndata["x"] = FeatureStore(x, "cpu", hot=torch.arange(0, 120, 2))

    class First(nn.Module):
        def forward(self, blocks, x):
            return x[: blocks[0].num_dst]

    step = joestar.compile(First(), NeighborSampler(graph, [2]), backend="eager")
    seeds = torch.arange(30)
    assert torch.equal(step(seeds), x[:30])
    before = x[:30].clone()
    WRITES[write](x)
    assert torch.equal(step(seeds), 2 * before) and torch.equal(step.predict(seeds), 2 * before)
    graph.ndata["x"][4] = 7
    assert torch.equal(step(seeds), x[:30]) and (x[4] == 7).all()
    with torch.inference_mode():
        stored = FeatureStore(torch.ones(9, 2), "cpu", hot=torch.tensor([1]))
        stored.refresh()
    assert torch.equal(stored.rows(torch.tensor([1, 2])), torch.ones(2, 2))


@functools.cache
def sage() -> tuple:
    """A model, and what training it on plain tensors gives."""
    torch.manual_seed(0)
    model = GraphSAGE(6, 8, 2, 3)
    with cheaper(cheapest):
        return model, trained(some_graph(), model)


@pytest.mark.every(2)
@pytest.mark.parametrize("tier", ["cached", "pinned", "resident"])
def test_training_and_prediction_are_those_of_a_tensor(tier):
    (model, expected), stored = sage(), some_graph()
    hot = choose_hot(stored.in_degrees(), 30) if tier == "cached" else None
    stored.ndata["x"] = FeatureStore(stored.ndata["x"], "cpu", tier, hot)
    got = trained(stored, model)
    for ours, theirs in zip(got[:3], expected[:3], strict=True):  # sums of other kernels: rounded otherwise
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ("gather_rows" in got[3]) == (tier != "resident")
    fused = "sample_aggregate"
    assert fused in expected[3], "the comparison is with a program that reads in place"
    assert (fused in got[3]) == (tier == "resident")


def test_rows_read_by_name_come_from_the_store():
    plain, stored, model = some_graph(), some_graph(), OwnInput()
    stored.ndata["x"] = FeatureStore(plain.ndata["x"], "cpu", hot=torch.tensor([5, 3]))
    with cheaper(cheapest):
        expected = trained(plain, model)
    got = trained(stored, model)
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert got[3].count("gather_rows.default(") == 2


def test_a_graph_whose_edges_stay_on_the_host():
    graph = some_graph()
    graph.edata["w"] = torch.rand(graph.num_edges)
    graph.train_idx, graph.name = torch.arange(9), "small"
    graph.ndata["x"] = FeatureStore(graph.ndata["x"], "cpu")
    moved = with_pinned_structure(graph, "cpu")
    assert moved.indices is graph.indices or moved.indices.data_ptr() == graph.indices.data_ptr()
    assert torch.equal(moved.indptr, graph.indptr) and torch.equal(moved.edata["w"], graph.edata["w"])
    assert source_of(moved.ndata, "x") is source_of(graph.ndata, "x") and torch.equal(
        moved.ndata["y"], graph.ndata["y"]
    )
    assert torch.equal(moved.train_idx, graph.train_idx) and moved.name == "small"
    sampled = [NeighborSampler(g, [3]).sample(g.keyed(1), torch.arange(20))[0] for g in (graph, moved)]
    assert torch.equal(sampled[0].srcs, sampled[1].srcs)


def test_what_ndata_keeps():
    graph = some_graph()
    x = graph.ndata["x"]
    store = FeatureStore(x, "cpu")
    graph.ndata["x"] = store
    assert source_of(graph.ndata, "x") is store and graph.ndata["x"] is store.table
    assert source_of(graph.keyed(1).ndata, "x") is store
    graph.ndata["x"] = x
    assert source_of(graph.ndata, "x") is None
    graph.ndata["x"] = FeatureStore(x, "cpu", "resident")
    assert source_of(graph.ndata, "x") is None
    graph.ndata["x"] = FeatureStore(x, "cpu", hot=torch.tensor([4, 2]))
    assert source_of(copy.deepcopy(graph).ndata, "x") is source_of(graph.ndata, "x")
    again = pickle.loads(pickle.dumps(graph)).ndata
    assert torch.equal(again["x"], x) and torch.equal(source_of(again, "x").hot, torch.tensor([4, 2]))
    with pytest.raises(GraphError, match="one row per entry"):
        graph.ndata["x"] = FeatureStore(x[:5], "cpu")


def test_hot_rows_that_are_to_be_chosen_are_asked_for_again():
    store = FeatureStore(some_graph().ndata["x"], "cpu")
    store.wants = 1024
    assert pickle.loads(pickle.dumps(store)).wants == 1024


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_the_op_is_its_reference(ids, shape):
    random = torch.Generator().manual_seed(0)
    table, cache = torch.randn(50, *shape, generator=random), torch.randn(7, *shape, generator=random)
    slot_of = torch.full((50,), -1, dtype=torch.int32)
    slot_of[torch.randperm(50, generator=random)[:7]] = torch.arange(7, dtype=torch.int32)
    index = torch.randint(0, 50, (200,), generator=random).to(ids)
    for args in ((table, cache, slot_of, index), (table, None, None, index), (table, cache, slot_of, index[:0])):
        got = ops.gather_rows(*args)
        assert torch.equal(got, reference.gather_rows(*args))
        torch.library.opcheck(ops.gather_rows.default, args, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(IndexError, match="row 50 of a table of 50 rows"):
        ops.gather_rows(table, cache, slot_of, index[:1] * 0 + 50)
    with pytest.raises(RuntimeError, match="not trained"):
        ops.gather_rows(table.requires_grad_(), None, None, index)


@pytest.mark.parametrize("tier", ["cached", "pinned", "resident", "host"])
def test_rows_into_slots_and_to_the_host(tier):
    x = torch.randn(40, 6)
    hot = torch.tensor([7, 2, 30]) if tier == "cached" else None
    store = FeatureStore(pin(x, "cpu"), "cpu", tier, hot, torch.bfloat16)
    out, ids = torch.zeros(9, 6), torch.tensor([2, 7, 39])
    store.fill(ids, torch.tensor([8, 0, 3]), out)
    assert torch.equal(out[[8, 0, 3]], x[ids].bfloat16().float()) and not out[[1, 2, 4, 5, 6, 7]].any()
    assert torch.equal(store.gather(ids), x[ids].bfloat16())
    assert torch.equal(store.rows(ids), x[ids].bfloat16())
    assert (store.row_bytes, tuple(store.shape), store.dtype) == (12, (40, 6), torch.bfloat16)
    if tier == "cached":
        assert store.device_bytes == 3 * 8 and store.cache is None, "which are hot: nothing is copied on a CPU"


def test_a_store_without_rows():
    store = FeatureStore(torch.empty(0, 3), "cpu", hot=torch.empty(0, dtype=torch.int64))
    assert torch.equal(store.rows(torch.zeros(2, dtype=torch.int32)), torch.zeros(2, 3))


def test_impossible_stores():
    x = torch.randn(4, 2)
    for arguments, error, message in (
        ({"tier": "disk"}, ConfigError, "no tier 'disk'; expected one of resident, cached"),
        ({"tier": "cached"}, ConfigError, "needs hot="),
        ({"tier": "pinned", "hot": torch.tensor([1])}, ConfigError, "keeps no hot rows"),
        ({"hot": torch.tensor([1, 1])}, DataError, "different ids"),
        ({"hot": torch.tensor([4])}, DataError, r"in \[0, 4\)"),
        ({"dtype": torch.float64}, DataError, "float32"),
    ):
        with pytest.raises(error, match=message):
            FeatureStore(x, "cpu", **arguments)


@pytest.mark.parametrize(
    ("hot", "says"),
    [
        (torch.tensor([1.7, 2.2]), "int64 or int32 node ids"), ([1.5], "int64 or int32 node ids"), (5, "got int"),
        (torch.tensor([True, False, True, False]), "is a mask"), (np.array([True, False]), "is a mask"),
        ({1, 2}, "is a set"), ([[1, 2]], "different ids"), ("1", "got str"),
    ],
)  # fmt: skip
def test_hot_rows_are_ids(hot, says):
    store = FeatureStore(torch.randn(4, 2), "cpu")
    makers = (lambda: FeatureStore(torch.randn(4, 2), "cpu", hot=hot), lambda: store.keep(hot))
    for make in makers:
        with pytest.raises(DataError, match=says):
            make()
    assert store.tier == "pinned", "what is refused changes nothing"
    if isinstance(hot, str | int):
        return  # so many bytes
    with pytest.raises(DataError, match=says):
        joestar.store.shard(torch.randn(4, 2), hot, device="cpu")


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, range])
def test_stores_of_lists_and_arrays(kind):
    x = torch.arange(8.0).view(4, 2)
    hot = range(2, 4) if kind is range else kind([3, 1])
    store = FeatureStore(x.tolist() if kind is list else x.numpy(), "cpu", hot=hot, dtype=torch.float32)
    assert store.hot.tolist() == list(hot) and torch.equal(store.rows(torch.arange(4)), x)
    assert joestar.store.shard(x, hot, place="host", device="cpu").hot.tolist() == list(hot)


@pytest.mark.parametrize("source", [5, 2.5, "x", None, {1: 2}, torch.tensor(1.0), [["a"]], [[1.0], [1.0, 2.0]]])
def test_a_source_is_rows(source):
    with pytest.raises(DataError, match="source"):
        FeatureStore(source, "cpu")


class Far(torch.Tensor):
    """Memory of a device that the staging buffers are for, as far as ``fill`` asks."""

    is_cpu = False


def test_a_staging_buffer_is_written_again_when_it_was_read_on_whatever_stream(monkeypatch):
    """With streams that are made up: rows are filled on one stream, then on another one."""
    log, current = [], []

    class Event:
        def record(self, stream):
            log.append(("record", self, stream))

        def synchronize(self):
            log.append(("synchronize", self, None))

    def stream(name):
        return SimpleNamespace(name=name, wait_event=lambda event: log.append(("wait", event, name)))

    def filled(source, ids, slots, out, programs):
        log.append(("fill", fill_rows(source, ids, slots, out.as_subclass(torch.Tensor)), None))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, on: log.append(("keep", tensor, on.name)))
    monkeypatch.setattr(features, "fill_rows", filled)
    x, ids = torch.rand(9, 3), torch.tensor([1, 4, 8])
    store = FeatureStore(x, "cpu", tier="host")
    for name in ("one", "other"):
        current.append(stream(name))
        out = torch.zeros(4, 3).as_subclass(Far)
        store.fill(ids, torch.tensor([2, 0, 3]), out)
        assert torch.equal(out[[2, 0, 3]].as_subclass(torch.Tensor), x[ids])
    staging = store._staging[0]
    words = [word for word, *_ in log]
    assert words == 2 * ["synchronize", "wait", "keep", "record", "fill", "record"]
    (_, waited, on), (_, kept, keeper) = log[7:9]
    assert waited is staging.read and kept is staging.copy and on == keeper == "other"
    assert log[5][1] is staging.read and log[5][2].name == "one" and log[3][1] is staging.done
