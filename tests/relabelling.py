"""Copies of graphs under other node numbers: as a part of a graph lies in the slots of a larger table."""

import torch
from torch import Tensor

from joestar.graph_api import Graph


def relabelled(graph: Graph, slots: int, seed: int = 0) -> tuple[Graph, Tensor, Tensor]:
    """The graph with its nodes in random ``slots``, known by the ids that they had.

    Slots without a node have no edges, features that are no numbers, labels out of range, and an id that another node
    has. Edges keep their order in every row.

    Returns:
        (copy, slot of every node, place of the copy's edges in the graph).
    """
    generator = torch.Generator().manual_seed(seed)
    nodes, dtype = graph.num_nodes, graph.indices.dtype
    slot = torch.randperm(slots, generator=generator)[:nodes]
    ids = torch.randint(0, nodes, (slots,), generator=generator, dtype=dtype)
    ids[slot] = torch.arange(nodes, dtype=dtype)
    degrees = torch.zeros(slots, dtype=torch.int64)
    degrees[slot] = graph.in_degrees()
    indptr = torch.zeros(slots + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    row = torch.repeat_interleave(torch.arange(slots), degrees)
    edges = graph.indptr[ids[row].long()] + torch.arange(graph.num_edges) - indptr[row]
    copy = Graph.from_csc(indptr, slot[graph.indices[edges].long()].to(dtype))
    for name, value in graph.ndata.items():
        copy.ndata[name] = _spread(value, slots, slot, float("nan") if name == "x" else 9)
    for name, value in graph.edata.items():
        copy.edata[name] = value[edges]
    copy.ids = ids
    return copy, slot.to(dtype), edges


def _spread(rows: Tensor, slots: int, slot: Tensor, other: float) -> Tensor:
    spread = rows.new_full((slots, *rows.shape[1:]), other)
    spread[slot] = rows
    return spread
