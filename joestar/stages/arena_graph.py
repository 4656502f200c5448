"""The graph whose nodes are the slots of an arena, the buffers beside it, and what its rows are read from."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api import Graph
from joestar.kernels import cpu_stages
from joestar.stages.macro import MacroBatch, Picked

RANKS = None
"""Name of what edges draw by among edge tensors: none that a user can give."""
EdgeTensors = dict[str | None, Tensor]
"""By name."""


class Source:
    """One of the graph's node tensors, as rows are read from it: in place by the GPU, or resident there.

    Args:
        rows: ``[N, ...]``, on the arena's device: its own memory, or a view of page-locked memory.
        dtype: that rows have in the arena.
        host: whether reading them takes the bus.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype | None = None, host: bool = False):
        self.rows = rows
        self.dtype = rows.dtype if dtype is None else dtype
        self.host = host

    @property
    def row_bytes(self) -> int:
        """Bytes of a row where it is read."""
        return self.rows[:1].numel() * self.rows.element_size()


def graph_of_slots(
    whole: Graph, device: torch.device, slots: int, edges: int, sources: dict[str, Source], repeats: bool = False,
) -> Graph:  # fmt: skip
    """A part of ``whole`` with ``slots`` nodes and room for ``edges``, all zeros, on a device; with node tensors by
    name, and, if steps repeat draws, what edges draw by."""
    dtype = whole.indices.dtype
    with torch.inference_mode(False), torch.device(device):
        structure = torch.zeros(slots + 1, dtype=torch.int64), torch.zeros(edges, dtype=dtype)
        ndata = {
            name: torch.zeros((slots, *source.rows.shape[1:]), dtype=source.dtype) for name, source in sources.items()
        }
        edata = {name: torch.zeros((edges, *v.shape[1:]), dtype=v.dtype) for name, v in whole.edata.items()}
        graph = Graph(*structure, ndata, edata)
        graph.ids = torch.zeros(slots, dtype=dtype)
        positions = graph.ids if whole.ids is None else torch.zeros(slots, dtype=dtype)
        graph.as_part_of(whole, positions)
        graph.whole_degrees = torch.zeros(slots, dtype=torch.int64)
        if repeats:
            graph.first_key, graph.ranks = torch.zeros(3, dtype=torch.int64), torch.zeros(edges, dtype=torch.int32)
    graph.name, graph.num_classes = whole.name, whole.num_classes
    graph.multilabel, graph.class_names = whole.multilabel, whole.class_names
    return graph


def next_structure(graph: Graph) -> tuple[Tensor, Tensor]:
    """The second buffer of a graph's structure."""
    with torch.inference_mode(False):
        return torch.zeros_like(graph.indptr), torch.zeros_like(graph.indices)


# --- edge tensors ---


def edge_tensors(
    whole: Graph, macro: MacroBatch | Picked, repeats: bool, new: Callable[[int, torch.dtype], Tensor]
) -> Iterator[tuple[str | None, Tensor]]:
    """Of a macro-batch's edges, in its order: the graph's, by name, and, if steps repeat draws, what edges draw by:
    their positions in their rows of the whole graph, in memory that ``new(size, dtype)`` gives."""
    for name, value in whole.edata.items():
        yield name, value[macro.eids]
    if repeats:
        if macro.eids is None:
            raise GraphError(
                "steps repeat what the sampler draws in the first stage, which gave a macro-batch without eids: "
                "give them, or set repeats = False where the first stage does not draw as the sampler does."
            )
        rows = macro.rows if isinstance(macro, Picked) else macro.ids[: macro.num_rows]
        ranks = new(macro.num_edges, torch.int32)
        yield RANKS, cpu_stages.edge_ranks(whole.indptr, rows, macro.indptr, macro.eids, ranks)


def placed_edges(given: EdgeTensors, indptr: Tensor, slots: Tensor, placed: Tensor) -> EdgeTensors:
    """The same on the device, in the order of the arena's edges.

    Args:
        indptr, slots: of the macro-batch's rows. placed: the arena's ``indptr``.
    """
    if not given:
        return {}
    number = next(iter(given.values())).shape[0]
    shift = torch.index_select(placed, 0, slots.to(torch.int64)) - indptr[:-1]  # of every row
    position = torch.arange(number, device=indptr.device)
    position += shift.repeat_interleave(indptr.diff(), output_size=number)
    found = {}
    for name, value in given.items():
        value = value.to(indptr.device, non_blocking=True)
        found[name] = torch.empty_like(value).index_copy_(0, position, value)
    return found


def show_edges(graph: Graph, edata: EdgeTensors, key: tuple[int, int, int] | None) -> None:
    """Makes them the graph's, and the key under which they were drawn, if draws are repeated."""
    for name, value in edata.items():
        shown = graph.ranks if name is RANKS else graph.edata[name]
        shown[: value.shape[0]].copy_(value)
    if graph.first_key is not None:
        graph.first_key.copy_(torch.tensor(key, dtype=torch.int64, device="cpu"), non_blocking=True)
