"""The op database: per op its samples, how exact its kernel is, which arguments have gradients, and its errors.

``OPS`` maps the name of every op with a kernel of its own to an ``Op``; the tests of this folder are generated from it.
The entries are in one file per area.
"""

from . import (
    database_activated,
    database_attention,
    database_computation,
    database_fused,
    database_sampling,
    database_segment,
    database_spmm_forms,
    database_weighted,
)
from .samples import BIG_KEY, FLOATS, IDS, KEY, TOLERANCE, Op, Sample, few_values, values

AREAS = (
    database_sampling,
    database_weighted,
    database_computation,
    database_spmm_forms,
    database_attention,
    database_segment,
    database_fused,
    database_activated,
)
OPS: dict[str, Op] = {name: op for area in AREAS for name, op in area.OPS.items()}

__all__ = ["BIG_KEY", "FLOATS", "IDS", "KEY", "OPS", "TOLERANCE", "Op", "Sample", "few_values", "values"]
