"""Segment programs of messages, compiled: every dtype at sizes of a real block, against float64; CUDA graphs."""

import pytest
import torch
from ops.segments import EVERY_LEAF, GATV2, GINE, differentiable

from joestar.kernels.segment_gradient import grad_rows
from joestar.kernels.segment_program import SegmentProgram
from joestar.ops import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ops = torch.ops.joestar
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error relative to the largest value; sums over all edges cancel."""
CASES = [(GINE, 100, 1), (GINE.replace("sum", "mean"), 128, 1), (GATV2, 128, 4), (GATV2, 100, 4), (GATV2, 47, 1),
         (EVERY_LEAF.replace("mean", "sum"), 100, 1), (EVERY_LEAF, 300, 1)]  # fmt: skip
ROWS, NODES, DEGREE, PADDING, COLUMNS = 14_700, 60_000, 10, 500, 4


def normal(*shape, dtype, scale=1.0):
    return (torch.randn(shape, device="cuda", dtype=torch.float64) * scale).to(dtype)


def call(program, width, heads, dtype, table=0):
    """Arguments of ``segment`` over a padded block; ``table``: so many rows of sources, read by global ids."""
    torch.manual_seed(0)
    degrees = torch.randint(0, 2 * DEGREE + 1, (ROWS,), device="cuda")
    degrees[-100:] = 0
    indptr = torch.zeros(ROWS + 1, dtype=torch.int64, device="cuda")
    torch.cumsum(degrees, 0, out=indptr[1:])
    valid = int(indptr[-1])
    edges, num_src = valid + PADDING, table or NODES
    indices = torch.randint(0, num_src, (edges,), device="cuda", dtype=torch.int32)
    leaves = []
    for kind in SegmentProgram.parse(program).leaves:
        own = [normal(edges, COLUMNS, dtype=dtype), normal(width, COLUMNS, dtype=dtype, scale=0.5)]
        leaves += {
            "src": lambda: [normal(num_src, width, dtype=dtype)],
            "dst": lambda: [normal(ROWS, width, dtype=dtype)],
            "edge": lambda: [normal(edges, width, dtype=dtype)],
            "scalar": lambda: [normal(edges, dtype=dtype)],
            "vector": lambda: [normal(width, dtype=dtype)],
            "narrow": lambda own=own: [*own, normal(width, dtype=dtype)],
            "narrow_plain": lambda own=own: own,
        }[kind]()
    for leaf in leaves:
        if leaf.shape[0] == edges:
            leaf[valid:] = torch.nan
    return indptr, indices, leaves, program, heads


def in_double(args):
    indptr, indices, leaves, program, heads = args
    return indptr, indices, [leaf.double() for leaf in leaves], program, heads


def rows_of(args, grad):
    """What the gradient reads besides the leaves; ``grad`` is that of the result."""
    indptr, _, _, program, heads = args
    return grad_rows(SegmentProgram.parse(program), heads, grad.shape[1], indptr, [grad], [grad])


def one(results):
    """The result of a program that has one."""
    (result,) = results
    return result


def check(ours, good, dtype, case):
    """A few of millions of arguments are so close to 0 that ReLU's slope may be either: these entries may be off."""
    assert ours.dtype == dtype and ours.shape == good.shape and torch.isfinite(ours).all(), case
    if not good.numel():  # no gradient is wanted
        return
    error, largest = (ours.double() - good).abs(), max(1.0, float(good.abs().max()))
    bound = TOLERANCE[dtype] * largest
    found = f"{case}: error {float(error.max()):.3g} at values up to {largest:.3g}"
    assert int((error > bound).sum()) <= 20 and float(error.max()) <= bound + 20, found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("program", "width", "heads"), CASES)
def test_real_sizes(program, width, heads, dtype):
    args = call(program, width, heads, dtype)
    expected = one(reference.segment(*in_double(args)))
    check(one(ops.segment(*args)), expected, dtype, "result")
    grad, wanted = normal(*expected.shape, dtype=dtype), differentiable(program)
    good = reference.segment_grad(*in_double(args), rows_of(args, grad.double()), wanted)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            found = ops.segment_grad(*args, rows_of(args, grad), wanted)
        finally:
            torch.use_deterministic_algorithms(False)
        for place, (ours, exact) in enumerate(zip(found, good, strict=True)):
            check(ours, exact, dtype, f"gradient of tensor {place}, deterministic {deterministic}")


def test_rows_of_a_large_table():
    args = call(GINE, 100, 1, torch.float32, table=2_450_000)
    check(one(ops.segment(*args)), one(reference.segment(*in_double(args))), torch.float32, "result")
    grad, wanted = normal(ROWS, 100, dtype=torch.float32), [False, False, True, True]
    good = reference.segment_grad(*in_double(args), rows_of(args, grad.double()), wanted)
    for ours, expected in zip(ops.segment_grad(*args, rows_of(args, grad), wanted), good, strict=True):
        check(ours, expected, torch.float32, "gradients of weight and bias")


@pytest.mark.parametrize(("program", "width", "heads"), CASES[:3])
def test_inside_a_cuda_graph(program, width, heads):
    args = call(program, width, heads, torch.float32)
    grad, wanted = normal(*one(ops.segment(*args)).shape, dtype=torch.float32), differentiable(program)
    rows = rows_of(args, grad)

    def run():
        return [*ops.segment(*args), *ops.segment_grad(*args, rows, wanted)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    args[2][0].mul_(-1)
    graph.replay()
    for ours, good in zip(results, run(), strict=True):
        torch.testing.assert_close(ours, good, rtol=1e-4, atol=1e-3)
