"""A graph whose edges stay in the host's memory: samplers of a GPU read them in place."""

import torch

from joestar.graph_api.arrays import SPLITS
from joestar.graph_api.frame import Frame
from joestar.graph_api.graph import Graph
from joestar.graph_api.row_source import source_of
from joestar.store.pinned import pin, resolved


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
    moved = Graph(graph.indptr.to(device), pin(graph.indices, device).view)
    moved.ndata = Frame("ndata", "nodes", graph.num_nodes)
    for name, value in graph.ndata.items():
        far = source_of(graph.ndata, name)
        moved.ndata[name] = (value if far is None else far).to(device)
    moved.edata = Frame("edata", "edges", graph.num_edges)
    for name, value in graph.edata.items():
        moved.edata[name] = pin(value, device).view
    moved = graph._describe(moved)
    for name in SPLITS:
        split = getattr(graph, name)
        setattr(moved, name, None if split is None else split.to(device))
    return moved
