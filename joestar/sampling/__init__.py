"""Samplers: plain Python over the graph level."""

from joestar.sampling.neighbor import NeighborSampler

__all__ = ["NeighborSampler"]
