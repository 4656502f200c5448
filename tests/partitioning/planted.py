"""Small graphs with communities and labels that go with them."""

import torch

from joestar.graph_api import Graph


def planted(nodes: int = 2000, communities: int = 100, classes: int = 5, seed: int = 0) -> Graph:
    """Undirected: 5 edges per node inside its community, 1 outside; a community has one label, ids are shuffled."""
    draw = torch.Generator().manual_seed(seed)
    size = nodes // communities
    own = torch.arange(nodes).repeat_interleave(6)
    near = own // size * size + torch.randint(size, own.shape, generator=draw)
    far = torch.randint(nodes, own.shape, generator=draw)
    other = torch.where(torch.arange(own.numel()) % 6 == 0, far, near.clamp(max=nodes - 1))
    shuffled = torch.randperm(nodes, generator=draw)
    graph = Graph.from_edge_index(torch.stack([shuffled[own], shuffled[other]]), nodes).to_bidirected()
    y = torch.empty(nodes, dtype=torch.int64)
    y[shuffled] = torch.arange(nodes) // size % classes
    graph.ndata["y"] = y
    graph.train_idx = torch.randperm(nodes, generator=draw)[: nodes // 2]
    graph.num_classes = classes
    return graph
