"""Exact inference over a whole graph: all neighbours, layer by layer, in ranges of nodes that fit a memory budget.

The model is captured once with a sampler that takes every neighbour (``values``), cut where it passes from the rows of
sources to those of destinations (``stages``), and carried out with the library's own kernels (``ranges``): sources are
read in place by their ids, so that a layer costs its edges once, and nothing is relabelled or gathered.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from joestar.errors import CaptureError, ConfigError, GraphError
from joestar.fusion import PASSES, run_passes
from joestar.graph_api import Graph
from joestar.locks import TRACING
from joestar.lowering.expectations import checked_distributions, place_expectations
from joestar.lowering.functional import remove_in_place
from joestar.lowering.inputs import Kind
from joestar.lowering.lookups import lookups
from joestar.lowering.outputs import rebuild
from joestar.lowering.sizes import expression
from joestar.pyg import takes_edge_index
from joestar.runtime.features import check_places, settle_and_check
from joestar.runtime.guards import warn_of_branches
from joestar.runtime.interrupts import WholeImports
from joestar.runtime.modes import check_autocast, check_modules, evaluating
from joestar.runtime.options import Options
from joestar.runtime.own_errors import raise_own_error
from joestar.runtime.program import Program
from joestar.runtime.ranges import Runner, steps_of
from joestar.runtime.seeds import check_batch_size, check_seeds
from joestar.runtime.stages import Plan
from joestar.runtime.values import values_of
from joestar.runtime.watch import Watched
from joestar.runtime.whole_graph import WholeGraph
from joestar.whole_numbers import plain

USED = ("dce", "simplify", "cse", "spmm-gemm-order", "attention", "edge-map-reduce", "dce-after")
"""Passes that pay without sampling and gradients."""
WORKING = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Bytes of a range, unless the budget is smaller."""
SHARE = 0.8
"""Of the memory that is free, unless a budget is given."""


class _EveryNeighbour:
    """A sampler whose blocks have all in-edges; never run, only captured."""

    def __init__(self, graph: Graph, layers: int):
        self.graph, self.layers = graph, layers

    def sample(self, graph: Graph, seeds: Tensor) -> list:
        """A block per layer, input side first."""
        blocks, dsts = [], seeds
        for _ in range(self.layers):
            block = graph[:, dsts].individual_sample(-1)
            blocks.append(block)
            dsts = block.srcs
        return blocks[::-1]


class _Few(_EveryNeighbour):
    """Two neighbours of every node: to run a model that could not be captured, for its own error."""

    def sample(self, graph: Graph, seeds: Tensor) -> list:
        """A block per layer, input side first."""
        blocks, dsts = [], seeds
        for _ in range(self.layers):
            blocks.append(graph[:, dsts].individual_sample(2))
            dsts = blocks[-1].srcs
        return blocks[::-1]


