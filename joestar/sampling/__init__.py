"""Samplers: plain Python over the graph level."""

from joestar.sampling.layer_dependent import LayerDependentSampler
from joestar.sampling.neighbor import NeighborSampler

__all__ = ["LayerDependentSampler", "NeighborSampler"]
