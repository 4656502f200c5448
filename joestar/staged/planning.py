"""``joestar.compile(memory=...)``: what goes where is planned, and the arena filled, before a step is made of them."""

import copy
import functools
import time

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.profile.numbers import human_bytes
from joestar.profile.sizes import measure, step_key
from joestar.runtime.seeds import shuffled, spread_nodes
from joestar.staged.draws import Draws, draws_of
from joestar.staged.heaviest import heaviest_steps
from joestar.staged.host_memory import UNDER_WAY, copied_bytes, settle_host
from joestar.staged.several import PlanningRanks
from joestar.stages import LargeBatch
from joestar.stages.arena import Arena, Source
from joestar.stages.device_slots import DeviceSlots, keeps_book
from joestar.stages.large_batch import Recycled, drawn, has_fast_way, in_huge_pages
from joestar.stages.loading_time import seconds_per_load
from joestar.stages.macro import nodes_of
from joestar.stages.plan import (
    COUNTED,
    FEW_COUNTED,
    PARTS,
    SMALL,
    Costs,
    Look,
    Plan,
    Speeds,
    choose,
    least,
    listed,
    shortest,
)
from joestar.store import bandwidth, pin
from joestar.store.hot import blend, count_needed, inclusion_probabilities

NARROW = 16
"""Bytes: node tensors whose rows are no longer are kept on the device, as small as their values allow."""
STEP_SECONDS = {"cuda": 1.5e-4, "cpu": 2e-3}
"""Of a step that moves next to nothing."""
PASSES = 11.0
"""How often a step moves hidden rows of the nodes that have edges, forward and backward; rows of features are read
once, by each of the outermost edges. Between steps of SAGE on papers100M (fanouts 15,10,5 and 30,30,30) and mag240m-c,
on an H100."""
LIBRARIES = {"cuda": 384 << 20, "cpu": 0}
"""Bytes that workspaces of libraries take, and what an allocator cannot use of what it has."""
CLAIMS = {"cuda": 8, "cpu": 0}
"""Bytes per node of the tables of claims (``kernels.gpu_compact``): a CUDA graph's, and that of what runs before it."""
PLANNING = -2
"""Epoch of the keys under which macro-batches are sampled for the plan."""


