"""What ranks do in the tests of features that are sharded over them."""

import os
import warnings
from unittest import mock

import torch
import torch.nn.functional as F
from captures import cheaper, cheapest

import joestar
from joestar.distributed.peer_memory import NoPeerAccessError
from joestar.graph_api.row_source import source_of
from joestar.store import Sharded, Speeds, spread, structure, ways
from tests.distributed.scenarios import epochs_of, ids, model_of, state_of, step_of, telling, too_large
from tests.runtime.common import planted_graph


def started() -> torch.device:
    """Joins the job, on the device of the tests."""
    device = os.environ.get("JOESTAR_TEST_DEVICE", "cpu")
    group = joestar.distributed.init(timeout=20.0, device=device.partition(":")[0])
    return torch.device(device) if group is None else group.device


def graph_with(how: str, device: torch.device, dtype=torch.float64) -> joestar.Graph:
    """The graph of all tests; features where ``how`` says."""
    graph = planted_graph(nodes=400, dtype=dtype, degree=5)
    x = graph.ndata["x"]
    if how == "sharded":
        graph.ndata["x"] = joestar.store.shard(x)
    elif how == "hot":  # room for 60 rows and the table of slots
        graph.ndata["x"] = joestar.store.shard(x, hot=60 * x[0].numel() * x.element_size() + 4 * 400)
    elif how == "ids":  # others on every rank
        graph.ndata["x"] = joestar.store.shard(x, hot=torch.arange(50) * 7 + joestar.distributed.rank())
    elif how == "host":
        graph.ndata["x"] = joestar.store.shard(x, hot="4KiB", place="host")
    return graph.to(device)


def trained(how: str, batch: int, device: torch.device, dtype=torch.float64) -> dict:
    """Two epochs, scores and outputs."""
    graph = graph_with(how, device, dtype)
    step = step_of(graph, model_of(dropout=0.3).to(dtype))
    found = {"losses": epochs_of(step, ids(173), batch), "state": state_of(step)}
    if dtype == torch.float64:
        found |= {"score": step.evaluate(ids(100, 190), 25), "outputs": step.predict(ids(170, 210), 20).tolist()}
        found["full"] = step.predict(ids(30), full=True).tolist()
    source = source_of(graph.ndata, "x")
    if source is not None:
        found["hot"] = 0 if source.hot is None else source.hot.numel()
        text = step.report().programs[0].graph_after
        found["program"] = [name for name in ("gather_shards", "gather_rows", "sample_aggregate") if name in text]
        found["kind"] = f"{type(source).__name__} {getattr(source, 'tier', '')}"
    return found


def all_tiers(batch: int) -> dict:
    """The same training with features in every place, and what is left behind the end of the job."""
    device, single = started(), joestar.distributed.current() is None
    with cheaper(cheapest):
        if single:
            return {"replicated": trained("replicated", batch, device)}
        found = {"ids": trained("ids", batch, device), "host": _host(device)}
        for how in ("sharded", "host") if device.type == "cuda" else ():
            found[f"{how}, float32"] = trained(how, batch, device, torch.float32)
        found["after"] = _after(device)
    return found


# --- edges ---

GRANULES = {"pieces": 64, "rest empty": 1 << 20, "pages": structure.PAGE}
"""Bytes that parts are multiples of: with the second, rank 0 has all edges, and the others none."""
FANOUTS = {"uniform": [4, 3], "weighted": [4, 3], "all neighbours": [-1, 3], "sharded features": [4, 3]}
PLACES = {name: ["replicated", "pieces"] for name in FANOUTS} | {
    "uniform": ["replicated", "pieces", "rest empty"], "sharded features": ["replicated", "pages", "planned"]
}  # fmt: skip


def structures(batch: int) -> dict:
    """The same training with edges on every rank and in parts: how -> what comes of it, in every place; and misuse."""
    device = started()
    with cheaper(cheapest):
        found = {how: [_of_structure(place, how, batch, device) for place in PLACES[how]] for how in FANOUTS}
        return found | {"told": _structures_refused(device)}


def _of_structure(place: str, how: str, batch: int, device: torch.device) -> dict:
    graph = planted_graph(nodes=400, dtype=torch.float64, degree=5)  # one row has 398 edges, the others few
    graph.edata["w"] = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(4)) + 0.1
    graph.train_idx = torch.arange(173)
    if place == "planned":
        return _trained_over(_planned(graph), how, batch)
    if how == "sharded features":
        graph.ndata["x"] = joestar.store.shard(graph.ndata["x"], hot="8KiB")
    if place == "replicated":
        graph = graph.to(device)
    else:
        with mock.patch.object(structure, "PAGE", GRANULES[place]):
            graph = joestar.store.shard_structure(graph)
    return _trained_over(graph, how, batch)