class Inference:
    """A model captured for exact inference over one graph; parameters may change in between (not be replaced).

    Args:
        model: ``forward(blocks, x) -> [num_seeds, C]``, or a structure of such; layers: how many blocks it takes,
            ``None``: see ``num_layers``.
        autocast: run as under ``torch.autocast`` with this dtype.

    Attributes:
        structure: of what the model returns (``lowering.outputs``).
        reads: plain values of Python that the capture read.

    Raises:
        ConfigError, GraphError, CaptureError: for unusable arguments, or a model that cannot be captured.
    """

    def __init__(self, model: nn.Module, graph: Graph, layers: int | None = None, autocast: torch.dtype | None = None):
        _check_parts(model, graph, autocast)
        check_autocast(graph.device, autocast)
        check_modules(model, graph)
        self.model, self.graph, self.autocast = model, graph, autocast
        self.layers = num_layers(model) if layers is None else _check_layers(layers)
        captured = self._capture()
        if layers is None:
            _check_all_read(model, captured, self.layers)
        self.reads = captured.reads
        self.plan = Plan(values_of(captured, graph))

    @TRACING
    @WholeImports()
    @torch.inference_mode(False)  # a trace writes to what it makes, and what it keeps is used outside
    def _capture(self):
        program = Program(
            "predict", self.model, _EveryNeighbour(self.graph, self.layers), None, Options(autocast=self.autocast)
        )
        ids = torch.zeros(1, dtype=self.graph.indices.dtype, device=self.graph.device)
        try:
            with torch.no_grad(), evaluating(self.model), checked_distributions():
                captured = program._capture(ids, ["slice", "compact"] * self.layers)
        except CaptureError:
            program.sampler = _Few(self.graph, self.layers)
            with evaluating(self.model):
                raise_own_error(program, ids, torch.zeros(3, dtype=torch.int64, device=self.graph.device))
            raise
        self.structure = program.structure
        remove_in_place(captured.gm)
        place_expectations(captured.gm)
        for lookup in lookups(captured.gm, captured.roles):
            lookup.check_all(self.graph)
        others = tuple(spec.name for spec in PASSES if spec.name not in USED)
        run_passes(
            captured.gm, captured.roles, others, sizes=self._sizes(captured), device=self.graph.device.type,
            strict=False, texts=False, autocast=self.autocast,
        )  # fmt: skip
        return captured

    def _sizes(self, captured) -> dict:
        """Symbol of every set -> its size over the whole graph."""
        sizes = {}
        for node, role in zip(captured.gm.graph.find_nodes(op="placeholder"), captured.roles, strict=True):
            if role.kind is Kind.SEEDS:
                sizes[expression(node.meta["val"].shape[0])] = self.graph.num_nodes
            elif role.kind is Kind.SIZE:
                edges = captured.labels[role.index] == "slice"
                sizes[expression(node.meta["val"])] = self.graph.num_edges if edges else self.graph.num_nodes
        return sizes

    def run(
        self, idx: Tensor | None = None, *, batch_size: int | None = None, memory_budget: int | None = None,
        progress: bool | None = None,
    ):  # fmt: skip
        """Logits ``[num_nodes, C]``, or ``[len(idx), C]``, or the model's structure of such; arguments as ``infer``."""
        idx = None if idx is None else check_seeds(idx, self.graph, "idx")
        rows = None if batch_size is None else check_batch_size(batch_size)
        budget = free_memory(self.graph.device) if memory_budget is None else _check_budget(memory_budget)
        device, dtype = self.graph.device.type, self.autocast
        with (
            torch.no_grad(),
            torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False),
            _bar(sum(steps_of(self.plan)), progress) as advance,
        ):
            results = Runner(self.plan, budget, WORKING[device], rows, advance).run()
        if idx is not None:
            return rebuild(self.structure, (torch.index_select(result, 0, idx) for result in results))
        return rebuild(self.structure, self._apart(results))

    def _apart(self, results: list[Tensor]) -> Iterator[Tensor]:
        """Results whose memory is neither that of what the program reads nor another's."""
        taken = {v.tensor.untyped_storage().data_ptr() for v in self.plan.values.order if v.tensor is not None}
        for result in results:
            address = result.untyped_storage().data_ptr()
            yield result.clone() if address in taken else result
            taken.add(address)


