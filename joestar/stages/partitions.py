"""The partition-based first stage (thesis 5.2.2, Joestar-II): random groups of parts, with halo and hub nodes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from joestar.errors import ConfigError, SamplerError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import to_ids
from joestar.graph_api.validate import check_ids
from joestar.kernels.cpu_partition import part_batch
from joestar.ops.hashing import key_state, row_state
from joestar.partitioning import Partitioning
from joestar.stages.history import check_history
from joestar.stages.hubs import hub_nodes
from joestar.stages.large_batch import check_hot
from joestar.stages.macro import MacroBatch
from joestar.whole_numbers import plain

GROUP_SITE, SEED_SITE, HALO_SITE, AHEAD_SITE = range(1 << 25, (1 << 25) + 4)
"""Call sites, apart from those of samplers and dropout; ahead-of-time sampling takes one per hop, the last ones."""


@dataclass(frozen=True)
class Sizes:
    """How much there is of a macro-batch.

    Attributes:
        nodes, halo, rows, edges: all local nodes; halo nodes among them; nodes with in-edges; edges.
    """

    nodes: int
    halo: int
    rows: int
    edges: int

    def nbytes(self, row: int = 0, history: int = 0) -> int:
        """Bytes to transfer: structure (with global ids of 8 bytes), ``row`` for the features of every node, and
        ``history`` for the historical embeddings of every halo node."""
        return 8 * (self.rows + 1) + 4 * self.edges + (8 + row) * self.nodes + history * self.halo


@dataclass(frozen=True)
class PartitionBatch(MacroBatch):
    """A macro-batch of some parts of a graph.

    Attributes:
        halo: bool ``[n]``: neither in the parts nor a hub, but an in-neighbour of the parts. It has no in-edges here;
            its hidden states come from a history.
        parts: int64 ``[b]``, ascending: the parts.
        inner: bool ``[n]``: in the parts, with in-edges here: nodes whose hidden states are worth keeping.
        number, sees: of the macro-batch in a run, and up to which one pushes count for it (``stages.exchange``).
    """

    halo: Tensor | None = None
    parts: Tensor | None = None
    inner: Tensor | None = None
    number: int | None = None
    sees: int = -1

    @property
    def halo_ids(self) -> Tensor:
        """Global ids of the halo."""
        return self.ids[self.halo]

    @property
    def sizes(self) -> Sizes:
        """How much there is of it."""
        return Sizes(self.num_nodes, int(self.halo.sum()), self.num_rows, self.num_edges)


class Partitions:
    """Macro-batches that are random groups of ``group`` parts: in each epoch every part is in one of them.

    A macro-batch has the nodes of its parts with all their in-edges, so also the halo: in-neighbours in other parts,
    which have no in-edges here. Hubs are in every macro-batch; a hub of another part keeps the in-edges from hubs and
    from nodes of the parts. Its seeds are the training nodes of the parts in random order.

    Everything random depends on (seed, epoch, index) alone.

    Args:
        partitioning: of the graph to train on, or the path of its file.
        group: parts per macro-batch, of every rank if there are several; the last of an epoch may have fewer.
        hubs: nodes to pin: ids ``[n]``, or how many to choose by reverse lazy random walks of ``hub_steps`` steps.
        halo_fanout: most in-edges of a row that come from the halo, chosen at random; ``None``: all.
        ahead: ahead-of-time sampling (thesis 5.2.2): what no seed of the macro-batch can reach is left out. A number of
            hops: everything within them stays. A list of fanouts, from the seeds outwards: picks are made as a
            neighbour sampler makes them for all seeds at once, and mini-batches are sampled among those. ``None``:
            nothing is left out.
        dtype: of the tables of historical embeddings, float32 or bfloat16.
        max_age: hidden rows that were pushed more macro-batches ago are not used; ``None``: no bound.
        hot: nodes that ``compile`` keeps on the device for good, 0 for none; ``None``: as many as fit.
    """

    def __init__(
        self,
        partitioning: Partitioning | str | os.PathLike,
        group: int,
        *,
        hubs: int | Tensor = 0,
        hub_steps: int = 3,
        halo_fanout: int | None = None,
        ahead: int | Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        max_age: int | None = None,
        hot: int | None = None,
    ):
        if isinstance(partitioning, (str, os.PathLike)):
            partitioning = Partitioning.load(partitioning)
        if not isinstance(partitioning, Partitioning):
            raise ConfigError(
                f"Partitions: expected what joestar.partition returned, or the path of its file; got "
                f"{type(partitioning).__name__}."
            )
        group, hubs, hub_steps, halo_fanout = plain([group, hubs, hub_steps, halo_fanout])
        _positive("group", group)
        if group > partitioning.parts:
            raise ConfigError(f"Partitions: group={group} parts of {partitioning.parts}; choose fewer per macro-batch.")
        if halo_fanout is not None:
            _positive("halo_fanout", halo_fanout, least=0)
        self.partitioning = partitioning
        self.group = group
        self.hubs = hubs
        self.hub_steps = hub_steps
        self.halo_fanout = halo_fanout
        self.fanouts = _fanouts(ahead)
        self.hot = check_hot(hot)
        self.dtype, self.max_age = check_history(dtype, max_age)

    def prepare(self, graph: Graph, train: Tensor | None = None) -> "PreparedPartitions":
        """Checks that the parts are this graph's, and sorts its nodes by part.

        Args:
            graph: the whole graph, on the CPU; its arrays may be memory-mapped.
            train: the training nodes, each at most once; ``None``: ``graph.train_idx``.

        Raises:
            DataError: the partitioning is of another graph.
            SamplerError: no training nodes, or training nodes or hubs that are no node ids (a mask is none).
        """
        if graph.device.type != "cpu":
            raise SamplerError(f"a first stage samples on the CPU; the graph is on {graph.device}.")
        self.partitioning.check(graph)
        train = _training_nodes(graph, train)
        if isinstance(self.hubs, int):
            hubs = hub_nodes(graph, self.hubs, self.hub_steps, train) if self.hubs else train.new_empty(0)
        else:
            hubs = _nodes(self.hubs, graph, "hubs")
        return PreparedPartitions(self, graph, train, torch.unique(hubs).to(graph.indices.dtype))

    @property
    def settings(self) -> dict:
        """What macro-batches and their history depend on, besides the parts and hubs."""
        return {
            "group": self.group, "halo_fanout": self.halo_fanout, "fanouts": self.fanouts, "max_age": self.max_age,
            "dtype": self.dtype,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Partitions({self.group} of {self.partitioning.parts} parts)"


class PreparedPartitions:
    """A ``Partitions`` stage for one graph; ``sample`` may be called from several threads.

    Attributes:
        hubs: ids of the pinned nodes, ascending.
        train_of_part: int64 ``[parts]``: training nodes of every part.
    """

    def __init__(self, stage: Partitions, graph: Graph, train: Tensor, hubs: Tensor):
        self.stage, self.graph, self.hubs = stage, graph, hubs
        assignment, parts = stage.partitioning.assignment, stage.partitioning.parts
        self._train = _by_part(train.to(graph.indices.dtype), assignment[train.to(torch.int64)], parts)
        self.train_of_part = self._train[0].diff()

    def trains(self, ids: Tensor) -> Tensor:
        """bool ``[m]``: which nodes are training nodes."""
        marked = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device="cpu")
        marked[self._train[1].to(torch.int64)] = True
        return marked[ids.to(torch.int64)]

    def groups(self, seed: int, epoch: int) -> list[Tensor]:
        """The parts of every macro-batch of an epoch, each ascending; groups without training nodes are left out."""
        return [group for group in self.all_groups(seed, epoch) if int(self.train_of_part[group].sum())]

    def all_groups(self, seed: int, epoch: int, ranks: int = 1) -> list[Tensor]:
        """As ``groups``, with or without training nodes.

        For several ``ranks`` as many groups for each, if there are enough parts, of about as many parts.
        """
        parts = torch.arange(self.stage.partitioning.parts, device="cpu")
        order = _shuffled(parts, (seed, epoch, 0), GROUP_SITE)
        groups = order.split(self.stage.group)
        if ranks > 1:
            groups = order.tensor_split(min(parts.numel(), -(-len(groups) // ranks) * ranks))
        return [group.sort().values for group in groups]

    def seeds(self, seed: int, epoch: int) -> list[Tensor]:
        """Node ids of the seeds of every macro-batch of an epoch, in their order."""
        return [self._seeds(group, (seed, epoch, i)) for i, group in enumerate(self.groups(seed, epoch))]

    @torch.no_grad()
    def sample(self, key: tuple[int, int, int], ahead: bool = True) -> PartitionBatch:
        """Macro-batch ``index`` of the epoch: a pure function of ``key`` = (seed, epoch, index).

        Args:
            ahead: ``False`` leaves ahead-of-time sampling out, to compare sizes.
        """
        groups = self.groups(*key[:2])
        if not 0 <= key[2] < len(groups):
            raise SamplerError(f"macro-batch {key[2]} of epoch {key[1]}: expected one of 0 to {len(groups) - 1}.")
        group = groups[key[2]]
        return self.of(group, self._seeds(group, key), key, ahead)

    @torch.no_grad()
    def of(
        self, group: Tensor, seeds: Tensor, key: tuple[int, int, int], ahead: bool = True, **further
    ) -> PartitionBatch:
        """The macro-batch of these parts.

        Args:
            group: parts, ascending. seeds: ids of nodes of them, in any order, duplicates allowed. further: attributes
                of the ``PartitionBatch``.
        """
        assignment = self.stage.partitioning.assignment
        chosen = torch.zeros(self.stage.partitioning.parts, dtype=torch.int32, device="cpu")
        chosen[group] = 1
        fanouts = self.stage.fanouts if ahead and self.stage.fanouts else []
        halo_fanout = -1 if self.stage.halo_fanout is None else self.stage.halo_fanout
        seeds, ids, indptr, indices, inner, halo = part_batch(
            self.graph.indptr, self.graph.indices, assignment, chosen, self.hubs, seeds.to(self.graph.indices.dtype),
            halo_fanout, HALO_SITE, torch.tensor(key, dtype=torch.int64, device="cpu"), fanouts,
            [AHEAD_SITE + hop for hop in range(len(fanouts))],
        )  # fmt: skip
        return PartitionBatch(seeds, ids, indptr, indices, halo=halo, parts=group, inner=inner, **further)

    def _seeds(self, group: Tensor, key: tuple[int, int, int]) -> Tensor:
        return _shuffled(_pick(self._train, group), key, SEED_SITE)


def _shuffled(ids: Tensor, key: tuple[int, int, int], site: int) -> Tensor:
    """``ids`` in the order of their hashes: depends on the set of ids and the key only."""
    ids = ids.sort().values
    a, b = row_state(key_state(torch.tensor(key, dtype=torch.int64, device="cpu"), site), ids)
    return ids[torch.argsort(((a >> 1) << 31) | (b >> 1), stable=True)]


def _by_part(nodes: Tensor, part: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(offsets int64 ``[parts + 1]``, nodes sorted by part)."""
    offsets = torch.zeros(parts + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(part, minlength=parts), 0, out=offsets[1:])
    return offsets, nodes[torch.argsort(part, stable=True)]


