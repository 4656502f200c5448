"""Where features and structure live when the GPU cannot hold them, and how they get to it."""

from joestar.store.pinned import Pinned, pin, pinned_empty

__all__ = ["Pinned", "pin", "pinned_empty"]