def infer(
    model: nn.Module,
    graph: Graph,
    idx: Tensor | None = None,
    *,
    layers: int | None = None,
    batch_size: int | None = None,
    memory_budget: int | None = None,
    autocast: torch.dtype | None = None,
    progress: bool | None = None,
):
    """Exact logits from all neighbours, layer by layer: what ``model`` gives for blocks of the whole graph.

    Every layer is computed once for every node, in ranges of nodes; sampled prediction computes the neighbourhoods of
    nearby nodes again and again. The model runs in evaluation mode; its flags, and random generators, stay as they are.

    Args:
        model: ``forward(blocks, x) -> [num_seeds, C]``, or a structure of such (a dict, a tuple), on the graph's
            device. One that takes ``(x, edge_index)`` runs as it is over all nodes at once: without ``layers``,
            ``batch_size`` and ``memory_budget``.
        graph: with features ``graph.ndata["x"]``, or none if the model takes none.
        idx: node ids ``[n]`` whose rows are wanted; all if ``None``.
        layers: blocks that the model takes; ``None``: ``model.num_layers``, or the length of ``model.convs`` or
            ``model.layers``.
        batch_size: most nodes of a range; ``None``: as many as fit.
        memory_budget: bytes to use beyond graph, features and parameters; ``None``: most of what is free. Needed are
            the rows of all nodes that a layer reads and those that it writes, and the edges of the largest node where
            messages are computed per edge.
        autocast: ``torch.bfloat16`` or ``torch.float16``: as under ``torch.autocast``.
        progress: show a progress bar; ``None``: where standard error is a terminal.

    Returns:
        ``[num_nodes, C]``, or ``[len(idx), C]`` in the order of ``idx``, on the graph's device; what the model returns
        in a structure, in that.

    Raises:
        ConfigError: for unusable arguments, or a budget that is too small, with what it would take.
        GraphError: the graph has no features, or is on another device. SeedError: ``idx`` is unusable.
        CaptureError: the model cannot be captured, draws random numbers or writes to buffers in evaluation mode.
    """
    whole = isinstance(graph, Graph) and takes_edge_index(model)
    if not whole and isinstance(model, nn.Module):
        warn_of_branches(Watched({"model": model}))
    found = WholeGraph(model, graph, autocast) if whole else Inference(model, graph, layers, autocast)
    return found.run(idx, batch_size=batch_size, memory_budget=memory_budget, progress=progress)


def num_layers(model: nn.Module) -> int:
    """How many blocks a model takes, by its attributes.

    Raises:
        ConfigError: they do not tell.
    """
    number = plain(getattr(model, "num_layers", None))
    if isinstance(number, int) and not isinstance(number, bool) and number > 0:
        return number
    for name in ("convs", "layers"):
        modules = getattr(model, name, None)
        if isinstance(modules, (nn.ModuleList, nn.Sequential)) and len(modules):
            return len(modules)
    raise ConfigError(
        f"{type(model).__name__} does not say how many blocks it takes (no num_layers, convs or layers): give "
        "joestar.inference(model, graph, layers=...), as many as the sampler had hops."
    )


def _check_parts(model, graph, autocast) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if not isinstance(graph, Graph):
        raise GraphError(f"inference needs a joestar.Graph; got {type(graph).__name__}.")
    settle_and_check(model, graph)
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be None, torch.bfloat16 or torch.float16; got {autocast!r}.")
    check_places(model, graph)


def _check_layers(layers) -> int:
    layers = plain(layers)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"layers must be a positive integer; got {layers!r}.")
    return layers


def _check_budget(budget) -> int:
    budget = plain(budget)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigError(f"memory_budget must be a positive number of bytes; got {budget!r}.")
    return budget


def _check_all_read(model: nn.Module, captured, layers: int) -> None:
    """Where the number of layers was found, not given, a parameter that nothing reads tells that it is wrong."""
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    read = {
        id(role.tensor) for node, role in zip(placeholders, captured.roles, strict=True) if role.held and node.users
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in read:
            raise ConfigError(
                f"{type(model).__name__} was run with {layers} blocks, as its attributes say, and did not read its "
                f"parameter {name}. Give joestar.inference(model, graph, layers=...) to say how many it takes."
            )


def free_memory(device: torch.device) -> int:
    """Bytes to use where no budget is given: most of what is free."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return int(SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)))
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(SHARE * int(line.split()[1]) * 1024)
    return 1 << 34


@contextlib.contextmanager
def _bar(total: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; gives the function that moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    show = console.is_terminal if show is None else show
    columns = TextColumn("inference"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not show, transient=False) as progress:
        task = progress.add_task("inference", total=total)
        yield lambda rows: progress.advance(task, rows)