def _pick(by_part: tuple[Tensor, Tensor], group: Tensor) -> Tensor:
    offsets, nodes = by_part
    return torch.cat([nodes[int(offsets[part]) : int(offsets[part + 1])] for part in group.tolist()])


def _training_nodes(graph: Graph, train: Tensor | None) -> Tensor:
    train = graph.train_idx if train is None else train
    train = None if train is None else _nodes(train, graph, "train")
    if train is None or train.numel() == 0:
        raise SamplerError("Partitions: the graph has no training nodes; set graph.train_idx or pass train=.")
    if torch.unique(train).numel() != train.numel():
        raise SamplerError("Partitions: a training node stands twice; an epoch visits each once.")
    return train


def _nodes(ids, graph: Graph, name: str) -> Tensor:
    """Node ids ``[n]``, int32 or int64, on the CPU; raises ``SamplerError`` for what is none, masks too."""
    ids = to_ids(ids, name, SamplerError).cpu()
    if ids.dim() != 1:
        raise SamplerError(f"Partitions: {name} must be node ids [n]; got shape {list(ids.shape)}.")
    check_ids(ids, graph.num_nodes, name, SamplerError)
    return ids


def _positive(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"Partitions: {name} must be a whole number, at least {least}; got {value!r}.")


def _fanouts(ahead: int | Sequence[int] | None) -> list[int] | None:
    """Picks per hop, -1 for all; ``None`` for no ahead-of-time sampling."""
    if ahead is None:
        return None
    ahead = plain(ahead.tolist() if isinstance(ahead, (Tensor, np.ndarray)) else ahead)
    fanouts = [-1] * ahead if isinstance(ahead, int) and not isinstance(ahead, bool) else ahead
    fine = isinstance(fanouts, Sequence) and len(fanouts) > 0
    if not fine or not all(isinstance(f, int) and not isinstance(f, bool) and (f == -1 or f > 0) for f in fanouts):
        raise ConfigError(
            f"Partitions: ahead must be a number of hops, or a list of fanouts (above 0, or -1 for all); got {ahead!r}."
        )
    return list(fanouts)
