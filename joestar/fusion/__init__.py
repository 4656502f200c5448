"""FX -> FX rewrites across the border of sampling and computation, in one ordered table (thesis 5.3.2)."""

from joestar.fusion.context import PassContext
from joestar.fusion.record import Place, Reject, Site
from joestar.fusion.table import PASSES, Pass, PassRecord, run_passes

__all__ = ["PASSES", "Pass", "PassContext", "PassRecord", "Place", "Reject", "Site", "run_passes"]
