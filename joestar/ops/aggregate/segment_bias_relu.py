"""``joestar::segment_bias_relu``: a segment program with bias, ReLU and dropout as its epilogue (thesis 5.3.2).

In no captured graph: a pass over the backend's graphs puts it there (``fusion/backend/segment_epilogue.py``).
"""

from torch import Tensor

from joestar.kernels.segment_program import SegmentProgram, check_activated, tensors_apart, width_of
from joestar.ops import shapes
from joestar.ops.aggregate.segment import ARGUMENTS, reference, result_shapes
from joestar.ops.dense.bias_relu import bias_relu
from joestar.ops.registry import define_gradient


def segment_bias_relu(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, bias: Tensor | None,
    bits: Tensor | None, scale: float, addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``bias_relu(segment(...)[0], bias, bits, scale, addend)``: ``[num_dst, W]``, and a bit for every entry that
    gradients reach.

    Args:
        indptr, indices, leaves, program, heads: see ``segment``; the program has one result, a sum or mean of at most
            256 columns that are not split into heads.
        bias, bits, scale, addend: see ``bias_relu``; those of floats are of the dtype of the leaves.
    """
    parsed = SegmentProgram.parse(program)
    check_activated(parsed, width_of(parsed, tensors_apart(parsed, leaves), heads))
    (rows,) = reference(indptr, indices, leaves, program, heads)
    return bias_relu(rows, bias, bits, scale, addend)


def _fake(indptr, indices, leaves, program, heads, bias, bits, scale, addend=None):
    (rows,) = result_shapes(indptr, indices, leaves, program, heads)
    return rows, shapes.words(rows)


define_gradient(
    f"segment_bias_relu({ARGUMENTS}, Tensor? bias, Tensor? bits, float scale, Tensor? addend=None) -> (Tensor, Tensor)",
    segment_bias_relu,
    fake=_fake, cuda="gpu_segment",
)  # fmt: skip
