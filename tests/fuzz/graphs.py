"""Small random graphs with every kind of row: no edges, hubs, duplicate edges, self-loops."""

import torch

from joestar import Graph

IGNORED = 1
"""Class that losses may ignore; only odd nodes have it."""


def random_graph(
    seed: int, nodes: int, edges: int, features: int, classes: int, form: str = "plain", ids: torch.dtype = torch.int32
) -> Graph:
    """A graph with data under these names, all drawn from ``seed``.

    Node data: ``x`` float64 ``[nodes, features]``; ``y`` int64 classes; ``t`` float64 ``[nodes, classes]`` in (0, 1);
    ``q`` float32 weights; ``kind`` int64 in [0, 5). Edge data: ``w`` float32 weights, some 0; ``f`` float64 ``[E, 3]``;
    ``type`` int64 in [0, 5).

    Args:
        form: what is done to the edges: ``plain``, ``loops``, ``bidirected``, ``reversed``, ``union``, ``difference``.
        ids: dtype of ``indices``.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = Graph.from_edge_index(_edges(nodes, edges, generator), nodes)
    graph = _FORMS[form](plain)
    graph = Graph.from_csc(graph.indptr, graph.indices.to(ids))

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, classes, (nodes,), generator=generator)
    labels[::2] = torch.where(labels[::2] == IGNORED, 0, labels[::2])
    graph.ndata.update(
        x=torch.randn(nodes, features, generator=generator, dtype=torch.float64), y=labels, t=draw(nodes, classes),
        q=draw(nodes).float(), kind=torch.randint(0, 5, (nodes,), generator=generator),
    )  # fmt: skip
    weights = draw(graph.num_edges).float()
    weights[::7] = 0
    kinds = torch.randint(0, 5, (graph.num_edges,), generator=generator)
    graph.edata.update(w=weights, f=draw(graph.num_edges, 3) - 0.5, type=kinds)
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


_FORMS = {
    "plain": lambda graph: graph,
    "loops": lambda graph: graph.add_self_loops(),
    "bidirected": lambda graph: graph.to_bidirected(),
    "reversed": lambda graph: graph.reverse(),
    "union": lambda graph: graph + graph.reverse(),
    "difference": lambda graph: graph - graph.reverse(),
}
FORMS = tuple(_FORMS)
