"""Training on graphs in host memory: what is planned, and steps over macro-batches."""

from joestar.staged.planning import Planner, parse_bytes
from joestar.staged.staging import Staging
from joestar.staged.step import StagedStep

__all__ = ["Planner", "StagedStep", "Staging", "parse_bytes"]
