"""The op database: segment programs, of results per destination and per edge."""

import torch

from joestar.kernels.segment_gradient import grad_rows
from joestar.kernels.segment_program import SegmentProgram
from joestar.ops.aggregate.segment import reference

from .samples import NOT_FLOAT, NUM_DST, NUM_SRC, TINY, WIDE, Op, Sample, every, values
from .segments import GINE, MESSAGES, PROGRAMS, differentiable, leaves_of
from .structures import Structure

_LARGE = Structure("wide", *WIDE, NUM_SRC, NUM_DST)


def _segment(dtype, ids):
    for s in every(ids):
        for name in (*MESSAGES, "dot"):
            program, heads, width = PROGRAMS[name]
            leaves = leaves_of(program, heads, width, s, dtype)
            yield Sample(f"{s.name}, {name}", (s.indptr, s.indices, leaves, program, heads))


def rows_of(args: tuple) -> list:
    """What the gradient of messages reads besides the leaves: normal gradients, NaN behind the last edge."""
    indptr, indices, leaves, program, heads = args
    parsed, edges = SegmentProgram.parse(program), int(indptr[-1])
    ys = reference(indptr, indices, leaves, program, heads)
    kept = [edges if result[0] == "edges" else None for result in parsed.results]
    grads = [values(tuple(y.shape), y.dtype, 5 + i, rows) for i, (y, rows) in enumerate(zip(ys, kept, strict=True))]
    return grad_rows(parsed, heads, ys[0].shape[1], indptr, ys, grads)


def _segment_grad(dtype, ids):
    for s in every(ids):
        for position, name in enumerate(MESSAGES):
            program, heads, width = PROGRAMS[name]
            args = (s.indptr, s.indices, leaves_of(program, heads, width, s, dtype), program, heads)
            wanted, rows = differentiable(program), rows_of(args)
            yield Sample(f"{s.name}, {name}", (*args, rows, wanted))
            if position % 3 == 0:
                some = [w and i % 2 == position % 2 for i, w in enumerate(wanted)]
                yield Sample(f"{s.name}, {name}, some", (*args, rows, some))


def _wide(args: tuple) -> tuple[int, ...]:
    """Results that are softmaxes, and what is kept of every softmax behind them."""
    parsed = SegmentProgram.parse(args[3])
    results = parsed.results
    kept = range(len(results), len(results) + 2 * len(parsed.softmaxes))
    return (*(i for i, result in enumerate(results) if result[0] == "softmax"), *kept)


def _large(dtype) -> tuple:
    return (*WIDE, leaves_of(GINE, 1, 40, _LARGE, dtype), GINE, 1)


def _large_grad(dtype) -> tuple:
    args = _large(dtype)
    return (*args, rows_of(args), differentiable(GINE))


_ROW, _F = torch.ones(1, 4), torch.ones(1, 2)
_REFUSED = (
    ((*TINY, [torch.ones(1, 4, dtype=torch.int64)], "src -> sum 0", 1), NOT_FLOAT),
    ((*TINY, [_ROW], "source -> sum 0", 1), "leaves out of src, dst"),
    ((*TINY, [_ROW], "src | relu 1 -> sum 1", 1), "values before 1"),
    ((*TINY, [_ROW], "src | square 0 -> sum 1", 1), "steps out of"),
    ((*TINY, [_ROW, _ROW], "src -> sum 0", 1), "1 tensors"),
    ((*TINY, [_ROW, _ROW.double()], "src dst | add 0 1 -> sum 2", 1), r"leaves of torch.float32; got torch.float64"),
    ((*TINY, [_ROW], "src -> max 0", 1), "'softmax score value', 'sum value', 'mean value' or 'edges value'"),
    ((*TINY, [_ROW], "src -> sum 0", 3), "columns in 3 heads; got 4"),
    ((*TINY, [_ROW, torch.ones(2, 4)], "src dst | add 0 1 -> sum 2", 1), r"dst \[1, 4\]; got \[2, 4\]"),
    ((*TINY, [_ROW, torch.ones(1, 5)], "src edge | add 0 1 -> sum 2", 1), r"edge \[1, 4\]; got \[1, 5\]"),
    ((*TINY, [_ROW, torch.ones(2, 4)], "src src | add 0 1 -> sum 2", 1), r"src \[1, 4\]; got \[2, 4\]"),
    ((*TINY, [_ROW, _F, torch.ones(4, 3)], "src narrow_plain | add 0 1 -> sum 2", 1), r"a weight \[4, K\]"),
    ((*TINY, [torch.ones(1, 17), torch.ones(4, 17)], "narrow_plain -> sum 0", 1), "1 to 16 columns"),
)

OPS = {
    "segment": Op(_segment, _large, errors=_REFUSED, wide=_wide),
    "segment_grad": Op(
        _segment_grad, _large_grad,
        errors=(
            ((*TINY, [_ROW], "src -> sum 0", 1, [_F], [True]), r"rows \[\[1, 4\]\] for a gradient"),
            ((*TINY, [_ROW], "src -> mean 0", 1, [_ROW], [True]), r"rows \[\[1, 4\], \[2\]\] for a gradient"),
            ((*TINY, [_F, torch.ones(4, 2)], "narrow_plain -> sum 0", 1, [_ROW], [True] * 2), "no gradient of narrow"),
        ),
    ),
}  # fmt: skip
