"""Neighbour sampling (GraphSAGE), uniform or weighted, hop by hop from the seeds outwards."""

from torch import Tensor

from joestar.errors import SamplerError
from joestar.graph_api import Block, Graph
from joestar.graph_api.probs import as_probs, check_edge_probs
from joestar.graph_api.validate import check_seed
from joestar.whole_numbers import plain


class NeighborSampler:
    """Samples up to ``fanouts[h]`` in-neighbours of every node at hop ``h``.

    Args:
        graph: the full graph.
        fanouts: picks per node and hop, from the seeds outwards; -1 takes every neighbour.
        replace: sample with replacement.
        seed: first word of the random key; the others are epoch and step, so a run can be repeated and resumed.
        probs: relative weight of every edge: a name in ``graph.edata``, or a float32 tensor ``[num_edges]``; ``None``
            for uniform picks. An edge of weight 0 is never picked.

    ``sample(graph, seeds)`` returns one ``Block`` per hop, input side first: ``blocks[-1].dsts`` are the seeds.
    """

    def __init__(self, graph: Graph, fanouts, replace: bool = False, seed: int = 0, probs: Tensor | str | None = None):
        if not isinstance(graph, Graph):
            raise SamplerError(f"NeighborSampler needs a joestar.Graph; got {type(graph).__name__}.")
        try:
            hops = None if isinstance(fanouts, (set, frozenset, dict)) else plain(list(fanouts))
        except TypeError:
            hops = None
        if hops is None:
            raise SamplerError(
                f"fanouts must be a list, one number of neighbours per layer, e.g. [15, 10, 5]; got {fanouts!r}."
            )
        fanouts = hops
        if not fanouts:
            raise SamplerError("fanouts is empty: give one number of neighbours per layer, e.g. [15, 10, 5].")
        for hop, fanout in enumerate(fanouts):
            if isinstance(fanout, bool) or not isinstance(fanout, int) or not (0 < fanout < 2**31 or fanout == -1):
                raise SamplerError(
                    f"fanouts[{hop}] = {fanout!r}: expected a positive integer below 2**31, or -1 for every neighbour."
                )
        if not isinstance(replace, bool):
            raise SamplerError(f"replace must be True or False; got {replace!r}.")
        if probs is not None:
            probs = as_probs(probs, "probs", graph)
            check_edge_probs(graph, probs)
        self.graph = graph
        self.fanouts = fanouts
        self.probs = probs
        self.replace = replace
        self.seed = check_seed(seed, error=SamplerError)

    def sample(self, graph: Graph, seeds: Tensor) -> list[Block]:
        """Blocks for the seeds ``[B]`` (duplicates allowed: a row each), input side first."""
        if not graph.has_context:
            graph = graph.keyed(self.seed)
        blocks = []
        dsts = seeds
        for fanout in self.fanouts:
            block = graph[:, dsts].individual_sample(fanout, edge_probs=self.probs, replace=self.replace)
            blocks.append(block)
            dsts = block.srcs
        return blocks[::-1]

    def __repr__(self) -> str:
        probs = "" if self.probs is None else f", probs={self.probs!r}" if isinstance(self.probs, str) else ", weighted"
        return f"NeighborSampler(fanouts={self.fanouts}, replace={self.replace}, seed={self.seed}{probs})"
