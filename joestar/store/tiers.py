"""Where the features of a job with several GPUs should be: on each, or hot rows there and the rest with peers or host.

What a step reads is known from some sampled batches, how much of it is hot from ``hotness``, what that takes from
measured bandwidths. Given how long a step takes whose rows are all near, it says how long one takes in every place:
rows that are not on each GPU are gathered first, in the step itself or, with ``prefetch=True``, beside the one before.
"""

import math
import numbers
from dataclasses import dataclass, replace

import torch

from joestar.distributed import current
from joestar.errors import ConfigError
from joestar.graph_api.row_source import device_of
from joestar.profile.numbers import human_bytes, parse_bytes
from joestar.profile.numbers import seconds as human_seconds
from joestar.store.bandwidth import Speeds, peer_rate, speeds
from joestar.store.hot import HitShares
from joestar.store.sharded import shard_rows
from joestar.store.spread import MARGIN, hotness, sampled_batches
from joestar.whole_numbers import plain

REPLICATE, SHARD, HOST = "replicate", "shard", "host"
NVLINK = 330.0
"""Billions of bytes per second of rows from peers, as measured on H200: for GPUs that are not there."""
BATCHES = 4
"""Batches that are sampled to see how many rows a step reads."""


@dataclass(frozen=True)
class Choice:
    """One place for features.

    Attributes:
        place: ``replicate``, ``shard`` or ``host``. bytes: of every GPU, with hot rows; hot: rows held by every GPU.
        share: of the rows read that are hot. seconds: that a step reads rows; infinite if it does not fit.
    """

    place: str
    bytes: int
    hot: int
    share: float
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.seconds < float("inf")


@dataclass(frozen=True)
class FeaturePlan:
    """What is possible, and what is best; ``print(plan)`` says it.

    Attributes:
        choices: in the order replicate, shard, host; best: that with the shortest reading.
        table, row: bytes of all features and of a row; rows: that a step of a rank reads; world, room: GPUs, and bytes
            of each for features. rates: billions of bytes per second of device, peers and host. computing: seconds of
            a step whose rows are all on its GPU; 0 if nobody said.
    """

    choices: tuple[Choice, ...]
    best: Choice
    table: int
    row: int
    rows: float
    world: int
    room: int
    rates: tuple[float, float, float]
    computing: float = 0.0

    def step(self, choice: Choice) -> float:
        """Seconds that a step is expected to take with a choice; infinite if it does not fit."""
        if choice.place == REPLICATE:
            return self.computing if choice.fits else choice.seconds
        return self.computing + choice.seconds

    def step_ahead(self, choice: Choice) -> float:
        """The same with ``prefetch=True``, at least: sampling, for which rows wait, comes on top of the reading."""
        return self.step(choice) if choice.place == REPLICATE else max(self.computing, choice.seconds)

    def _step(self, choice: Choice) -> str:
        if not self.computing or not choice.fits:
            return ""
        ahead = f", at least {human_seconds(self.step_ahead(choice))} with prefetch=True"
        return f", a step in about {human_seconds(self.step(choice))}" + ahead * (choice.place != REPLICATE)

    def __str__(self) -> str:
        device, peers, host = self.rates
        lines = [
            f"features of {human_bytes(self.table)}, {self.world} GPUs with {human_bytes(self.room)} each for them; a "
            f"step of a rank reads {self.rows:,.0f} rows of {self.row:,} bytes ({human_bytes(self.rows * self.row)}), "
            f"from the device at {device:,.0f} GB/s, from peers at {peers:,.0f}, from the host at {host:,.0f}:"
        ]
        for choice in self.choices:
            mark = "->" if choice is self.best else "  "
            lines.append(f"{mark} {_SAID[choice.place]}: {_cost(choice)}{self._step(choice)}")
        return "\n".join(lines)


_SAID = {
    REPLICATE: "all rows on every GPU (graph.to(device))",
    SHARD: "hot rows on every GPU, the rest over peers (joestar.store.shard)",
    HOST: "hot rows on every GPU, the rest in host memory (joestar.store.shard, place='host')",
}


def _cost(choice: Choice) -> str:
    if not choice.fits:
        return f"does not fit, {human_bytes(choice.bytes)} per GPU"
    hot = "" if choice.place == REPLICATE else f", {choice.hot:,} rows hot, {choice.share:.0%} of what is read"
    return f"{human_bytes(choice.bytes)} per GPU{hot}; rows of a step in about {human_seconds(choice.seconds)}"