class Planner:
    """Plans the memory of one device for a model and a sampler.

    Args:
        model: its parameters are on the device. sampler: of a graph on the CPU. budget: bytes of the device.
        seeds: ids that epochs go over; batch: seeds of a step. autocast: dtype, or ``None``.
        first_stage: fixes the size of macro-batches, or how many nodes are hot; ``None``: the plan chooses.
        reuse: whether rows of earlier macro-batches are found again (``stages.slots``).
        own_book: whether the device keeps the book of slots; by default if it ``keeps_book``.
        ranks: several processes that plan together, each for its own device and its share of the seeds.
        prefetch: whether the batch of the next step is made beside each (``compile(prefetch=True)``), where all fits.
    """

    def __init__(self, model, sampler, budget: int, seeds: Tensor | None = None, batch: int = 1000,
                 autocast: torch.dtype | None = None, first_stage: LargeBatch | None = None,
                 speeds: Speeds | None = None, reuse: bool = True, own_book: bool | None = None,
                 ranks: PlanningRanks | None = None, prefetch: bool = False):  # fmt: skip
        self.model, self.sampler, self.budget = model, sampler, budget
        self.graph: Graph = sampler.graph
        self.device = next((p.device for p in model.parameters()), self.graph.device)
        self.seed = int(getattr(sampler, "seed", 0))
        self.first_stage, self.autocast, self.reuse, self.prefetch = first_stage, autocast, reuse, prefetch
        self.own_book = keeps_book(self.device) if own_book is None else own_book
        if speeds is not None:
            self.speeds = speeds
        given = self.graph.train_idx if seeds is None else seeds
        if given is None or not given.numel():
            given = spread_nodes(self.graph.num_nodes, self.graph, self.seed, 0)
        self.ranks = ranks
        self.every = self.seeds = shuffled(given.to(self.graph.indices.dtype), self.seed, 0)
        if ranks is not None:
            self.seeds = ranks.share(self.every)
        self.batch = min(batch, self.seeds.numel())
        key = step_key(self.seed, 0, 0, self.graph.device)
        self.sizes = measure(sampler, self.graph, self.every[: self.batch], key)  # the same on all ranks

    def _measured(self, fits: bool = False) -> Speeds:
        """``fits``: nothing will be loaded."""
        x = self.graph.ndata.get("x")
        row = 512 if x is None else max(16, x[:1].numel() * x.element_size())
        found = bandwidth.speeds(self.device, row)
        products = products_per_second() if self.device.type == "cpu" else Speeds.products
        load = (
            0.0
            if fits
            else seconds_per_load(self.graph, self.sampler, self.seeds, self.device, self.own_book, self.reuse)
        )
        sparse = tuple((float(every), rate * 1e9) for every, rate in found.sparse.items())
        step = STEP_SECONDS[self.device.type]
        return Speeds(found.zero_copy * 1e9, found.device * 1e9, step, products, load, sparse)

    @functools.cached_property
    def speeds(self) -> Speeds:
        """Of this machine, measured when somebody asks."""
        return self._measured()

    @functools.cached_property
    def draws(self) -> Draws:
        """What the sampler draws."""
        return draws_of(self.sampler, self.every[: self.batch])

    @functools.cached_property
    def repeats(self) -> bool:
        """Whether steps repeat the first stage's draws."""
        return self.draws.repeated and (self.first_stage is None or self.first_stage.repeats)

    def tell(self, stage: LargeBatch) -> None:
        """Tells a first stage so: its macro-batches have to say which edges they hold."""
        stage.eids, stage.races = self.repeats or None, self.repeats

    # --- what things take ---

    def row_dtype(self, name: str, value: Tensor) -> torch.dtype:
        """Dtype of a node tensor in the arena: features in that of the model, but 16 bits stay so under autocast."""
        if name != "x" or (self.autocast is not None and value.dtype in (torch.float16, torch.bfloat16)):
            return value.dtype
        found = {p.dtype for p in self.model.parameters() if p.dtype.is_floating_point}
        return found.pop() if len(found) == 1 else value.dtype

    def workspace(self) -> int:
        """Bytes that a step takes besides the arena: values and gradients of its hops, parameters, libraries."""
        width = max((max(p.shape) if p.dim() > 1 else 1 for p in self.model.parameters()), default=1)
        width = max(width, max((v[:1].numel() for v in self.graph.ndata.values()), default=1) // 2)
        sizes, labels = self.sizes
        inner = sum(self._inner())
        edges = sum(size for size, label in zip(sizes, labels, strict=True) if label != "compact")
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())
        values = 4 * width * inner * 5 + 16 * edges + 4 * parameters
        return int(values * 1.2) + LIBRARIES.get(self.device.type, 0)

    def ahead(self) -> int:
        """Bytes that a step takes more where the batch of the next one is made beside it: one more batch's structure,
        and rows of features for both, those that are gathered or the first aggregation's."""
        sizes, labels = self.sizes
        nodes = [size for size, label in zip(sizes, labels, strict=True) if label == "compact"]
        x = self.graph.ndata.get("x")
        row = 0 if x is None else x[:1].numel() * _size(self.row_dtype("x", x))
        hops = [self.batch, *nodes]
        rows = max(hops[-1], 2 * hops[-2]) if nodes else 2 * self.batch
        return int(1.2 * (16 * (self.batch + sum(sizes)) + 2 * row * rows))

    def resident(self) -> dict[str, int]:
        """Bytes by what they hold, if everything is on the device."""
        graph, index = self.graph, self.graph.indices.element_size()
        rows = {n: v.shape[0] * v[:1].numel() * _size(self.row_dtype(n, v)) for n, v in graph.ndata.items()}
        edges = sum(v.numel() * v.element_size() for v in graph.edata.values())
        claims = CLAIMS.get(self.device.type, 0)
        return {
            "structure": graph.num_edges * index + (8 + claims) * graph.num_nodes,
            "node data": sum(rows.values()), "edge data": edges, "step": self.workspace(),
            **({"a step ahead": self.ahead()} if self.prefetch else {}),
        }  # fmt: skip

    def beside_graph(self) -> int:
        """Bytes that are needed besides the graph, if everything is on the device."""
        found = self.resident()
        claims = CLAIMS.get(self.device.type, 0) * self.graph.num_nodes
        return claims + found["step"] + found.get("a step ahead", 0)

    def costs(self) -> Costs:
        """What slots, edges and tables of an arena take."""
        graph, index = self.graph, self.graph.indices.element_size()
        slot, bus, tables = 0.0, 0.0, 0 if graph.ids is None else graph.ids.nbytes
        for name, value in graph.ndata.items():
            count = value[:1].numel()
            slot += count * _size(self.row_dtype(name, value))
            if self._narrow(value):
                tables += value.shape[0] * _size(compact_dtype(value)) * count
            else:
                bus += count * value.element_size()
        data = (4 if self.repeats else 0) + sum(v[:1].numel() * v.element_size() for v in graph.edata.values())
        loading = 4.0 + (data + 16 if data else 0)  # that, and where it is to go (``placed_edges``)
        pool = 0
        if self.own_book:
            tables, pool = tables + DeviceSlots.nbytes_of(graph.num_nodes), DeviceSlots.slot_nbytes(index)
        fixed = {"tables": tables, "step": self.workspace()}
        known = index if graph.ids is None else 2 * index
        slot += known + 8 + CLAIMS.get(self.device.type, 0)
        edge = 2.0 * (index + data)
        return Costs(fixed, slot, edge, bus, pool, self.own_book, loading_edge=loading)

    def _narrow(self, value: Tensor) -> bool:
        return value[:1].numel() * value.element_size() <= NARROW

    # --- choosing ---

    def plan(self) -> Plan:
        """The plan.

        Raises:
            ConfigError: nothing fits; with what it would take. Or ``prefetch``, and not everything does.
        """
        whole = self.resident()
        if sum(whole.values()) <= self.budget and self.first_stage is None:
            return self._resident(whole)
        if self.prefetch:
            raise self._not_ahead(whole)
        in_huge_pages(self.graph)
        total, stage = self.seeds.numel(), LargeBatch() if self.first_stage is None else copy.copy(self.first_stage)
        stage.empty = None
        self.tell(stage)
        costs = self.costs()
        wanted = sorted({min(-(-total // (parts * self.batch)) * self.batch, total) for parts in PARTS})
        wanted = self._possible(wanted, costs)
        smallest = wanted[0]
        if stage.num_seeds is not None:
            wanted = [min(max(1, stage.num_seeds // self.batch) * self.batch, total)]

        def sample(seeds: Tensor, index: int):
            return drawn(stage, self.own_book, self.graph, self.sampler, seeds, (self.seed, PLANNING, index))

        def timed(number: int, index: int):
            """In memory that is used again, as that of a run is; the one before has been looked at."""
            memory.again()
            stage.empty = memory
            try:
                return sample(self._some(number, index), index)
            finally:
                stage.empty = None

        memory = Recycled()
        score = self._hotness(sample, smallest)  # the same nodes, where a size that was chosen is given
        look = Look(timed, score, self.device, self.reuse, stage.hot)
        for index in range(SMALL):
            look.anywhere(sample(spread_nodes(self.batch, self.graph, self.seed, index), 3000 + index))
        for index, seeds in enumerate(heaviest_steps(self.sampler, self.every, self.batch, self.seed)):
            look.alone(sample(seeds, 4000 + index))
        compute = -(-total // self.batch) * self.step_seconds()
        best = shortest if self.ranks is None else self.ranks.best
        found = choose(look, wanted, costs, self.budget, total, compute, self.speeds, best)
        if found is None:
            parts = least(look, wanted[0], costs)
            error = self._too_small(look.shape(wanted[0]), parts)
            raise error if self.ranks is None else self.ranks.neediest(sum(parts.values()), error)
        if self.ranks is not None:
            found.ranks = self.ranks.spread(found)
        found.hot_ids, found.batch, found.alone = look.hottest(found.hot), self.batch, self.nodes_of_a_batch()
        found.rough = self.device.type == "cpu"
        return settle_host(found, self.copied(), self.under_way(found), self.ranks)

    def _resident(self, whole: dict[str, int]) -> Plan:
        """Of a graph that fits; ranks take their steps at the same time, and none waits for a first stage."""
        speeds = self.__dict__.get("speeds") or self._measured(fits=True)
        compute = -(-self.seeds.numel() // self.batch) * self.step_seconds(speeds)
        rough = self.device.type == "cpu"
        return Plan(self.budget, True, parts=whole, seconds={"steps": compute}, batch=self.batch, rough=rough)

    def nodes_of_a_batch(self) -> int:
        """Nodes of a batch that is sampled by itself, its seeds included."""
        return max([self.batch, *(size for size, label in zip(*self.sizes, strict=True) if label == "compact")])

    def copied(self) -> dict[str, int]:
        """Bytes of rows that are copied into locked memory, once per host."""
        if self.device.type == "cpu":
            return {}
        wide = [value for value in self.graph.ndata.values() if not self._narrow(value)]
        return {"rows of files, page-locked": copied_bytes(wide)}

    def under_way(self, plan: Plan) -> dict[str, int]:
        """Bytes of this process: of macro-batches on their way, and of an arena on the CPU."""
        index, data = self.graph.indices.element_size(), 8 if len(self.graph.edata) or self.repeats else 0
        data += 4 if self.repeats else 0  # what edges draw by
        size = plan.nodes * (index + 8) + plan.mean_edges * (index + data) + plan.num_seeds * index
        arena = plan.memory if self.device.type == "cpu" else 0
        return {"macro-batches under way": int(UNDER_WAY * size), "arena": arena}

    def _some(self, number: int, index: int) -> Tensor:
        """So many seeds, others for every index as far as there are any."""
        first = index * number % max(1, self.seeds.numel() - number + 1)
        return self.seeds[first : first + number]

    def _possible(self, wanted: list[int], costs: Costs) -> list[int]:
        """Sizes whose rows might fit if a tenth of them were cold: larger ones are not worth sampling."""
        edges = sum(size for size, label in zip(*self.sizes, strict=True) if label == "sample")
        room = self.budget - sum(costs.fixed.values())
        fitting = [number for number in wanted if number / self.batch * edges * 0.02 * costs.slot <= room]
        return fitting or wanted[:1]

    def _hotness(self, sample, number: int) -> Tensor:
        """Score of every node: how many macro-batches of an epoch needed it; of a sampler that has no fast way, how
        many of some, then how probably one does."""
        every = -(-self.seeds.numel() // COUNTED)
        number = min(self.seeds.numel(), max(number, -(-every // self.batch) * self.batch))
        parts = list(self.seeds.split(number))
        if not has_fast_way(self.graph, self.sampler):
            parts = parts[:FEW_COUNTED]
        while len(parts) < FEW_COUNTED:
            parts *= 2
        needed = (nodes_of(sample(part, 1000 + i), self.graph.num_nodes, self.device) for i, part in enumerate(parts))
        there = torch.zeros(self.graph.num_nodes, dtype=torch.int32, device=self.device if self.own_book else "cpu")
        counts = count_needed(needed, self.graph.num_nodes, there)
        fanouts = getattr(self.sampler, "fanouts", None)
        if fanouts is None or sum(part.numel() for part in parts) >= self.seeds.numel():
            return counts
        prior = inclusion_probabilities(
            self.graph.indptr, self.graph.indices, fanouts, self.seeds, number, getattr(self.sampler, "replace", False)
        )
        return blend(counts.cpu(), prior)

    def step_seconds(self, speeds: Speeds | None = None) -> float:
        """That a step is expected to take whose rows and structure are on the device."""
        speeds = self.speeds if speeds is None else speeds
        row = sum(v[:1].numel() * _size(self.row_dtype(n, v)) for n, v in self.graph.ndata.items() if n == "x")
        edges = [size for size, label in zip(*self.sizes, strict=True) if label == "sample"]
        moved = max(edges, default=0) * row + PASSES * sum(self._inner()) * self._hidden_bytes()
        return speeds.step + moved / speeds.memory + self._operations() / speeds.products

    def _inner(self) -> list[int]:
        """Nodes of a batch that have edges, per layer, from the seeds outwards; outermost rows are read in place."""
        nodes = [size for size, label in zip(*self.sizes, strict=True) if label == "compact"]
        return [self.batch, *nodes[:-1]]

    def _hidden_bytes(self) -> int:
        """Of a hidden row: as wide as what layers behind the first read, if that can be told from their weights."""
        x = self.graph.ndata.get("x")
        width = 0 if x is None else x[:1].numel()
        read = [p.shape[1] for p in self.model.parameters() if p.dim() == 2]
        size = 4 if self.autocast is None else _size(self.autocast)
        return size * max([columns for columns in read if columns != width], default=width)

    def _operations(self) -> float:
        """Of a step's products, forward and backward, weights taken to be alike in all layers."""
        inner, weights = self._inner(), sum(p.numel() for p in self.model.parameters() if p.dim() > 1)
        return 6.0 * sum(inner) * weights / len(inner)

    def _not_ahead(self, whole: dict[str, int]) -> ConfigError:
        return ConfigError(
            f"prefetch=True goes with a graph that fits into memory={human_bytes(self.budget)} as a whole; this one "
            f"takes {human_bytes(sum(whole.values()))} ({listed(whole)}). It would come in macro-batches, which are "
            "loaded ahead of the steps already: leave prefetch out."
        )

    def _too_small(self, shape, parts: dict[str, int]) -> ConfigError:
        needed = sum(parts.values())
        return ConfigError(
            f"memory={human_bytes(self.budget)} is too small: macro-batches of {shape.seeds:,} seeds have about "
            f"{shape.nodes:,.0f} nodes and {shape.edges:,.0f} edges, and need {human_bytes(needed)} "
            f"({listed(parts)}). Give {human_bytes(1.05 * needed)}, or take smaller batches, fanouts or features (x in "
            "bfloat16 or float16 with autocast)."
        )

    # --- filling ---

    def arena(self, plan: Plan) -> Arena:
        """The arena of a plan, its hot nodes loaded; features are locked in host memory."""
        sources = {}
        for name, value in self.graph.ndata.items():
            dtype, value = self.row_dtype(name, value), value.contiguous()
            if self._narrow(value):
                sources[name] = Source(value.to(compact_dtype(value)).to(self.device), dtype)
            elif self.device.type == "cpu":
                sources[name] = Source(value, dtype, host=True)
            else:
                locked = pin(value, self.device) if self.ranks is None else self.ranks.pin(value, self.device)
                sources[name] = Source(locked.view, dtype, host=True)
        hot = plan.hot_ids.sort().values.to(self.graph.indices.dtype)
        layout = hot, plan.cold, plan.edges
        return Arena(self.graph, self.device, *layout, sources, self.reuse, self.own_book, self.repeats)


@functools.cache
def products_per_second(size: int = 512, repeats: int = 3) -> float:
    """Operations per second of a product of float32 matrices on this CPU, measured once."""
    a, times = torch.ones(size, size, device="cpu", dtype=torch.float32), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / max(1e-9, min(times))


def compact_dtype(value: Tensor) -> torch.dtype:
    """The smallest integer dtype that holds these integers; other dtypes as they are."""
    if value.dtype != torch.int64 or not value.numel():
        return value.dtype
    low, high = (int(v) for v in torch.aminmax(value))
    for dtype in (torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return value.dtype


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype, device="cpu").element_size()
