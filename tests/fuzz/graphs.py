"""Small random graphs with every kind of row: no edges, hubs, duplicate edges, self-loops."""

import torch
from where import DEVICE, on_host

from joestar import Graph

IGNORED = 1
"""Class that losses may ignore; only odd nodes have it."""


def random_graph(
    seed: int,
    nodes: int,
    edges: int,
    features: int,
    classes: int,
    form: str = "plain",
    ids: torch.dtype = torch.int32,
    floats: torch.dtype = torch.float64,
    known: bool = False,
) -> Graph:
    """A graph with data under these names, all drawn from ``seed``.

    Node data: ``x`` ``[nodes, features]``; ``y`` int64 classes; ``t`` ``[nodes, classes]`` in (0, 1); ``q`` float32
    weights; ``kind`` int64 in [0, 5). Edge data: ``w`` float32 weights, some 0; ``f`` ``[E, 3]``; ``type`` int64 in
    [0, 5).

    Args:
        form: what is done to the edges, a name in ``FORMS``; ids: dtype of ``indices``; floats: of ``x``, ``t``, ``f``;
            known: nodes are known by other numbers than their positions (``graph.ids``).
    """
    with on_host():
        graph = _drawn(seed, nodes, edges, features, classes, form, ids, floats, known)
    return graph if DEVICE.type == "cpu" else graph.to(DEVICE)


def _drawn(seed, nodes, edges, features, classes, form, ids, floats, known) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    plain = Graph.from_edge_index(_edges(nodes, edges, generator), nodes)
    graph = _FORMS[form](plain)
    graph = Graph.from_csc(graph.indptr, graph.indices.to(ids))

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    if known:
        graph.ids = (torch.randperm(nodes, generator=torch.Generator().manual_seed(seed)) * 37 + 5).to(ids)
    labels = torch.randint(0, classes, (nodes,), generator=generator)
    labels[::2] = torch.where(labels[::2] == IGNORED, 0, labels[::2])
    graph.ndata.update(
        x=torch.randn(nodes, features, generator=generator, dtype=torch.float64).to(floats), y=labels,
        t=draw(nodes, classes).to(floats),
        q=draw(nodes).float(), kind=torch.randint(0, 5, (nodes,), generator=generator),
    )  # fmt: skip
    weights = draw(graph.num_edges).float()
    weights[::7] = 0
    kinds = torch.randint(0, 5, (graph.num_edges,), generator=generator)
    graph.edata.update(w=weights, f=(draw(graph.num_edges, 3) - 0.5).to(floats), type=kinds)
    return graph


def _edges(nodes: int, edges: int, generator) -> torch.Tensor:
    """int64 ``[2, edges]``: a tenth leave node 1, a tenth enter node 2; the last tenth of the nodes have none."""
    ends = torch.randint(0, nodes - nodes // 10, (2, edges), generator=generator)
    tenth = edges // 10
    ends[0, :tenth] = 1
    ends[1, tenth : 2 * tenth] = 2
    ends[:, 2 * tenth : 3 * tenth] = ends[:, -tenth:] if tenth else 0  # duplicates
    ends[1, 3 * tenth : 4 * tenth] = ends[0, 3 * tenth : 4 * tenth]  # self-loops
    return ends


def _hubs(graph: Graph) -> Graph:
    """Two fifths of the edges leave node 0, a fifth enters node 3, none of those the other way round."""
    src, dst, place = graph.coo()
    src = torch.where(place % 5 < 2, 0, src)
    return Graph.from_edge_index(torch.stack([src, torch.where(place % 5 == 2, 3, dst)]), graph.num_nodes)


def _by_degree(graph: Graph) -> Graph:
    """New ids: nodes with few in-edges first."""
    rank = torch.argsort(torch.argsort(graph.in_degrees(), stable=True))
    src, dst, _ = graph.coo()
    return Graph.from_edge_index(torch.stack([rank[src], rank[dst]]), graph.num_nodes)


def _hollow(graph: Graph) -> Graph:
    """Two of three nodes have no in-edges."""
    return graph.keep_edges(graph.coo()[1] % 3 == 0)


_FORMS = {
    "plain": lambda graph: graph,
    "loops": lambda graph: graph.add_self_loops(),
    "bidirected": lambda graph: graph.to_bidirected(),
    "reversed": lambda graph: graph.reverse(),
    "union": lambda graph: graph + graph.reverse(),
    "difference": lambda graph: graph - graph.reverse(),
    "hubs": _hubs,
    "by degree": _by_degree,
    "hubs by degree": lambda graph: _by_degree(_hubs(graph)),
    "hollow": _hollow,
}
FORMS = tuple(_FORMS)