def plan_features(
    graph, sampler, batch_size: int = 1000, room: int | str | None = None, *, name: str = "x", world: int | None = None,
    rates: Speeds | None = None, peers: float | None = None, computing: float = 0.0,
) -> FeaturePlan:  # fmt: skip
    """Plans where ``graph.ndata[name]`` should be; all ranks of a job call it.

    Args:
        graph: features where they are now, structure where sampling works. sampler: of it.
        batch_size: seeds of a step and rank. room: bytes of each GPU for features, or a text such as ``"40GiB"``; by
            default what is free now.
        world: number of GPUs, by default ranks of this job. rates, peers: bandwidths; by default measured now, once for
            a machine; that of peers, in a process that is alone, is taken to be ``NVLINK``.
        computing: seconds of a step whose rows are all on its GPU, as ``joestar bench step`` measures: with it the plan
            says how long a step takes.

    Raises:
        ConfigError: for no features, or an unusable argument.
    """
    if name not in graph.ndata:
        raise ConfigError(
            f"plan_features: graph.ndata has no {name!r}; there is: {', '.join(graph.ndata) or 'nothing'}."
        )
    _check_numbers(batch_size=batch_size, world=world, peers=peers, computing=computing)
    x, group = graph.ndata[name], current()
    device = torch.device("cpu") if device_of(graph.ndata, name).type == "cpu" else device_of(graph.ndata, name)
    device = device if group is None else group.device
    world = world or (1 if group is None else group.world)
    row = max(1, x[:1].numel() * x.element_size())
    free = _free(device) if room is None else parse_bytes(room, "room")
    rates = speeds(device, row) if rates is None else rates
    near, host = rates.device, rates.zero_copy
    if peers is None:
        peers = min(near / 2, NVLINK) if group is None else peer_rate(group, row)
    if group is not None:  # all ranks must come to the same choice
        met = group.exchange("joestar.store.plan_features", {"all": [free, near, peers, host]})
        free, near, peers, host = (min(column) for column in zip(*(each["all"] for each in met), strict=True))
    batches = [ids.cpu() for ids in sampled_batches(sampler, batch_size, BATCHES)]
    rows = sum(ids.numel() for ids in batches) / len(batches)
    hits = HitShares(hotness(sampler, batch_size).cpu(), batches)  # which needs sums in a fixed order
    return replace(_planned(x.shape[0], row, rows, hits, world, free, (near, peers, host)), computing=computing)


def _check_numbers(**given) -> None:
    """Numbers of seeds and GPUs from 1 on, a rate above 0, seconds from 0 on; ``None`` where there is a default."""
    whole = {"batch_size", "world"}
    for name, value in given.items():
        value = plain(value)
        if value is None and name in ("world", "peers"):
            continue
        right = isinstance(value, int if name in whole else numbers.Real) and not isinstance(value, bool)
        if right and math.isfinite(value) and (value >= 0 if name == "computing" else value > 0):
            continue
        expected = "a positive whole number" if name in whole else "billions of bytes per second, more than 0"
        expected = "seconds, 0 or more" if name == "computing" else expected
        raise ConfigError(f"plan_features: {name} must be {expected}; got {value!r}.")


def _free(device: torch.device) -> int:
    from joestar.store.pinned import free_host_bytes

    return torch.cuda.mem_get_info(device)[0] - MARGIN if device.type == "cuda" else free_host_bytes() or 0


def _planned(
    nodes: int, row: int, rows: float, hits: HitShares, world: int, room: int, rates: tuple[float, float, float]
) -> FeaturePlan:
    device, peers, host = (rate * 1e9 for rate in rates)
    read = rows * row
    near = 2 / device  # a row is read and written

    def chosen(place: str, base: int, far: float) -> Choice:
        """With as many hot rows as there is room for beside ``base`` bytes; ``far``: seconds of a byte that is not."""
        left = room - base
        hot = min(nodes, max(0, left - 4 * nodes) // row)
        share = hits(hot)
        taken = base + (hot * row + 4 * nodes if hot else 0)
        return Choice(
            place, taken, hot, share, read * (share * near + (1 - share) * far) if left >= 0 else float("inf")
        )

    whole = Choice(REPLICATE, nodes * row, nodes, 1.0, read * near if nodes * row <= room else float("inf"))
    part = shard_rows(nodes, world) * row
    away = (world - 1) / world / peers + near / world if world > 1 else float("inf")
    choices = (whole, chosen(SHARD, part, away), chosen(HOST, 0, 1 / host))
    best = whole if whole.fits else min(choices, key=lambda choice: choice.seconds)
    return FeaturePlan(choices, best, nodes * row, row, rows, world, room, rates)
