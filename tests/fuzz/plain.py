"""Programs as a plain PyTorch loop runs them: eager sampler, ``nn.Module``, ``torch.optim``.

Only dropout is told what to draw: the masks that the documentation promises, by call site and by the ids of the rows.
Which set the rows of a tensor are is told by their number: a batch is chosen whose sets differ in size.
"""

import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.graph_api import Block
from joestar.ops.reference import dropout_bits, edge_dropout_bits


class AmbiguousError(Exception):
    """Two sets have as many rows as the operand of a dropout."""


class Masks:
    """While active, dropout draws keyed masks; sites are numbered in the order of the calls.

    Args:
        key: of the step; blocks: of the batch; seeds: its nodes.
        counts: numbers of rows that do not change with the batch (of the whole graph), whose ids are 0, 1, 2 ...
    """

    def __init__(self, key: Tensor, blocks: list[Block], seeds: Tensor, counts: list[int] = ()):
        self.key, self.site = key, 0
        self.sets: dict[int, list[tuple[Tensor, ...]]] = {}
        known = [blocks[-1].graph.ids_of(seeds), *(block.src_ids for block in blocks)]
        for nodes in (*known, *map(torch.arange, counts)):
            self._add(len(nodes), nodes.to(torch.int64))
        for block in blocks:
            self._add_edges(block)
        looped = Block.add_self_loops

        def add_self_loops(block: Block) -> Block:
            made = looped(block)
            self._add_edges(made)
            return made

        self._patches = [mock.patch.object(F, "dropout", self.dropout),
                         mock.patch.object(Block, "add_self_loops", add_self_loops)]  # fmt: skip

    def _add_edges(self, block: Block) -> None:
        self._add(block.num_edges, block.indptr, block.dst_ids.to(torch.int64))

    def _add(self, count: int, *identity: Tensor) -> None:
        known = self.sets.setdefault(count, [])
        if not any(len(other) == len(identity) and all(map(torch.equal, other, identity)) for other in known):
            known.append(identity)

    @property
    def clear(self) -> bool:
        """Whether sizes tell the sets apart."""
        return all(len(found) == 1 for found in self.sets.values())

    def __enter__(self) -> "Masks":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_) -> None:
        for patch in self._patches:
            patch.stop()

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """``F.dropout`` by the mask of this call."""
        if not training or p == 0:
            return x
        site, self.site = self.site, self.site + 1
        found = self.sets.get(x.shape[0], [(torch.arange(x.shape[0]),)])
        if len(found) > 1:
            raise AmbiguousError
        columns = math.prod(x.shape[1:])
        if len(found[0]) == 1:
            bits = dropout_bits(found[0][0], self.key, site, p, columns)
        else:
            indptr, dsts = found[0]
            bits = edge_dropout_bits(indptr, x.shape[0], dsts, self.key, site, p, columns)
        keep = torch.stack([bits[:, c % bits.shape[1]] >> c // bits.shape[1] & 1 for c in range(columns)], 1)
        return torch.where(keep.reshape(x.shape) != 0, x / (1 - p), torch.zeros_like(x))


def forward(subject, seeds: Tensor, key: Tensor) -> Tensor:
    """The loss of a batch.

    Raises:
        AmbiguousError: where a mask is not known.
    """
    graph = subject.graph
    blocks = subject.sampler.sample(graph.keyed(*key.tolist()), seeds)
    x = torch.index_select(graph.ndata["x"], 0, blocks[0].srcs)
    with masks_of(subject, blocks, seeds, key):
        return subject.value(blocks, x, seeds)[0]


def masks_of(subject, blocks: list[Block], seeds: Tensor, key: Tensor) -> Masks:
    """The masks of a batch."""
    whole = [subject.graph.num_nodes, subject.graph.num_edges] if ".graph" in subject.written.body else []
    return Masks(key, blocks, seeds, whole)


def tells_sets_apart(subject, seeds: Tensor, key: Tensor) -> bool:
    """Whether the sets of a batch differ in size."""
    blocks = subject.sampler.sample(subject.graph.keyed(*key.tolist()), seeds)
    return masks_of(subject, blocks, seeds, key).clear
