"""What macro-batches take of the host's memory is in the plan, and refused where it is not there."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.data import save
from joestar.errors import ConfigError
from joestar.staged import host_memory
from joestar.staged.planning import Planner
from joestar.staged.several import imagined
from joestar.stages import LargeBatch
from joestar.stages.history import HistoryStore
from joestar.stages.plan import Plan, Speeds
from joestar.store import pinned

MIB = 1 << 20


def planner(graph, ranks=None):
    net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, 2, graph.num_classes)
    sampler = joestar.NeighborSampler(graph, [2, 2])
    return Planner(net, sampler, 4 * MIB, batch=20, speeds=Speeds(), first_stage=LargeBatch(100), ranks=ranks)


def test_a_plan_says_what_it_takes_of_the_host():
    plan = planner(planted("tiny")).plan()
    assert plan.host["arena"] == plan.memory and 0 < plan.host["macro-batches under way"] < MIB
    assert "host memory beside the graph: macro-batches under way" in str(plan)


def test_what_the_host_does_not_have_is_refused_before_it_is_taken(monkeypatch):
    graph = planted("tiny")
    needed = sum(planner(graph).plan().host.values())
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: needed)
    planner(graph).plan()
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: needed - 1)
    monkeypatch.setattr(Planner, "arena", None)
    net = joestar.nn.GraphSAGE(16, 8, 2, graph.num_classes)
    with pytest.raises(ConfigError, match=r"of the host's memory beside the graph \(.*\), and .* are free"):
        joestar.compile(
            net, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, torch.optim.Adam(net.parameters()),
            memory=4 * MIB, first_stage=LargeBatch(100), batch_size=20,
        )  # fmt: skip
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: None)
    planner(graph).plan()


def test_processes_of_a_host_share_copies_and_nothing_else(monkeypatch):
    """Each of three has an arena of its own."""
    graph = planted("tiny")
    own = sum(planner(graph, imagined(3)).plan().host.values())
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 3 * own)
    planner(graph, imagined(3)).plan()
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 3 * own - 1)
    with pytest.raises(ConfigError, match="for its 3 processes"):
        planner(graph, imagined(3)).plan()
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 10)
    host_memory.settle_host(Plan(0, False), {"rows": 4}, {"macro-batches": 2}, imagined(3))
    with pytest.raises(ConfigError, match=r"need 12 B .* for its 4 processes"):
        host_memory.settle_host(Plan(0, False), {"rows": 4}, {"macro-batches": 2}, imagined(4))


def test_rows_of_files_are_copied_for_a_gpu_and_others_are_locked_where_they_are(tmp_path):
    rows = torch.ones(pinned.IN_PLACE_BYTES // 64 + 1, 16)
    graph = joestar.Graph.from_csc(torch.zeros(rows.shape[0] + 1, dtype=torch.int64), [], {"x": rows})
    mapped = joestar.load(save(graph, tmp_path / "graph")).ndata["x"]
    assert host_memory.copied_bytes([rows, torch.ones(3), rows[:, :8]]) == 12 + rows.nbytes // 2
    assert host_memory.copied_bytes([mapped]) == rows.nbytes


def test_historical_embeddings_are_counted():
    graph = planted("tiny")
    net = joestar.nn.GraphSAGE(16, 8, 2, graph.num_classes)
    step = joestar.compile(
        net, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, torch.optim.Adam(net.parameters()),
        memory=4 * MIB, first_stage=joestar.Partitions(joestar.partition(graph, 4), 2), batch_size=20,
    )  # fmt: skip
    places = step.plan.host["where hidden rows are"]
    assert places == 4 * graph.num_nodes
    assert step.plan.host["historical embeddings"] + places == step.exchange.store.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        store = HistoryStore(9, [3, 5], [torch.tensor([1, 4, 5]), torch.tensor([1])], dtype=dtype)
        assert HistoryStore.nbytes_of([3, 1], 9, [3, 5], dtype) == store.nbytes


def test_a_container_has_what_its_limit_leaves(tmp_path):
    given = {"max": "1000", "current": "700", "stat": "anon 500\nactive_file 60\ninactive_file 40\n"}
    for name, text in given.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert pinned._free_of_container(tmp_path) == 1000 - (700 - 100)
    (tmp_path / "memory.max").write_text("max\n")
    assert pinned._free_of_container(tmp_path) is None
    assert pinned._free_of_container(tmp_path / "nowhere") is None
    assert pinned.free_host_bytes() > 0
