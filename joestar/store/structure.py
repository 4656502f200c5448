"""A graph whose edges are not where its samplers run, which read them in place: in the host's memory, or over all GPUs.

Offsets are on every device: a sampler reads two of them per row, the first thing it waits for. Edges, and the data of
edges, keep one range of addresses (``distributed/address_range.py``), of which every GPU holds a part, cut anywhere: no
kernel, pass or sampler knows of parts, and a row may lie on two GPUs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.distributed import Group, current
from joestar.distributed.address_range import GRANULE
from joestar.distributed.facts import digest, graph_facts
from joestar.distributed.peer_memory import (
    NoPeerAccessError,
    attempt,
    check_one_host,
    joined_memory,
    shared_pages,
)
from joestar.errors import ConfigError, DataError, DistributedError, say
from joestar.graph_api.arrays import SPLITS
from joestar.graph_api.frame import Frame
from joestar.graph_api.graph import Graph
from joestar.graph_api.row_source import source_of
from joestar.locks import synchronize
from joestar.profile.numbers import human_bytes
from joestar.store.pinned import Pinned, copy_parts, free_host_bytes, pin, resolved

WHAT = "joestar.store.shard_structure"
PAGE = 4096
"""Bytes: what ranks fill of host memory are multiples of it."""
MARGIN = 64 << 20
"""Bytes of a device that stay free beside its part."""
SAMPLE = 1 << 12
"""Entries that every rank reads back, from all parts."""


def with_pinned_structure(graph: Graph, device: torch.device | str | None = None) -> Graph:
    """The graph for programs of ``device``, edges in page-locked host memory; offsets, data and splits move to it.

    Sampling reads single edges, so the bus carries a sector of 32 bytes for each; features are what takes room and
    time, and have stores of their own (``FeatureStore``). Edge data stay beside the edges.

    Args:
        graph: on the CPU. device: by default the current GPU if there is one; on the CPU the graph's memory is shared.

    Raises:
        DataError: where the pages cannot be locked.
    """
    device = resolved(device)
    return _with_edges(graph, device, lambda name, value: pin(value, device).view)


def shard_structure(graph: Graph, *, place: str | None = None, device: torch.device | str | None = None) -> Graph:
    """The graph with its edges over the GPUs of this host: ``graph = joestar.store.shard_structure(graph)``.

    All ranks call it, each with the whole graph, best one that is mapped from a folder: a rank reads its part of the
    edges, and of all edge data. Offsets, node data and splits go to every GPU; features of ``joestar.store.shard`` stay
    where they are. Samples, losses, weights and predictions are those of ``graph.to(device)``, bit for bit. Where GPUs
    do not reach one another's memory, edges stay in page-locked host memory, once for all ranks, with a warning. On
    CPUs the ranks share their pages. A process that is alone puts the graph on the device or, where its edges do not
    fit, these into page-locked host memory.

    Args:
        place: ``"peers"``: the ranks' memories, or an error; ``"host"``: page-locked host memory, once for all ranks;
            ``None``: peers, or the host where GPUs do not reach one another.
        device: of a process that is alone; ranks have theirs.

    Raises:
        ConfigError: on all ranks, if they are on several hosts, or if the parts do not fit; with numbers.
        DistributedError: if ranks call it with different graphs, or one of them fails.
    """
    if place not in (None, "peers", "host"):
        raise ConfigError(f"place must be 'peers', 'host' or None; got {place!r}.")
    graph._check_whole("shard_structure")
    group = current()
    if group is None:
        return _alone(graph, resolved(device), place)
    with group.board.at(WHAT, long=True):
        group.agree(WHAT, graph_facts(graph) | {"place": str(place)})
        check_one_host(group, WHAT)
        spread = _Spread(group, place)
        spread.check_room([graph.indices, *graph.edata.values()], graph.indptr.nbytes)
        return _with_edges(graph, group.device, spread)


def edge_bytes(graph: Graph) -> int:
    """Bytes of a graph's edges and of all edge data."""
    return graph.indices.nbytes + sum(value.nbytes for value in graph.edata.values())


