"""``joestar::multi_aggregate``: several reductions of the same rows over the same edges, in one pass over the rows.

Its gradient is one pass as well. What a destination passes on to every source (sums), in proportion to its row (sums
of squares) or where it attains an extremum (an even share of each tie) is elementwise work, which the backend fuses
with what makes the gradients; an op gathers it per source. For that the aggregation notes how many edges attain an
extremum.
"""

import torch
from torch import Tensor

from joestar.kernels.determinism import is_deterministic
from joestar.kernels.layout import extrema, reductions
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.shapes import wide_dtype

ops = torch.ops.joestar


def _sources(indptr: Tensor, indices: Tensor) -> Tensor:
    """The sources of the edges ``[E]``; 0 behind the last one."""
    valid = torch.arange(indices.shape[0], device=indices.device) < indptr[-1]
    return torch.where(valid, indices, 0)


def _squares(indptr: Tensor, indices: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(edges, rows): squares of ``x``, or only of the rows that edges read where those are fewer."""
    if x.shape[0] <= indices.shape[0]:
        return indices, x * x
    rows = torch.index_select(x, 0, _sources(indptr, indices))
    return torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype), rows * rows


def _attained(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``[E, F]``: where an edge's row is equal to the result of its destination; anything behind the last edge."""
    if not y.shape[0] or not x.shape[0]:
        return torch.zeros((indices.shape[0], x.shape[1]), dtype=torch.bool, device=x.device)
    dst = ops.edge_dst(indptr, indices.shape[0], indices)
    return torch.index_select(x, 0, _sources(indptr, indices)) == torch.index_select(y, 0, dst)


def multi_aggregate(indptr: Tensor, indices: Tensor, x: Tensor, reduces: str, ties: bool) -> list[Tensor]:
    """Several reductions of ``x[indices[e]]`` over the in-edges ``e`` of every destination.

    Args:
        indptr: int64 ``[num_dst + 1]``; indices: int32 or int64 ``[E]``, anything behind the last edge.
        x: rows ``[N, F]`` of floats.
        reduces: some of sum, mean, max, min, sum2 and mean2 (of squares), joined by commas. ties: whether to note
            what the gradient of max and min asks for; without it they have none.

    Returns:
        ``[num_dst, F]`` in the dtype of ``x`` for every reduction, 0 where there are no edges, as of ``spmm``; then
        int32 ``[num_dst, F]`` for max and min, in their order: how many edges attain it, undefined where it is NaN.

    Raises:
        ValueError: for rows that are no vectors, or reductions that there are not.
    """
    kinds = reductions(reduces)
    if x.dim() != 2:
        raise ValueError(f"multi_aggregate: expected rows [N, F], got {list(x.shape)}")
    of_squares = _squares(indptr, indices, x) if any(kind.endswith("2") for kind in kinds) else None
    found = {}
    for kind in kinds:
        edges, rows = of_squares if kind.endswith("2") else (indices, x)
        found[kind] = ops.spmm(indptr, edges, rows, None, kind.removesuffix("2"))
    tied = []
    for kind in extrema(reduces) if ties else ():
        attained = _attained(indptr, indices, x, found[kind]).to(wide_dtype(x.dtype))
        tied.append(ops.scatter_dst(indptr, attained).to(torch.int32))
    return [*found.values(), *tied]


def multi_aggregate_grad(
    indptr: Tensor, indices: Tensor, x: Tensor, rows: Tensor | None, squares: Tensor | None, extremes: list[Tensor],
    shares: list[Tensor],
) -> Tensor:  # fmt: skip
    """Gradient of ``multi_aggregate`` for ``x``, in its dtype.

    Args:
        rows: ``[num_dst, F]``, at least float32, what every edge of a destination passes on; squares: times ``2 x``.
        extremes: results of max and min; shares: what each passes on to the edges that attain it.
    """
    total = torch.zeros(x.shape, dtype=wide_dtype(x.dtype), device=x.device)
    if rows is not None:
        total = total + ops.spmm_grad_x(indptr, indices, rows, None, x.shape[0], "sum")
    if squares is not None:
        total = total + 2 * x * ops.spmm_grad_x(indptr, indices, squares, None, x.shape[0], "sum")
    for y, share in zip(extremes, shares, strict=True):
        attained = _attained(indptr, indices, x, y)
        passed = ops.sddmm(indptr, indices, None, share, "copy_rhs")
        total = total + ops.scatter_src(indptr, indices, torch.where(attained, passed, 0), x.shape[0])
    return total.to(x.dtype)


def _on_gpu(kernel):
    """The kernel adds in any order."""
    return lambda *arguments: (multi_aggregate_grad if is_deterministic() else kernel)(*arguments)


def _fake(indptr, indices, x, reduces, ties):
    shape = (indptr.shape[0] - 1, x.shape[1])
    tied = [x.new_empty(shape, dtype=torch.int32) for _ in extrema(reduces) if ties]
    return [*(x.new_empty(shape) for _ in reductions(reduces)), *tied]


def _setup(ctx, inputs, output):
    indptr, indices, x, ctx.reduces, ties = inputs
    kinds, found = reductions(ctx.reduces), extrema(ctx.reduces)
    if found and not ties and ctx.needs_input_grad[2]:
        raise RuntimeError(f"multi_aggregate has no gradient for {found[0]} without ties; ask for them")
    extremes = [output[kinds.index(kind)] for kind in found]
    ctx.save_for_backward(indptr, indices, x, *extremes, *output[len(kinds) :])


def _added(total: Tensor | None, mean: Tensor | None, degree: Tensor) -> Tensor | None:
    """What the sum and the mean of the same values pass on."""
    if mean is None:
        return None if total is None else total.to(degree.dtype)
    mean = mean.to(degree.dtype) / degree
    return mean if total is None else total.to(degree.dtype) + mean


def _backward(ctx, grads):
    indptr, indices, x, *saved = ctx.saved_tensors
    wide, found = wide_dtype(x.dtype), extrema(ctx.reduces)
    of = dict(zip(reductions(ctx.reduces), grads, strict=False))
    degree = (indptr[1:] - indptr[:-1]).clamp(min=1).to(wide).unsqueeze(1)
    rows = _added(of.get("sum"), of.get("mean"), degree)
    squares = _added(of.get("sum2"), of.get("mean2"), degree)
    tied = saved[len(found) :]
    shares = [of[kind].to(wide) / count.clamp(min=1) for kind, count in zip(found, tied, strict=True)]
    extremes = saved[: len(found)]
    return None, None, ops.multi_aggregate_grad(indptr, indices, x, rows, squares, extremes, shares), None, None


define(
    f"multi_aggregate({CSC}, Tensor x, str reduces, bool ties) -> Tensor[]", multi_aggregate, fake=_fake,
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_multi", cuda="gpu_multi",
)  # fmt: skip
define_gradient(
    f"multi_aggregate_grad({CSC}, Tensor x, Tensor? rows, Tensor? squares, Tensor[] extremes, Tensor[] shares)"
    " -> Tensor", multi_aggregate_grad, cpu="cpu_multi", cuda="gpu_multi", around_cuda=_on_gpu,
    fake=lambda indptr, indices, x, rows, squares, extremes, shares: x.new_empty(x.shape),
)  # fmt: skip
