"""Sums in a fixed order, for higher levels."""

from joestar.kernels.determinism import deterministic, is_deterministic

__all__ = ["deterministic", "is_deterministic"]
