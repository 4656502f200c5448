"""Several processes, one GPU each: who takes part, what they compare, what they add up, and how they fail together."""

from joestar.distributed.group import Group
from joestar.distributed.start import announced, current, init, is_first, rank, shutdown, world_size

__all__ = ["Group", "announced", "current", "init", "is_first", "rank", "shutdown", "world_size"]
