"""Partitioning in C++: checks, and one call into the kernels."""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, require
from joestar.kernels.cpu_stages import fresh, written

BLOCK = 8192
"""Nodes whose neighbours all threads count together; no matter for the result."""


class GapStream:
    """A stream of nodes being placed into parts (thesis 4.3.2, algorithm 2).

    Args:
        indptr, indices: in-neighbours: int64 ``[N + 1]``, int32 or int64 ``[E]``; maps of files are read in place.
        labels: int32 ``[N]``: class ids of the training nodes in ``[0, num_labels)``, -1 elsewhere; ``None``: all -1.
        assignment: int32 ``[N]``: the part of every node so far, -1 for none; written in place.
        cap: most nodes that a part may have; ``parts * cap >= N``.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, labels: Tensor | None, num_labels: int, assignment: Tensor, parts: int,
        cap: int, block: int = BLOCK,
    ):  # fmt: skip
        indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
        nodes = indptr.numel() - 1
        _check_assignment(assignment, nodes, -1, parts)
        require(1 <= parts <= 2**30 and 1 <= cap < 2**31, "1 <= parts <= 2^30 and 1 <= cap < 2^31", f"{parts}, {cap}")
        require(parts * cap >= nodes, f"parts * cap >= {nodes} nodes", f"{parts} * {cap}")
        if labels is not None:
            _check_column(labels, nodes, "labels")
            require(nodes == 0 or int(labels.max()) < num_labels, f"labels below {num_labels}", "larger ones")
        self._kept = indptr, indices, labels, assignment
        self._stream = _native.GapStream(
            indptr, indices, labels, assignment, parts, num_labels if labels is not None else 0, cap, block
        )
        self.num_nodes = nodes

    def place(self, first: int, last: int, strength: float) -> int:
        """Places the nodes ``[first, last)``; returns how many changed their part.

        ``strength``: the cost of a part whose share of the node's label is even, in neighbours.
        """
        require(0 <= first <= last <= self.num_nodes, f"0 <= first <= last <= {self.num_nodes}", f"{first}, {last}")
        return self._stream.place(first, last, float(strength))


def part_facts(indptr: Tensor, indices: Tensor, assignment: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Of every part, int64 ``[parts]``: in-edges from other parts, and the different nodes that they come from."""
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    _check_assignment(assignment, indptr.numel() - 1, 0, parts)
    cut, halo = (torch.zeros(parts, dtype=torch.int64, device="cpu") for _ in range(2))
    _native.part_facts(indptr, indices, assignment.contiguous(), cut, halo)
    return cut, halo


def part_batch(
    indptr: Tensor, indices: Tensor, assignment: Tensor, chosen: Tensor, hubs: Tensor, seeds: Tensor,
    halo_fanout: int, halo_site: int, key: Tensor, fanouts: list[int], sites: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The macro-batch of the chosen parts: (local ids of the seeds, ids, indptr, indices) of a ``MacroBatch``, and
    (inner, halo), bool ``[n]``, of a ``PartitionBatch``.

    Args:
        assignment: int32 ``[N]``; chosen: int32 ``[parts]``, 1 for the parts whose nodes are members, else 0.
        hubs, seeds: ids in the dtype of ``indices``, which the caller has checked; seeds are members or hubs.
        halo_fanout: most in-edges of a member that come from neither members nor hubs; -1: all.
        fanouts: of ahead-of-time sampling, from the seeds outwards; empty: every row is kept whole.
        sites: call site of every hop's draws, with key int64 ``[3]``.
    """
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    hubs, seeds = check_ids(hubs, "hubs"), check_ids(seeds, "seeds")
    require(indices.dtype == hubs.dtype == seeds.dtype, f"ids of {indices.dtype}", f"{hubs.dtype} and {seeds.dtype}")
    _check_column(assignment, indptr.numel() - 1, "assignment")
    _check_column(chosen, chosen.numel(), "chosen")
    parts = _native.part_batch(
        indptr, indices, assignment, chosen, hubs, seeds, halo_fanout, halo_site, key.contiguous(), fanouts, sites
    )
    seeds, ids, indptr, indices, _ = written(parts, seeds, False)
    inner, halo = (fresh(ids.numel(), torch.bool) for _ in range(2))
    parts.mark(ids, indptr.numel() - 1, inner.view(torch.uint8), halo.view(torch.uint8))
    return seeds, ids, indptr, indices, inner, halo


def _check_column(values: Tensor, nodes: int, name: str) -> None:
    fits = values.dtype == torch.int32 and values.is_cpu and values.is_contiguous() and values.shape == (nodes,)
    require(fits, f"{name} int32 [{nodes}], contiguous on the CPU", f"{values.dtype} {list(values.shape)}")


def _check_assignment(assignment: Tensor, nodes: int, least: int, parts: int) -> None:
    _check_column(assignment, nodes, "assignment")
    if nodes:
        low, high = (int(value) for value in torch.aminmax(assignment))
        require(least <= low and high < parts, f"parts in [{least}, {parts})", f"{low} to {high}")
