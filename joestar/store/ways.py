"""Which parts of a graph every GPU of a job holds, and which are dealt out: the first way in which all fits.

Bytes alone decide: what is read from a GPU's own memory is never slower than what is not. How long the reading of
features takes in each place says ``plan_features``.
"""

from dataclasses import dataclass

import torch

from joestar.distributed import current
from joestar.errors import ConfigError
from joestar.graph_api.frame import Frame
from joestar.graph_api.graph import Graph
from joestar.graph_api.row_source import RowSource, source_of
from joestar.profile.numbers import human_bytes, parse_bytes
from joestar.store.pinned import free_host_bytes, resolved
from joestar.store.sharded import shard_rows
from joestar.store.spread import shard
from joestar.store.structure import part_bytes, shard_structure

REPLICATE, FEATURES, STRUCTURE, HOST = "replicate", "features", "structure", "host"
_SAID = {
    REPLICATE: "everything on every GPU",
    FEATURES: "features over the GPUs",
    STRUCTURE: "features and edges over the GPUs",
    HOST: "features and edges in host memory, once",
}
GIVEN = 0.75
"""Share of a device's free memory that the graph may take by default: the rest is for steps."""


@dataclass(frozen=True)
class Way:
    """One way to place a graph.

    Attributes:
        place: ``replicate``, ``features``, ``structure`` or ``host``. parts: bytes of every GPU by what they hold.
        left: bytes of a GPU that remain, for hot rows; negative if it does not fit.
    """

    place: str
    parts: dict[str, int]
    left: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.left >= 0

    @property
    def bytes(self) -> int:
        """Of every GPU."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in self.parts.items() if value)
        room = f"{human_bytes(self.left)} left" if self.fits else "does not fit"
        if self.fits and self.place != REPLICATE:
            room += " for hot rows"
        return f"{_SAID[self.place]}: {human_bytes(self.bytes)} per GPU ({parts}); {room}"


@dataclass(frozen=True)
class GraphPlan:
    """What is possible; ``print(plan)`` says it, ``plan.apply(graph)`` does the first that fits.

    Attributes:
        ways: in the order of preference; world: GPUs; room: bytes of each for the graph and what is beside it.
    """

    ways: tuple[Way, ...]
    world: int
    room: int

    @property
    def room_for_features(self) -> int:
        """Bytes of a GPU that features may take where edges are on each; negative if not even these fit."""
        way = next((way for way in self.ways if way.place == FEATURES), self.ways[0])
        return way.left + way.parts["features"]

    @property
    def best(self) -> Way | None:
        """The first way in which all fits; ``None``: the graph has to come in parts (``compile(memory=...)``)."""
        return next((way for way in self.ways if way.fits), None)

    def __str__(self) -> str:
        lines = [f"on {self.world} GPU{'s' * (self.world > 1)}, {human_bytes(self.room)} of each:"]
        lines += [f"{'->' if way is self.best else '  '} {way}" for way in self.ways]
        if self.best is None:
            lines.append("-> in macro-batches: joestar.compile(memory=...), joestar train --memory")
        return "\n".join(lines)

    def apply(self, graph: Graph, hot: int | str | None = None, device: torch.device | str | None = None) -> Graph:
        """The graph where the plan says; all ranks of a job call it.

        Args:
            hot: bytes of every GPU, or a text, for rows of features that batches need most often, where these are not
                on each anyway; by default what is left.
            device: of a process that is alone; ranks have theirs.

        Raises:
            ConfigError: if nothing fits; with the numbers.
        """
        group, way = current(), self.best
        if way is None:
            raise ConfigError(f"the graph does not fit:\n{self}")
        device = group.device if group is not None else resolved(device)
        if way.place == REPLICATE:
            return graph.to(device)
        place = "host" if way.place == HOST else None
        wants = way.left if hot is None else hot
        if "x" in graph.ndata and source_of(graph.ndata, "x") is None:
            graph = _with_features(graph, shard(graph.ndata["x"], wants or None, place=place, device=device))
        return graph.to(device) if way.place == FEATURES else shard_structure(graph, place=place, device=device)


def plan_graph(graph: Graph, world: int | None = None, room: int | str | None = None, beside: int = 0) -> GraphPlan:
    """Plans what of a graph every GPU holds; all ranks of a job call it.

    Args:
        graph: where it is now. world: number of GPUs, by default ranks of this job.
        room: bytes of each GPU, or a text such as ``"40GiB"``; by default three quarters of what is free on that which
            has the least.
        beside: bytes of each that something else takes, such as a step.

    Raises:
        ConfigError: for an unusable argument.
    """
    group = current()
    world = world or (1 if group is None else group.world)
    free = _room() if room is None else parse_bytes(room, "room")
    one_host = group is None or len(set(group.hosts)) == 1
    if group is not None:
        met = group.exchange("joestar.store.plan_graph", {"room": free, "beside": beside})
        free, beside = min(each["room"] for each in met), max(each["beside"] for each in met)
    shared = [FEATURES, STRUCTURE] if world > 1 else []
    places = [REPLICATE, *shared, HOST] if one_host else [REPLICATE]
    ways = []
    for place in places:
        parts = _parts(graph, world, place) | ({"step": beside} if beside else {})
        ways.append(Way(place, parts, free - sum(parts.values())))
    return GraphPlan(tuple(ways), world, free)


def _parts(graph: Graph, world: int, place: str) -> dict[str, int]:
    """Bytes of every GPU."""
    rows = {name: value[:1].numel() * value.element_size() for name, value in graph.ndata.items()}
    nodes, row = graph.num_nodes, rows.pop("x", 0)
    row = row if source_of(graph.ndata, "x") is None else 0  # they have their place already
    edges = [graph.indices.nbytes, *(value.nbytes for value in graph.edata.values())]
    dealt_out = sum(part_bytes(each, world) for each in edges if each)
    return {
        "offsets": graph.indptr.nbytes,
        "edges": {STRUCTURE: dealt_out, HOST: 0}.get(place, sum(edges)),
        "features": {REPLICATE: nodes * row, HOST: 0}.get(place, shard_rows(nodes, world) * row),
        "other node data": nodes * sum(rows.values()),
    }


def _room() -> int:
    group = current()
    if (group is None and torch.cuda.is_available()) or (group is not None and group.device.type == "cuda"):
        return int(GIVEN * torch.cuda.mem_get_info(None if group is None else group.device)[0])
    return int(GIVEN * (free_host_bytes() or 0)) // (1 if group is None else group.place.local_world)


def _with_features(graph: Graph, source: RowSource) -> Graph:
    """The graph with its features elsewhere; the one that was given keeps them."""
    other = Graph(graph.indptr, graph.indices)
    sources = getattr(graph.ndata, "sources", {})
    other.ndata = Frame("ndata", "nodes", graph.num_nodes, {**graph.ndata, **sources, "x": source})
    other.edata = graph.edata
    other = graph._describe(other)
    other.whole_degrees = graph.whole_degrees
    return other
