"""Feature stores on a GPU: views of page-locked memory, streams, dtypes, captured graphs, whole training runs."""

import copy
import gc
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from store.structures import case, cases, placed

import joestar
from joestar.graph_api import Graph
from joestar.locks import RECORDING
from joestar.nn import GraphSAGE
from joestar.sampling import NeighborSampler
from joestar.store import FeatureStore, choose_hot, fill_rows, pin, pinned_empty, place_structure, with_pinned_structure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_a_view_is_the_memory(dtype):
    pinned = pinned_empty((1000, 32), dtype)
    pinned.host.copy_(torch.arange(32_000).reshape(1000, 32) % 251)
    assert pinned.view.is_cuda and pinned.view.data_ptr() == pinned.host.data_ptr()
    assert torch.equal(pinned.view.cpu(), pinned.host)
    pinned.view[7] = 3
    torch.cuda.synchronize()
    assert (pinned.host[7] == 3).all()
    view = pinned.view
    del pinned
    gc.collect()
    assert view.double().sum() > 0, "the view keeps the memory"


def test_large_tensors_are_locked_where_they_are_and_can_be_locked_again():
    x = torch.randn(2**18, 80)
    for _ in range(3):
        pinned = pin(x)
        assert pinned.host.data_ptr() == x.data_ptr()
        assert torch.equal(pinned.view[::1000].cpu(), x[::1000])
        del pinned
        gc.collect()
    both = pin(x), pin(x)
    assert both[1].host.data_ptr() != x.data_ptr() and torch.equal(both[1].view[-1].cpu(), x[-1])


def test_memory_given_back_in_another_thread_waits_for_the_end_of_a_capture():
    """As the garbage collector does in whatever thread it runs; a capture allows no waiting for the device."""
    x, graph, stream = torch.randn(2**18, 80), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    held, total = [pin(x)], torch.zeros(1, device="cuda")
    with RECORDING, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        total += 1
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        total += 1
    graph.replay()
    assert total.item() == 2
    assert pin(x).host.data_ptr() == x.data_ptr(), "unlocked behind the capture, and locked anew"


def test_a_mapped_file(tmp_path):
    path = tmp_path / "x.bin"
    np.arange(4_000_000, dtype=np.float32).tofile(path)
    x = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+", shape=(40_000, 100)))
    assert torch.equal(pin(x).view[39_999].cpu(), x[39_999])
    assert torch.equal(pin(x, dtype=torch.bfloat16).view.cpu(), x.bfloat16())


@pytest.mark.parametrize("programs", [1, 8, 32, 500])
@pytest.mark.parametrize("width", [1, 37, 100, 128, 768])
def test_rows_into_slots(width, programs):
    for stored, wanted in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        x = torch.randn(5000, width).to(stored)
        view = pin(x).view
        out = torch.full((6000, width), -5.0, device="cuda", dtype=wanted)
        ids = torch.randperm(5000, device="cuda")[:3777].sort().values.int()
        slots = torch.randperm(6000, device="cuda")[:3777]
        expected = out.clone()
        expected[slots] = x.cuda()[ids.long()].to(wanted)
        fill_rows(view, ids, slots, out, programs)
        assert torch.equal(out, expected)


def test_rows_are_loaded_beside_a_replayed_graph():
    x = torch.randn(200_000, 128)
    view, out = pin(x).view, torch.zeros(100_000, 128, device="cuda")
    ids = torch.randperm(200_000, device="cuda")[:100_000].sort().values
    slots = torch.arange(100_000, device="cuda")
    a, total = torch.randn(512, 512, device="cuda") / 32, torch.zeros(512, 512, device="cuda")
    torch.mm(a, a)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        total += torch.mm(a, a)
    total.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fill_rows(view, ids, slots, out)
    for _ in range(50):
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, x.cuda()[ids])
    torch.testing.assert_close(total, 50 * torch.mm(a, a), rtol=1e-3, atol=1e-3)


def test_offsets_past_32_bits():
    pinned = pinned_empty((2**25 + 3, 80), torch.uint8)  # 2.5 GiB: the last rows are past 2**31
    pinned.host[-3:] = torch.arange(240, dtype=torch.uint8).view(3, 80)
    ids = torch.tensor([0, 2**25, 2**25 + 1, 2**25 + 2], device="cuda")
    out = torch.full((4, 80), 9, dtype=torch.uint8, device="cuda")
    fill_rows(pinned.view, ids, torch.arange(4, device="cuda"), out)
    assert torch.equal(out.cpu(), pinned.host[ids.cpu()])


