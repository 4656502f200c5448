"""``joestar::edge_map`` under autocast: its leaves come in several dtypes there, and the op takes one.

Products give the short dtype, parameters and features keep theirs. Rows of sources are the most, and may be a table:
they stay as they are, and all else is cast to their dtype. Values are computed in float32 at least, whatever the leaves
are.
"""

import functools

import torch
from torch import Tensor

from joestar.kernels.edge_program import EdgeProgram, grouped
from joestar.ops.library import LIBRARY

_ORDER = (("src",), ("dst", "edge"), ("narrow", "narrow_plain"), ("scalar", "vector"))
"""Kinds of leaves whose dtype counts, the first that there are."""


def common_dtype(program: EdgeProgram, leaves: list[Tensor], short: torch.dtype) -> torch.dtype:
    """The dtype of the rows of sources, else of other rows; products would give ``short``."""
    groups = list(zip(program.leaves, grouped(program, leaves), strict=True))
    for kinds in _ORDER:
        found = [tensors[0].dtype for kind, tensors in groups if kind in kinds]
        if found:
            return short if "narrow" in kinds else functools.reduce(torch.promote_types, found)
    return short


def _autocast(device: str):
    def run(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str) -> Tensor:
        dtype = leaves[0].dtype
        if any(leaf.dtype != dtype for leaf in leaves):
            dtype = common_dtype(EdgeProgram.parse(program), leaves, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            cast = [leaf.to(dtype) for leaf in leaves]
            return torch.ops.joestar.edge_map(indptr, indices, cast, program, reduce)

    return run


LIBRARY.impl("edge_map", _autocast("cpu"), "AutocastCPU")
LIBRARY.impl("edge_map", _autocast("cuda"), "AutocastCUDA")


def _spmm_autocast(device: str):
    """Extrema of short rows times wider weights: the weights are rounded first, as rows and messages are.

    ``w.to(h.dtype)`` in the user's model was traced where ``h`` was not short yet, and is gone.
    """

    def run(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None, *rest) -> Tensor:
        with torch.autocast(device, enabled=False):
            extremum = bool(rest) and rest[0] in ("max", "min")
            if extremum and weight is not None and torch.promote_types(x.dtype, weight.dtype) != x.dtype:
                weight = weight.to(x.dtype)
            return torch.ops.joestar.spmm(indptr, indices, x, weight, *rest)

    return run


LIBRARY.impl("spmm", _spmm_autocast("cpu"), "AutocastCPU")
LIBRARY.impl("spmm", _spmm_autocast("cuda"), "AutocastCUDA")
