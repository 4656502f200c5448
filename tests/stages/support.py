"""Graphs, samplers and a plain reference for first stages."""

import torch

from joestar.graph_api import Block, Graph, SamplingContext
from joestar.graph_api.context import FIRST_STAGE_SITE
from joestar.stages.macro import MacroBatch


def random_graph(nodes: int = 60, degree: int = 6, seed: int = 0, dtype=torch.int32) -> Graph:
    """In-degrees from 0 to ``2 * degree``, node 1 a hub, parallel edges and self-loops among the edges."""
    random = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, 2 * degree + 1, (nodes,), generator=random)
    degrees[1] = 30 * degree
    degrees[2::7] = 0
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    indices = torch.randint(0, nodes, (int(indptr[-1]),), generator=random).to(dtype)
    graph = Graph.from_csc(indptr, indices)
    graph.edata["w"] = torch.rand(graph.num_edges, generator=random) * (torch.rand(graph.num_edges) > 0.2)
    return graph


def blocks_of(graph: Graph, sampler, seeds, key) -> list[Block]:
    """What the sampler draws under a first stage's key: outermost block first."""
    context = SamplingContext(torch.tensor(key))
    context.site = FIRST_STAGE_SITE
    return sampler.sample(graph.with_context(context), seeds.to(graph.indices.dtype))


def reference(graph: Graph, blocks: list[Block], seeds) -> dict:
    """The union of blocks in sets and loops: fields of a ``MacroBatch`` as lists."""
    edges: dict[int, set[int]] = {int(node): set() for node in blocks[0].dsts}
    for block in blocks:
        for row, node in enumerate(block.dsts.tolist()):
            edges[node] |= set(block.eids[int(block.indptr[row]) : int(block.indptr[row + 1])].tolist())
    rows = sorted(edges)
    ids = rows + sorted(set(blocks[0].srcs.tolist()) - set(rows))
    local = {node: position for position, node in enumerate(ids)}
    eids = [eid for row in rows for eid in sorted(edges[row])]
    indptr = [0]
    for row in rows:
        indptr.append(indptr[-1] + len(edges[row]))
    return {
        "seeds": [local[node] for node in seeds.tolist()],
        "ids": ids,
        "indptr": indptr,
        "indices": [local[int(graph.indices[eid])] for eid in eids],
        "eids": eids,
    }


def fields(macro: MacroBatch) -> dict:
    """The tensors of a macro-batch as lists."""
    names = "seeds", "ids", "indptr", "indices", "eids"
    return {name: None if getattr(macro, name) is None else getattr(macro, name).tolist() for name in names}


class TwoKinds:
    """A user's sampler: one hop by weight, of which some edges are dropped, then one of everything."""

    def sample(self, graph, seeds):
        first = graph[:, seeds].individual_sample(4, "w")
        kept = first.keep_edges(first.indices % 3 != 0)
        second = graph[:, kept.srcs].compact()
        return [second, kept]


class Layers:
    """A user's sampler of uniform hops."""

    def __init__(self, graph, fanouts):
        self.fanouts = fanouts

    def sample(self, graph, seeds):
        blocks, dsts = [], seeds
        for fanout in self.fanouts:
            blocks.append(graph[:, dsts].individual_sample(fanout))
            dsts = blocks[-1].srcs
        return blocks[::-1]


class Whole:
    """A user's sampler: one block made by hand, for every layer."""

    def __init__(self, eids=True):
        self.eids = eids

    def sample(self, graph, seeds):
        rest = torch.tensor([node for node in range(graph.num_nodes) if node not in seeds.tolist()], dtype=seeds.dtype)
        nodes = torch.cat([seeds, rest])
        columns = graph[:, nodes]
        at = torch.empty(graph.num_nodes, dtype=seeds.dtype)
        at[nodes.long()] = torch.arange(graph.num_nodes, dtype=seeds.dtype)
        eids = columns.eids if self.eids else None
        block = Block(columns.indptr, at[columns.indices.long()], nodes, nodes, graph, eids)
        return [block, block]
