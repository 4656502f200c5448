"""Segment programs on the CPU: checks, allocation, and one or two calls into the C++ kernel (``csrc/.../segment.hpp``).

Values of the edges of a tile are small enough to stay in cache; none as wide as a row exists for all edges, but for
gradients of sources' rows where that is faster and they are not large. Sums run in edge order and have the same bits
for any number of threads.
"""

import torch
from torch import Tensor

from joestar import _native
from joestar.kernels.checks import check_ids, check_offsets, check_values
from joestar.kernels.cpu_segment_plan import GradientPlan, Plan, forward_plan, gradient_plan
from joestar.kernels.layout import wide_dtype
from joestar.kernels.segment_gradient import check_rows, check_segment_wanted
from joestar.kernels.segment_program import (
    FULL,
    HEAD,
    SegmentProgram,
    check_segment,
    dtype_of,
    groups_of,
    repeated,
    tensors_apart,
    tensors_together,
)

_NUMBERS = 8192
"""Numbers per value of a tile of edges."""
_STORED_BYTES = 2**28
"""Of a value per edge and column that a gradient may store; above that it is computed again."""


class _Call:
    """Arguments of a call, checked and contiguous."""

    def __init__(self, indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int):
        self.indptr, self.indices = check_offsets(indptr), check_ids(indices, "indices")
        self.program = SegmentProgram.parse(program)
        self.leaves = [leaf.contiguous() for leaf in tensors_apart(self.program, leaves)]
        self.rows, self.edges = indptr.numel() - 1, indices.numel()
        self.heads, self.width = heads, check_segment(self.program, self.leaves, heads, self.rows, self.edges)
        for leaf in self.leaves:
            if leaf.dtype != torch.int32:
                check_values(leaf, "leaves")
        self.dtype = dtype_of(self.program, self.leaves)
        self.wide = wide_dtype(self.dtype)

    def columns(self, size: int) -> int:
        return self.width if size == FULL else self.heads if size == HEAD else 1

    def empty(self, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, self.columns(size), dtype=dtype, device="cpu")

    def run(self, plan: Plan, tensors: list[Tensor], sinks: list[tuple[Tensor | None, ...]], num_src: int = -1) -> None:
        """``tensors``: of the plan's leaves; ``sinks``: what every sink writes to; ``num_src`` of groups by source."""
        leaves, steps, numbers, ends = plan.table
        groups = groups_of(plan.leaves, tensors)
        columns = [
            group[0].shape[1] if "narrow" in kind else 0 for kind, group in zip(plan.leaves, groups, strict=True)
        ]
        leaves = torch.cat([leaves, torch.tensor(columns, dtype=torch.int64, device="cpu")[:, None]], 1)
        given = [tensor for group in (*groups, *sinks) for tensor in (*group, None, None)[:3]]
        _native.segment(
            self.indptr, self.indices, num_src, self.wide == torch.float64, leaves, steps, numbers, ends, given,
            self.heads, self.width, max(4, _NUMBERS // max(1, self.width)),
        )  # fmt: skip


def segment(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int) -> list[Tensor]:
    """See ``joestar.ops.aggregate.segment``."""
    call = _Call(indptr, indices, leaves, program, heads)
    out, saved, sinks = [], [], []
    for result in call.program.results:
        rows = call.edges if result[0] == "edges" else call.rows
        dtype, own = call.wide if result[0] == "softmax" else call.dtype, []
        y = call.empty(rows, call.program.size_of(result), dtype)
        if result[0] == "softmax":
            own = [call.empty(call.rows, call.program.score_size(result), call.wide) for _ in range(2)]
        out.append(y)
        saved += own
        sinks.append((y, *own))
    call.run(forward_plan(call.program), call.leaves, sinks)
    return [*out, *saved]


def segment_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, rows: list[Tensor],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """See ``joestar.ops.aggregate.segment``."""
    call = _Call(indptr, indices, leaves, program, heads)
    stores = call.edges * call.width * call.wide.itemsize <= _STORED_BYTES
    asked = repeated(call.program, wanted)
    plan = gradient_plan(call.program.apart, check_segment_wanted(call.program, call.leaves, asked), stores)
    check_rows(call.program, rows, call.rows, call.edges, call.width, heads)
    kept = (call.dtype, call.wide, torch.int64)
    rows = [(row if row.dtype in kept else row.to(call.wide)).contiguous() for row in rows]
    out = [leaf.new_empty(leaf.shape if w else 0) for leaf, w in zip(call.leaves, asked, strict=True)]
    own = [grad if w else None for grad, w in zip(out, asked, strict=True)]
    _gradients(call, plan, [*call.leaves, *rows], groups_of(call.program.leaves, own))
    return tensors_together(call.program, out)


def _gradients(call: _Call, plan: GradientPlan, tensors: list[Tensor], out: list[tuple]) -> None:
    """Fills ``out``, the gradients of every leaf; 0 where nothing depends on it."""
    for leaf, group in enumerate(out):
        if leaf not in plan.own_leaves and leaf not in plan.sources:
            for grad in group:
                if grad is not None:
                    grad.zero_()
    stored = [call.empty(call.edges, size, call.wide) for size in plan.stored]
    if plan.own is not None:
        sinks = [out[leaf][1:] if "narrow" in call.program.leaves[leaf] else out[leaf] for leaf in plan.own_leaves]
        call.run(plan.own, tensors, [*sinks, *((value,) for value in stored)])
    if plan.by_source is not None:
        num_src = out[plan.sources[0]][0].shape[0]
        call.run(plan.by_source, [*tensors, *stored], [out[leaf] for leaf in plan.sources], num_src)
