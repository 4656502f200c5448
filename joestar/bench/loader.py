"""PyG's NeighborLoader as a baseline: sampling and gathering in CPU workers, pinned batches, PyG's layers, eager.

What most users run today. It needs pyg-lib, which samples; the layers are those of ``baselines.BlockModel``, each over
the edges and nodes that the layers behind it still read (``torch_geometric.utils.trim_to_layer``).
"""

import os
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from joestar.bench.baselines import BlockModel
from joestar.bench.measure import Timing

PREFETCH = 2
"""Batches that each worker holds ready."""


def missing() -> str | None:
    """Why the loader cannot run here, in a line; ``None`` if it can."""
    try:
        import pyg_lib  # noqa: F401
    except Exception as error:  # a wheel for another PyTorch fails in many ways
        return f"no row for the loader: it needs pyg-lib, which cannot be imported here ({str(error).splitlines()[0]})"
    return None


def workers_here() -> int:
    """Loader processes: a core each but for two, at most 12."""
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def neighbor_loader(graph, fanouts: list[int], batch_size: int, workers: int) -> Iterable:
    """``torch_geometric.loader.NeighborLoader`` over shuffled batches of the graph's training nodes."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    indptr, indices = graph.indptr.cpu(), graph.indices.cpu().long()
    dst = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())
    data = Data(
        x=graph.ndata["x"].cpu(), y=graph.ndata["y"].cpu(), edge_index=torch.stack([indices, dst]),
        num_nodes=indptr.numel() - 1,
    )  # fmt: skip
    return NeighborLoader(
        data, fanouts, graph.train_idx.cpu().long(), batch_size=batch_size, shuffle=True, is_sorted=True,
        num_workers=workers, pin_memory=graph.device.type == "cuda",
        persistent_workers=workers > 0, prefetch_factor=PREFETCH if workers else None,
    )  # fmt: skip


def blocks_of(batch) -> list[tuple[Tensor, int]]:
    """[(``edge_index``, number of destinations)] of a loaded batch, input side first.

    Nodes and edges are ordered by hop: a layer reads the nodes up to its hop, and writes those up to the one before.
    """
    nodes = torch.tensor(batch.num_sampled_nodes).cumsum(0).tolist()
    edges = torch.tensor(batch.num_sampled_edges).cumsum(0).tolist()
    return [(batch.edge_index[:, : edges[hop]], nodes[hop]) for hop in reversed(range(len(edges)))]


class LoaderStep:
    """One training step after the other from a loader: wait for a batch, copy it over, forward, backward, Adam.

    Args:
        loader: yields batches of PyG, seeds first; model: a ``BlockModel``; autocast: dtype or ``None``.
    """

    def __init__(self, loader: Iterable, model: BlockModel, optimizer, device: torch.device, autocast=None):
        self.loader = loader
        self.model, self.optimizer = model, optimizer
        self.device = device
        self.autocast = autocast
        self.batches = self._forever()

    def _forever(self) -> Iterator:
        while True:
            yield from self.loader

    def __call__(self) -> Tensor:
        """Trains on the next batch; the loss."""
        batch = next(self.batches).to(self.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = F.cross_entropy(self.model(batch.x, blocks_of(batch)), batch.y[: batch.batch_size])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def epoch(self, steps: int | None = None) -> None:
        """Trains over the loader once, from its start, or for so many steps."""
        self.batches = iter(self.loader)
        for _ in range(len(self.loader) if steps is None else steps):
            self()
        self.batches = self._forever()

    def close(self) -> None:
        """Ends the workers."""
        self.batches = iter(())
        self.loader = ()


def time_rounds(step: LoaderStep, steps: int, warm_up: int, workers: int, device: torch.device) -> Timing:
    """Milliseconds of wall time per step, loading included, over rounds in which every worker delivers a batch.

    At least three rounds, after as many steps as batches were made ready in advance.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    size = max(1, workers)
    for _ in range(max(warm_up, (PREFETCH + 1) * workers)):
        step()
    times = []
    for _ in range(max(3, steps // size)):
        wait()
        start = time.perf_counter()
        for _ in range(size):
            step()
        wait()
        times.append((time.perf_counter() - start) * 1e3 / size)
    found = Timing.of(times)
    return Timing(found.median, found.p20, found.p80, len(times) * size)