def _planned(graph: joestar.Graph) -> joestar.Graph:
    """Where a plan puts it that has room for a part of features and edges on each rank, and for some hot rows."""
    with mock.patch.object(ways, "part_bytes", lambda nbytes, world: -(-nbytes // world)):
        _, features, edges, _ = joestar.store.plan_graph(graph, room=1).ways
        plan = joestar.store.plan_graph(graph, room=(features.bytes + edges.bytes) // 2)
    assert [way.place for way in plan.ways] == ["replicate", "features", "structure", "host"]
    assert plan.best is plan.ways[2] and plan.best.left > 0, str(plan)
    found = plan.apply(graph)
    assert isinstance(source_of(found.ndata, "x"), Sharded) and source_of(graph.ndata, "x") is None
    return found


def _trained_over(graph: joestar.Graph, how: str, batch: int) -> dict:
    sampler = joestar.NeighborSampler(graph, FANOUTS[how], seed=7, probs="w" if how == "weighted" else None)
    model = model_of(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager")
    found = {"losses": epochs_of(step, ids(173), batch, 1), "state": state_of(step)}
    found |= {"score": step.evaluate(ids(100, 190), 25), "outputs": step.predict(ids(170, 210), 20).tolist()}
    return found | {"full": step.predict(ids(30), full=True).tolist()}


def _structures_refused(device: torch.device) -> dict:
    """Misuse of ``shard_structure``, and what stands behind it."""
    group, told = joestar.distributed.current(), {}
    last, tried = group.rank == group.world - 1, telling(told)
    graph = planted_graph(nodes=400, degree=5)
    other = planted_graph(1 if last else 0, nodes=400, degree=5)
    tried("graphs", lambda: joestar.store.shard_structure(other))
    tried("place", lambda: joestar.store.shard_structure(graph, place="host" if last else None))
    with mock.patch.object(group, "hosts", [*["near"] * (group.world - 1), "far"]):
        tried("hosts", lambda: joestar.store.shard_structure(graph))
    with mock.patch.object(structure, "copy_parts", _fails if last else structure.copy_parts):
        tried("loading", lambda: joestar.store.shard_structure(graph))
    with mock.patch.object(structure, "copy_parts", (lambda *given: None) if last else structure.copy_parts):
        tried("reading", lambda: joestar.store.shard_structure(graph))
    with mock.patch.object(structure, "free_host_bytes", return_value=1000):
        tried("room", lambda: joestar.store.shard_structure(graph))
    told["without links"] = _structure_without_links(graph, group)
    bare = joestar.Graph.from_csc(torch.zeros(6, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    spread_out = joestar.store.shard_structure(bare)
    told["no edges"] = f"{spread_out.num_nodes} {spread_out.num_edges} {spread_out.indices.dtype}"
    return told


def _structure_without_links(graph: joestar.Graph, group) -> str:
    """What is said, and whether edges are right, where GPUs do not reach one another's memory: played on CPUs."""
    with (
        mock.patch.object(structure, "joined_memory", mock.Mock(side_effect=NoPeerAccessError("made up"))),
        mock.patch.object(structure._Spread, "on_host", property(lambda spread: spread.place == "host")),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        found = joestar.store.shard_structure(graph)
    words = " ".join(str(each.message) for each in said if issubclass(each.category, joestar.errors.JoestarWarning))
    return f"{torch.equal(found.indices.cpu(), graph.indices)} {words}"


def _host(device: torch.device) -> dict:
    """Rows in host memory that ranks share."""
    graph = graph_with("host", device, torch.float32)
    source = source_of(graph.ndata, "x")
    spread.choose_hot_rows(joestar.NeighborSampler(graph, [4, 3]), 20)
    rows = source.rows(torch.arange(400, device=device)).cpu()
    same = torch.equal(rows, planted_graph(nodes=400, degree=5).ndata["x"])
    return {"same": same, "tier": source.tier, "hot": source.hot.numel()}


def _after(device: torch.device) -> dict:
    graph = graph_with("hot", device)
    source = source_of(graph.ndata, "x")
    x = planted_graph(nodes=400, dtype=torch.float64, degree=5).ndata["x"]
    everything = torch.arange(400, device=device)
    same = torch.equal(source.rows(everything).cpu(), x)
    if device.type == "cuda":
        step = step_of(graph)  # with a captured graph
        step(ids(20))
    joestar.distributed.shutdown()
    told = ""
    try:
        source.rows(everything)
    except joestar.errors.DistributedError as error:
        told = str(error)
    return {"same": same, "told": told, "left": len(source.shards), "bytes": source.device_bytes}


def ahead(batch: int) -> dict:
    """Training with and without ``prefetch``: overflows on the last rank alone, groups of batches, calls in between."""
    device, found = started(), {}
    for name in ("plain", "prefetch"):
        with cheaper(cheapest):
            graph = graph_with("hot", device)
            model, options = model_of(dropout=0.3, norm="batch_norm"), {"accumulate": 2, "clip_grad_norm": 0.5}
            step = step_of(graph, model, patience=2, prefetch=name == "prefetch", **options)
            losses = []
            with too_large(step, {3, 6}):
                for position, loss in enumerate(step.epoch(ids(173), batch)):
                    losses.append(loss.item())
                    if position == 1:
                        losses.append(step(ids(41)).item())
                losses += epochs_of(step, ids(173), batch, 1)
        counters = step.counters
        found[name] = {"losses": losses, "state": state_of(step), "score": step.evaluate(ids(60), 60)}
        found[f"{name}, counted"] = [counters.steps, counters.overflows, counters.recompiles]
    found["prefetched"] = counters.prefetched
    return found


def resumes(batch: int, folder: str, first: bool) -> dict:
    """An epoch, a checkpoint and another epoch; or the other epoch from a checkpoint of other ranks."""
    device = started()
    with cheaper(cheapest):
        graph = graph_with("hot" if joestar.distributed.current() else "replicated", device)
        step = step_of(graph, model_of(dropout=0.3))
        kept = joestar.Checkpoints(folder)
        if first:
            epochs_of(step, ids(173), batch, 1)
            kept.save(step)
        else:
            step.load_state_dict(kept.latest()["step"])
        return {"losses": epochs_of(step, ids(173), batch, 1), "state": state_of(step)}


# --- what is refused ---


class Rows:
    """A table that is read by slices."""

    def __init__(self, x: torch.Tensor):
        self.x, self.shape, self.dtype = x, list(x.shape), x.dtype

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.x[rows].clone()


def _without_links(x: torch.Tensor) -> str:
    """What is said, and whether rows are right, where GPUs do not reach one another's memory."""
    error = NoPeerAccessError("made up")
    with (
        mock.patch.multiple(
            spread, host_memory=mock.Mock(side_effect=error), device_memory=mock.Mock(side_effect=error)
        ),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        source = joestar.store.shard(Rows(x))
    words = " ".join(str(each.message) for each in said if issubclass(each.category, joestar.errors.JoestarWarning))
    return f"{torch.equal(source.rows(ids(300)).cpu(), x)} {type(source).__name__} {words}"


def refused() -> dict:
    """Every misuse, and what each rank is told."""
    device = started()
    group = joestar.distributed.current()
    last, told = group.rank == group.world - 1, {}
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))

    tried = telling(told)

    tried("values", lambda: joestar.store.shard(x + last))
    tried("dtype", lambda: joestar.store.shard(x, dtype=torch.bfloat16 if last else None))
    tried("hot", lambda: joestar.store.shard(x, hot="1KiB" if last else "2KiB"))
    with mock.patch.object(spread, "_fill", mock.Mock(side_effect=AssertionError("rows were loaded"))):
        tried("double", lambda: joestar.store.shard(x.double(), place="host"))
        tried("as double", lambda: joestar.store.shard(x, place="host", dtype=torch.float64))
    tried("wrong hot", lambda: joestar.store.shard(x, hot=torch.tensor([7, 300 if last else 8])))
    group = joestar.distributed.current()
    with mock.patch.object(group, "hosts", [*["near"] * (group.world - 1), "far"]):
        tried("hosts", lambda: joestar.store.shard(x))
    with mock.patch.object(spread, "fill_shard", _fails if last else spread.fill_shard):
        tried("loading", lambda: joestar.store.shard(x))
    where = (spread, "free_host_bytes", 1000) if device.type == "cpu" else (torch.cuda, "mem_get_info", (1000, 2000))
    with mock.patch.object(*where[:2], return_value=where[2]):
        tried("room", lambda: joestar.store.shard(x, hot="1KiB"))
    source = joestar.store.shard(x, dtype=torch.float16)  # and all are together still
    told["fine"] = bool(isinstance(source, Sharded) and torch.equal(source.rows(ids(300)).cpu(), x.half()))
    told["fine"] &= torch.equal(joestar.store.shard(Rows(x)).rows(ids(300)).cpu(), x)
    told["without links"] = _without_links(x)
    graph = planted_graph(nodes=400, degree=5)
    with mock.patch("joestar.store.bandwidth.PEER_BYTES", 1 << 16):
        slow = Speeds(48, 10.0, 10.0, 0.001, 1e6, 10.0)
        sampler = joestar.NeighborSampler(graph, [4, 3])
        told["plan"] = str(joestar.store.plan_features(graph, sampler, 20, room="14KiB", rates=slow))
    graph.ndata["x"] = joestar.store.shard(graph.ndata["x"], hot="3KiB")
    graph = graph.to(device)
    if last:
        graph.ndata["x"] = planted_graph(nodes=400, degree=5).ndata["x"].to(device)
    tried("compile", lambda: step_of(graph, model_of().float(), F.cross_entropy))
    return told


def _fails(*args, **kwargs) -> None:
    raise OSError("the file is gone")


# --- on GPUs ---


def reads() -> dict:
    """Rows of several dtypes and widths by the kernel, also in a CUDA graph; and what the memory of the device says."""
    device, wrong = started(), []
    group, random = joestar.distributed.current(), torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for width in ((), (1,), (7,), (128,), (3, 100)):
            x = torch.randn(3000, *width, generator=random).to(dtype)
            chosen = torch.randint(0, 3000, (5000,), generator=random)
            source = joestar.store.shard(x, hot=torch.arange(0, 3000, 7))
            found = [source.rows(chosen.to(device)), source.rows(chosen.to(device, torch.int32))]
            if device.type == "cuda":
                fixed, graph = chosen.to(device), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
                    found.append(source.rows(fixed))
                graph.replay()
            if not all(torch.equal(rows.cpu(), x[chosen]) for rows in found):
                wrong.append(f"{dtype} {width}")
            group.exchange("all have read")
            source.close()
    torch.cuda.synchronize()
    before = _free()
    source = joestar.store.shard(torch.zeros(1 << 20, 128))  # 512 MiB, half of it here
    shard, taken = source.device_bytes, before - _free()
    group.exchange("both have looked")
    source.close()
    group.exchange("both have closed")
    return {"wrong": wrong, "shard": shard, "taken": taken, "given back": _free() - before + taken}


def _free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def edges_read(edges: int) -> dict:
    """Edges and their data over all ranks, as read and as sampled from with and without weights, compared with a graph
    of one's own; and what the memory of the device says."""
    device, random = started(), torch.Generator().manual_seed(0)
    group, nodes = joestar.distributed.current(), edges // 20
    edge_index = torch.randint(0, nodes, (2, edges), generator=random)
    weight = torch.rand(edges, generator=random) + 0.1
    graph = joestar.Graph.from_edge_index(edge_index, nodes, edata={"w": weight})
    memory = [_taken_and_given_back(graph, group) for _ in range(8)] if device.type == "cuda" else []
    parts = joestar.store.shard_structure(graph)
    whole, wrong = graph.to(device), []
    some = torch.randint(0, edges, (1 << 16,), generator=random).to(device)
    for name, ours, theirs in (("indices", parts.indices, whole.indices), ("w", parts.edata["w"], whole.edata["w"])):
        wrong += [] if torch.equal(ours[some], theirs[some]) and torch.equal(ours, theirs) else [name]
    seeds = torch.randint(0, nodes, (1000,), generator=random).unique().to(device, whole.indices.dtype)
    for fanouts, probs in (([5, 3], None), ([5, 3], "w"), ([-1], None)):
        sampled = [joestar.NeighborSampler(g, fanouts, probs=probs).sample(g.keyed(1), seeds) for g in (parts, whole)]
        for ours, theirs in zip(*sampled, strict=True):
            same = torch.equal(ours.indptr, theirs.indptr) and torch.equal(ours.srcs, theirs.srcs)
            wrong += [] if same and torch.equal(ours.indices, theirs.indices) else [f"{fanouts} {probs}"]
    group.exchange("all have read")
    part = parts.indices.nbytes + parts.edata["w"].nbytes
    return {"wrong": wrong, "bytes": part, "memory": memory}


def _taken_and_given_back(graph: joestar.Graph, group) -> tuple[int, int]:
    """Bytes that the device has less with a part of the edges, and more again without it."""
    before = _free()
    parts = joestar.store.shard_structure(graph)
    group.exchange("all have loaded")
    after = _free()
    del parts
    group.exchange("all have let go")
    return before - after, _free() - after
