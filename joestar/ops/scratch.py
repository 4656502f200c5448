"""Tables that a CUDA graph owns, for higher levels."""

from joestar.kernels.scratch import own_tables

__all__ = ["own_tables"]
