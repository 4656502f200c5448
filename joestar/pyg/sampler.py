"""A sampler whose blocks are put together to one subgraph."""

import weakref

import torch
from torch import Tensor

from joestar.graph_api import Graph, check_blocks
from joestar.graph_api.subgraph import Subgraph
from joestar.pyg.call import arguments_of, check_hooks
from joestar.pyg.kept import check_caches
from joestar.pyg.layers import prepare, relations_of


class SubgraphSampler:
    """Samples as another sampler does, and returns the union of its hops: ``[Subgraph]``.

    Args:
        model: what is called with the subgraphs.
        sampler: has ``graph`` and ``sample(graph, seeds) -> list[Block]``, input side first; destinations of a block
            are the first of its sources.
    """

    def __init__(self, model, sampler):
        self.sampler = sampler
        self.graph = sampler.graph
        self._model = weakref.ref(model)
        check_hooks(model)
        check_caches(model)
        prepare(model)
        self.arguments = tuple(arguments_of(model, sampler.graph))
        self.types = relations_of(model, sampler.graph, self.arguments)

    @property
    def seed(self) -> int:
        """That of the sampler, 0 if it has none."""
        return getattr(self.sampler, "seed", 0)

    def sample(self, graph: Graph, seeds: Tensor) -> list[Subgraph]:
        """One subgraph for the seeds ``[B]``."""
        model = None if torch.compiler.is_compiling() else self._model()
        if model is not None:
            check_hooks(model)
        if not graph.has_context:
            graph = graph.keyed(self.seed)
        blocks = self.sampler.sample(graph, seeds)
        check_blocks(blocks, type(self.sampler).__name__)
        subgraph = Subgraph.of(list(blocks))
        subgraph.arguments = self.arguments
        if self.types is not None:
            subgraph.tell_apart(*self.types)
        return [subgraph]

    def __repr__(self) -> str:
        return repr(self.sampler)
