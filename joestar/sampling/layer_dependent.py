"""Layer-dependent importance sampling (LADIES): every layer picks nodes for all its destinations together."""

import numpy as np
import torch
from torch import Tensor

from joestar.errors import SamplerError
from joestar.graph_api import Block, Graph, fn
from joestar.graph_api.probs import as_probs, node_weight
from joestar.graph_api.validate import check_seed
from joestar.whole_numbers import plain


class LayerDependentSampler:
    """Samples ``layer_sizes[h]`` nodes at hop ``h`` among all in-neighbours of that hop's destinations.

    The blocks stay small however many hops there are: a layer grows by at most its size, where neighbour sampling
    multiplies. Destinations keep the edges from the picked nodes; aggregate with ``"mean"``, which normalises what is
    left of a row as LADIES does. Zou et al. (2019), "Layer-dependent importance sampling for training deep and large
    graph convolutional networks"; with ``node_probs``, FastGCN's fixed importance (Chen et al. 2018).

    Args:
        graph: the full graph.
        layer_sizes: nodes to pick per hop, from the seeds outwards.
        node_probs: relative weight of every node: a name in ``graph.ndata``, or a float32 tensor ``[num_nodes]``.
            ``None`` for LADIES' importance, recomputed in every layer: the sum over the destinations that a node
            reaches of ``1 / in-degree ** 2``, the squared column norm of the row-normalised slice.
        seed: first word of the random key.

    ``sample(graph, seeds)`` returns one ``Block`` per hop, input side first: ``blocks[-1].dsts`` are the seeds.
    """

    def __init__(self, graph: Graph, layer_sizes, node_probs: Tensor | str | None = None, seed: int = 0):
        if not isinstance(graph, Graph):
            raise SamplerError(f"LayerDependentSampler needs a joestar.Graph; got {type(graph).__name__}.")
        layer_sizes = plain(list(layer_sizes) if isinstance(layer_sizes, np.ndarray) else layer_sizes)
        if not isinstance(layer_sizes, (list, tuple)) or not layer_sizes:
            raise SamplerError(
                f"layer_sizes must be a list, one number of nodes per layer, e.g. [512, 512]; got {layer_sizes!r}."
            )
        for hop, size in enumerate(layer_sizes):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SamplerError(f"layer_sizes[{hop}] = {size!r}: expected a positive number of nodes.")
        if node_probs is not None:
            node_probs = as_probs(node_probs, "node_probs", graph)
            node_weight(graph, node_probs)
        self.graph = graph
        self.layer_sizes = list(layer_sizes)
        self.node_probs = node_probs
        self.seed = check_seed(seed, error=SamplerError)

    def sample(self, graph: Graph, seeds: Tensor) -> list[Block]:
        """Blocks for the seeds ``[B]``, input side first."""
        if not graph.has_context:
            graph = graph.keyed(self.seed)
        blocks = []
        dsts = seeds
        for size in self.layer_sizes:
            columns = graph[:, dsts]
            weight = _importance(columns) if self.node_probs is None else self.node_probs
            block = columns.collective_sample(size, node_probs=weight)
            blocks.append(block)
            dsts = block.srcs
        return blocks[::-1]

    def __repr__(self) -> str:
        return f"LayerDependentSampler(layer_sizes={self.layer_sizes}, seed={self.seed})"


def _importance(columns) -> Tensor:
    """Squared norm of every node's row in the row-normalised slice, float32 ``[num_nodes]``."""
    share = 1.0 / columns.in_degrees().clamp(min=1).to(torch.float32)
    return columns.reverse().pull(fn.copy_u(share * share), "sum")
