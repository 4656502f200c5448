"""Joestar: an end-to-end compiler for sampling-based GNN training on PyTorch 2."""

__version__ = "0.1.0"

from joestar import errors, nn  # noqa: E402
from joestar.api import Step, compile  # noqa: E402
from joestar.data import load  # noqa: E402
from joestar.graph_api import Block, Graph, fn  # noqa: E402
from joestar.sampling import NeighborSampler  # noqa: E402

__all__ = ["Block", "Graph", "NeighborSampler", "Step", "compile", "errors", "fn", "load", "nn"]
