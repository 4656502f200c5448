"""Models of PyTorch Geometric's form, ``model(x, edge_index, ...)``, over the sampled subgraph of a batch."""

from joestar.pyg.call import call_on_subgraph, takes_edge_index
from joestar.pyg.sampler import SubgraphSampler
from joestar.pyg.substitutes import substituted

__all__ = ["SubgraphSampler", "call_on_subgraph", "substituted", "takes_edge_index"]
