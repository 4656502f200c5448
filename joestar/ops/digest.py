"""Which code this is, for caches of higher levels."""

from joestar.kernels.digest import source_digest

__all__ = ["source_digest"]
