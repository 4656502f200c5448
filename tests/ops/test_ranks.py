"""Ops between ranks, with the ranks played one after the other by this process."""

import collections
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import ConfigError, DistributedError
from joestar.ops.step import ranks
from joestar.runtime.ranks import check_synced
from tests.runtime.common import planted_graph

ops = torch.ops.joestar
IDS = torch.tensor([[4, 9, 2, 7, 5], [7, 3, 4, 8, 0], [1, 1, 1, 1, 1]])
COUNTS = [5, 4, 2]
SEEDS = torch.tensor([[4, 9], [4, 3], [1, 1]])
HAS_SEEDS = [True, True, False]


class _Together:
    """Sums over threads, one per rank."""

    def __init__(self, world: int):
        self.all_here = threading.Barrier(world)
        self.brought: dict[int, torch.Tensor] = {}

    def add_up(self, rank: int, tensor: torch.Tensor) -> None:
        """In place."""
        self.brought[rank] = tensor.clone()
        self.all_here.wait()
        total = sum(self.brought.values())
        self.all_here.wait()
        tensor.copy_(total)


def _on_all(work, world: int = 3) -> list:
    """``work(rank)`` in a thread for every rank, each with partners of its own."""
    together, own, results = _Together(world), threading.local(), {}

    class Each:
        """The partners of the thread that asks."""

        def __getattr__(self, name):
            return getattr(own.partners, name)

    def run(rank: int) -> None:
        flags = torch.tensor(HAS_SEEDS[rank]), torch.tensor(rank != 1)
        own.partners = ranks.Partners(lambda t: together.add_up(rank, t), rank, world, *flags)
        results[rank] = work(rank)

    ranks.meet(Each())
    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        ranks.meet(None)
    return [results[rank] for rank in range(world)]


@pytest.mark.parametrize("padded", [True, False])
def test_a_node_counts_once_and_a_seed_as_often_as_it_is_one(padded):
    def parts(rank):
        rows = slice(None) if padded else slice(COUNTS[rank])
        count, meant = torch.tensor(COUNTS[rank]), torch.tensor(2)
        return ops.row_parts(IDS[rank][rows], count, SEEDS[rank], meant, rank, 3, padded)

    found = _on_all(parts)
    total = collections.Counter()
    for rank, values in enumerate(found):
        assert not values[COUNTS[rank] :].any()
        for node, value in zip(IDS[rank].tolist(), values.tolist(), strict=False):
            total[node] += value
    assert dict(+total) == {4: 2.0, 9: 1.0, 2: 1.0, 7: 1.0, 5: 1.0, 3: 1.0, 8: 1.0}
    assert found[0].tolist()[0] == 1.0 and found[0].tolist()[3] == 0.5


def test_gradients_of_all_ranks_reach_what_each_gave():
    """The third rank has no seeds, the second no loss of its own."""
    weights = torch.arange(18, dtype=torch.float64).view(3, 3, 2)

    def gradient(rank):
        x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        everyone = ops.over_ranks(x, rank, 3)
        y = ops.counted(everyone * weights[rank])
        assert torch.equal(y, everyone * weights[rank])
        (grad,) = torch.autograd.grad(y.sum() * (torch.nan if rank == 1 else 1.0), x)
        return everyone.detach(), grad

    for rank, (everyone, grad) in enumerate(_on_all(gradient)):
        assert everyone.tolist() == [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]
        assert torch.equal(grad, weights[0, rank] + weights[2, rank])


def test_alone_a_rank_waits_for_nobody():
    def never(tensor):
        raise AssertionError("waits")

    true = torch.tensor(True)
    ranks.meet(ranks.Partners(never, 1, 2, true, true))
    try:
        with ranks.alone():
            assert ops.over_ranks(torch.ones(2), 1, 2).tolist() == [[0.0, 0.0], [1.0, 1.0]]
        ranks.partners().drop_graph()
        assert ranks.partners() is None
    finally:
        ranks.meet(None)
    with pytest.raises(DistributedError, match="after they have parted"):
        ops.over_ranks(torch.ones(2), 1, 2)


def test_what_cannot_be_synchronised_is_refused(monkeypatch):
    synced = nn.SyncBatchNorm(4)
    check_synced(nn.BatchNorm1d(4), whole_sample=True)
    check_synced(synced, whole_sample=False)
    with pytest.raises(ConfigError, match="takes an edge_index"):
        check_synced(synced, whole_sample=True)
    synced.process_group = object()
    with pytest.raises(ConfigError, match="SyncBatchNorm with a process_group of its own"):
        check_synced(synced, whole_sample=False)


class _OfEdges(nn.Module):
    """Normalises what is no row per node."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.norm, self.out = nn.SyncBatchNorm(features), nn.Linear(features, classes)

    def forward(self, blocks, x):
        """Scores."""
        messages = self.norm(x[blocks[0].indices])
        return self.out(x[: blocks[0].num_dst] + messages.mean(0))


def test_rows_that_are_no_nodes_are_refused():
    graph = planted_graph()
    model = _OfEdges(graph.ndata["x"].shape[1], 4)
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [3]), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
        backend="eager",
    )  # fmt: skip
    true = torch.tensor(True)
    ranks.meet(ranks.Partners(lambda t: None, 0, 1, true, true))
    try:
        with pytest.raises(joestar.errors.PaddingError, match=r"SyncBatchNorm at .* that are not the nodes"):
            next(step.epoch(torch.arange(20), 10))
    finally:
        ranks.meet(None)


@pytest.mark.parametrize("has_loss", [True, False])
def test_gradients_of_a_loss_without_weight_are_zero(has_loss):
    """Whatever they would be, NaN too."""
    partners = ranks.Partners(lambda tensor: None, 0, 1, torch.tensor(True), torch.tensor(has_loss))
    ranks.meet(partners)
    try:
        x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        (ops.counted(x) * torch.tensor([2.0, 3.0, float("nan")], dtype=torch.float64)).sum().backward()
        grad = ops.counted_grad(torch.tensor([2.0, float("nan")], dtype=torch.float64))
    finally:
        partners.drop_graph()
    expected = torch.tensor([2.0, 3.0, float("nan")], dtype=torch.float64) * (1 if has_loss else 0)
    assert torch.equal(x.grad[:2], expected[:2])
    assert x.grad[2].isnan() if has_loss else x.grad[2] == 0
    assert has_loss or not grad.any()