@pytest.mark.parametrize("made", [*cases(), case("large", [9] * 200_000, 900_000, 1_000_000, 8)], ids=lambda c: c.name)
def test_structure_among_slots(made):
    tensors = [t.cuda() for t in (made.indptr, made.indices, made.slots)]
    for ids in (torch.int32, torch.int64):
        out_indptr = torch.full((made.slots_in_all + 1,), -7, device="cuda")
        out_indices = torch.full((made.indices.numel() + 5,), -7, dtype=ids, device="cuda")
        place_structure(*tensors, out_indptr, out_indices)
        expected = placed(made, ids)
        assert torch.equal(out_indptr.cpu(), expected[0]) and torch.equal(out_indices.cpu(), expected[1])


@pytest.mark.parametrize("tier", ["cached", "pinned", "host"])
def test_stores_give_the_rows(tier, monkeypatch):
    monkeypatch.setattr("joestar.store.features.STAGING_BYTES", 2**16)
    x = torch.randn(30_000, 37)
    hot = choose_hot(torch.rand(30_000), 10_000) if tier == "cached" else None
    store = FeatureStore(x, "cuda", tier, hot)
    ids = torch.randint(0, 30_000, (20_011,))
    if tier != "host":
        assert torch.equal(store.rows(ids.cuda().int()).cpu(), x[ids])
    out = torch.zeros(30_000, 37, device="cuda")
    chosen = ids.unique()
    store.fill(chosen if tier == "host" else chosen.cuda(), chosen.cuda(), out)
    assert torch.equal(out[chosen.cuda()].cpu(), x[chosen])


def test_sampling_from_edges_on_the_host():
    edges = torch.randint(0, 3000, (2, 50_000))
    graph = Graph.from_edge_index(edges, 3000)
    seeds = torch.arange(500, device="cuda", dtype=graph.indices.dtype)
    blocks = [
        NeighborSampler(g, [4, 3]).sample(g.keyed(1), seeds) for g in (graph.to("cuda"), with_pinned_structure(graph))
    ]
    for resident, pinned in zip(*blocks, strict=True):
        assert torch.equal(resident.srcs, pinned.srcs) and torch.equal(resident.indices, pinned.indices)


def test_training_over_edges_on_the_host_is_that_of_resident_ones():
    """The compiled step, whole: the same samples, so the same losses."""
    random = torch.Generator().manual_seed(0)
    data = {"x": torch.randn(5000, 32, generator=random), "y": torch.randint(0, 5, (5000,), generator=random)}
    graph = Graph.from_edge_index(torch.randint(0, 5000, (2, 60_000), generator=random), 5000, data)
    torch.manual_seed(0)
    model, losses = GraphSAGE(32, 16, 2, 5), []
    for moved in (graph.to("cuda"), with_pinned_structure(graph, "cuda")):
        net = copy.deepcopy(model).cuda()
        step = joestar.compile(
            net,
            NeighborSampler(moved, [5, 5]),
            F.cross_entropy,
            torch.optim.Adam(net.parameters()),
            deterministic=True,
        )
        idx = torch.arange(2000, device="cuda")
        losses.append([float(loss) for _ in range(2) for loss in step.epoch(idx, batch_size=256)])
    assert moved.indices.data_ptr() != graph.indices.data_ptr() and losses[0] == losses[1]


@pytest.mark.parametrize("tier", ["cached", "pinned"])
def test_training_is_that_of_resident_features(tier):
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(5000, 32, generator=random), torch.randint(0, 5, (5000,), generator=random)
    edges = torch.randint(0, 5000, (2, 60_000), generator=random)
    resident = Graph.from_edge_index(edges, 5000, {"x": x, "y": y})
    stored = Graph.from_edge_index(edges, 5000, {"x": x, "y": y})
    hot = choose_hot(resident.in_degrees(), 1500) if tier == "cached" else None
    stored.ndata["x"] = FeatureStore(x, "cpu", tier, hot)  # goes to the GPU with the graph
    torch.manual_seed(0)
    model, losses = GraphSAGE(32, 16, 2, 5), []
    for graph in (resident.to("cuda"), stored.to("cuda")):
        net = copy.deepcopy(model).cuda()
        step = joestar.compile(
            net, NeighborSampler(graph, [5, 5]), loss_fn=F.cross_entropy, optimizer=torch.optim.Adam(net.parameters())
        )
        idx = torch.arange(2000, device="cuda")
        losses.append([float(loss) for _ in range(2) for loss in step.epoch(idx, batch_size=256)])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
