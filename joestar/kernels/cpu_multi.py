"""Several reductions of the same rows in one pass over them on the CPU, and their gradient in one pass by source.

Sums run in edge order and have the same bits for any number of threads; squares are rounded to the type of the
rows before they are added up, as PyTorch's are, whose rounding cancels where a mean's square is taken off.
"""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_rows, check_values, require
from joestar.kernels.layout import REDUCTIONS, extrema, reductions, wide_dtype


def multi_aggregate(indptr: Tensor, indices: Tensor, x: Tensor, reduces: str, ties: bool) -> list[Tensor]:
    """Reductions ``[num_dst, F]`` of the same rows, then ties of extrema; see the op."""
    kinds = reductions(reduces)
    require(x.dim() == 2, "rows [N, F]", f"{list(x.shape)}")
    indptr, indices, x = check_offsets(indptr), check_ids(indices, "indices"), check_values(x, "x")
    shape = (indptr.numel() - 1, x.shape[1])
    found = {kind: x.new_empty(shape) for kind in kinds}
    tied = {kind: x.new_empty(shape, dtype=torch.int32) for kind in extrema(reduces) if ties}
    _native.multi_aggregate(
        indptr, indices, x, x.shape[1], [found.get(kind) for kind in REDUCTIONS], [tied.get("max"), tied.get("min")]
    )
    return [*found.values(), *tied.values()]


def multi_aggregate_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, rows: Tensor | None, squares: Tensor | None, extremes: list[Tensor],
    shares: list[Tensor],
) -> Tensor:  # fmt: skip
    """Gradient of ``multi_aggregate`` for ``x``, summed per source in edge order."""
    indptr, indices, x = check_offsets(indptr), check_ids(indices, "indices"), check_values(x, "x")
    require(len(extremes) == len(shares) <= 2, "a share for each of at most two extrema", f"{len(shares)} shares")
    given = [rows, squares, *extremes, *shares]
    for value in given:
        if value is not None:
            check_rows(value, indptr.numel() - 1, "a gradient")
    wide, none = wide_dtype(x.dtype), [None] * (2 - len(extremes))
    rows, squares, *shares = (
        None if value is None else value.to(wide).contiguous() for value in (rows, squares, *shares)
    )
    extremes = [check_values(y.to(x.dtype), "an extremum") for y in extremes]
    grad_x = x.new_empty(x.shape)
    _native.multi_aggregate_grad(
        indptr, indices, x, x.shape[1], x.shape[0], rows, squares, [*extremes, *none], [*shares, *none], grad_x
    )
    return grad_x
