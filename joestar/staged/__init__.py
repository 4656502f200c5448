"""Training on graphs in host memory: what is planned, and steps over macro-batches."""

from joestar.profile.numbers import parse_bytes
from joestar.staged.planning import Planner
from joestar.staged.staging import Staging
from joestar.staged.step import StagedStep

__all__ = ["Planner", "StagedStep", "Staging", "parse_bytes"]
