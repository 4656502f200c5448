"""Joestar: an end-to-end compiler for sampling-based GNN training on PyTorch 2."""

__version__ = "0.1.0"

from joestar import errors, nn
from joestar.api import compile
from joestar.data import load
from joestar.graph_api import Block, Graph, fn
from joestar.runtime.checkpoint import Checkpoints
from joestar.runtime.inference import infer as inference
from joestar.sampling import LayerDependentSampler, NeighborSampler
from joestar.step import Step

__all__ = [
    "Block",
    "Checkpoints",
    "Graph",
    "LayerDependentSampler",
    "NeighborSampler",
    "Step",
    "compile",
    "errors",
    "fn",
    "inference",
    "load",
    "nn",
]