def part_bytes(nbytes: int, world: int, granule: int = GRANULE) -> int:
    """Bytes of every rank's part of a tensor of so many; the last parts may be smaller, or empty."""
    return max(1, -(-nbytes // (world * granule))) * granule


def _with_edges(graph: Graph, device: torch.device, place) -> Graph:
    """The graph on ``device``, but edges and their data where ``place(name, tensor)`` puts them."""
    moved = Graph(graph.indptr.to(device), place("edges", graph.indices))
    moved.ndata = Frame("ndata", "nodes", graph.num_nodes)
    for name, value in graph.ndata.items():
        far = source_of(graph.ndata, name)
        moved.ndata[name] = (value if far is None else far).to(device)
    moved.edata = Frame("edata", "edges", graph.num_edges)
    for name, value in graph.edata.items():
        moved.edata[name] = place(f"edata[{name!r}]", value)
    moved = graph._describe(moved)
    moved.ids = None if graph.ids is None else graph.ids.to(device)
    moved.whole_degrees = None if graph.whole_degrees is None else graph.whole_degrees.to(device)
    for name in SPLITS:
        split = getattr(graph, name)
        setattr(moved, name, None if split is None else split.to(device))
    return moved


def _alone(graph: Graph, device: torch.device, place: str | None) -> Graph:
    there, needed = graph.device.type == device.type, edge_bytes(graph)
    fits = there or needed + graph.indptr.nbytes + MARGIN <= _free(device)
    if device.type == "cpu" or (fits and place != "host"):
        return graph.to(device)
    if not fits:
        text = f"edges of {human_bytes(needed)} do not fit on {device}, which has {human_bytes(_free(device))} free"
        if place == "peers":
            raise ConfigError(f"{text}, and there is one process.")
        if place is None:
            say(f"{text}, and there is one process: they stay in page-locked host memory.")
    return with_pinned_structure(graph.to("cpu"), device)


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


@dataclass
class _Spread:
    """Puts tensors over the memories of all ranks, or once into the host's, one after the other."""

    group: Group
    place: str | None

    @property
    def granule(self) -> int:
        """What parts are multiples of."""
        return PAGE if self.on_host else GRANULE

    @property
    def on_host(self) -> bool:
        """Whether all is in host memory; also once GPUs were found not to reach one another's."""
        return self.group.device.type == "cpu" or self.place == "host"

    def check_room(self, tensors: list[Tensor], beside: int) -> None:
        """Refuses on all ranks what does not fit on one."""
        world, on_gpus = self.group.world, self.group.device.type == "cuda"
        if self.on_host:
            self._check_host(sum(tensor.nbytes for tensor in tensors))
        needed = beside + (0 if self.on_host else sum(part_bytes(tensor.nbytes, world) for tensor in tensors))
        free = _free(self.group.device) if on_gpus else None
        for rank, each in enumerate(self.group.exchange(f"{WHAT}, room", {"free": free})):
            if each["free"] is not None and needed + MARGIN > each["free"]:
                raise ConfigError(
                    f"the structure does not fit over {world} GPUs: each needs {human_bytes(needed)} for offsets and "
                    f"its part of the edges, and rank {rank} has {human_bytes(each['free'])} free. Take more GPUs, "
                    "place='host', or joestar.compile(memory=...)."
                )

    def _check_host(self, needed: int) -> None:
        free = self.group.exchange(f"{WHAT}, room on the host", {"free": free_host_bytes()})[0]["free"]
        if free is not None and needed > free:
            raise ConfigError(
                f"edges of {human_bytes(needed)} do not fit into host memory once more: {human_bytes(free)} are free. "
                "joestar.compile(memory=...) reads them where they are."
            )

    def __call__(self, name: str, source: Tensor) -> Tensor:
        """The tensor as this rank's device reads it; every rank has loaded its part."""
        if not source.numel():
            return source.to(self.group.device)
        whole = None if self.on_host else self._over_devices(source)
        if whole is None:
            (whole,) = shared_pages(self.group, [source.shape, *[None] * (self.group.world - 1)], source.dtype, WHAT)
        attempt(self.group, f"{WHAT} (loading {name})", lambda: self._load(source, whole))
        if whole.device != self.group.device:
            whole = attempt(self.group, f"{WHAT} (locking)", lambda: Pinned(whole, self.group.device).view)
        attempt(self.group, f"{WHAT} (reading {name})", lambda: _check_same(source, whole))
        return whole

    def _over_devices(self, source: Tensor) -> Tensor | None:
        size = part_bytes(source.nbytes, self.group.world)
        try:
            return joined_memory(self.group, source.shape, source.dtype, size, WHAT)
        except NoPeerAccessError as error:
            reason = str(error)
        if self.place == "peers":
            raise DistributedError(f"GPUs do not read one another's memory: {reason}")
        self.place = "host"
        self._check_host(source.nbytes)
        if self.group.rank == 0:
            say(
                f"GPUs do not read one another's memory ({reason}): edges stay in page-locked host memory, once for "
                "all ranks, and cross the bus."
            )
        return None

    def _load(self, source: Tensor, whole: Tensor) -> None:
        """Copies this rank's part, which may be empty, also from a mapped file."""
        size = part_bytes(source.nbytes, self.group.world, self.granule) // source.element_size()
        first, last = (min(source.numel(), rank * size) for rank in (self.group.rank, self.group.rank + 1))
        with torch.no_grad():
            copy_parts(source.detach().reshape(-1)[first:last], whole.view(-1)[first:last])
        if whole.is_cuda:
            synchronize(whole.device)  # the others may read once all have come to the next meeting


def _check_same(source: Tensor, whole: Tensor) -> None:
    """Some entries of all parts, read by the device that will read them."""
    if digest(source, SAMPLE) != digest(whole, SAMPLE):
        raise DataError("what is read from the parts of all ranks is not what they loaded.")
