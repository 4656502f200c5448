"""The graph whose nodes are the slots of an arena, the buffers beside it, and what its rows are read from."""

import torch
from torch import Tensor

from joestar.graph_api import Graph


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
    whole: Graph, device: torch.device, slots: int, edges: int, sources: dict[str, Source]
) -> Graph:  # fmt: skip
    """A part of ``whole`` with ``slots`` nodes and room for ``edges``, all zeros, on a device; with node tensors by
    name."""
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
    graph.name, graph.num_classes = whole.name, whole.num_classes
    graph.multilabel, graph.class_names = whole.multilabel, whole.class_names
    return graph


def next_structure(graph: Graph) -> tuple[Tensor, Tensor]:
    """The second buffer of a graph's structure."""
    with torch.inference_mode(False):
        return torch.zeros_like(graph.indptr), torch.zeros_like(graph.indices)
