"""Comparison of GPU kernels with their references, on a GPU and in Triton's interpreter."""

import itertools

import torch
from ops.database import OPS, TOLERANCE
from torch import Tensor
from torch.utils._pytree import tree_map

from joestar.ops import reference


def tensors(result) -> list[Tensor]:
    """The outputs of a kernel, without the gradient that is ``None``."""
    return [value for value in (result if isinstance(result, (tuple, list)) else (result,)) if value is not None]


def to_device(args, device: str):
    """The same arguments on a device."""
    return tree_map(lambda a: a.to(device) if isinstance(a, Tensor) else a, args)


def in_double(args):
    """Every float tensor in ``args`` as float64."""
    return tree_map(lambda a: a.double() if isinstance(a, Tensor) and a.is_floating_point() else a, args)


def check_equal(ours: Tensor, expected: Tensor, case: str) -> None:
    """Same shape, dtype and values (-0 and 0 count as equal)."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape), f"{case}: {ours.dtype} {list(ours.shape)}"
    assert torch.equal(ours, expected), f"{case}:\n{ours}\nexpected\n{expected}"


def check_close(ours: Tensor, exact: Tensor, dtype: torch.dtype, case: str) -> None:
    """Within the dtype's tolerance of a float64 result; integers must be equal."""
    if not exact.is_floating_point():
        return check_equal(ours, exact, case)
    assert (ours.dtype, ours.shape) == (dtype, exact.shape), f"{case}: {ours.dtype} {list(ours.shape)}"
    assert torch.isfinite(ours).all(), f"{case}: not finite:\n{ours}"
    error = (ours.double() - exact).abs().max().item() if ours.numel() else 0.0
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    assert error <= TOLERANCE[dtype] * scale, f"{case}: error {error:.3g} at values up to {scale:.3g}"
    return None


def some(samples, limit: int) -> list:
    """At most ``limit`` samples, spread evenly; the stride is odd, so that alternating cases all have a turn."""
    samples = list(samples)
    stride = -(-len(samples) // limit) | 1
    return samples[:: max(1, stride)]


def check_op(kernel, name: str, dtype, ids, device: str, limit: int, rounds_exactly: bool = True) -> None:
    """A kernel against its reference on the CPU, over samples of the op database.

    ``rounds_exactly`` is false where conversions to ``dtype`` do not round to nearest, as in the interpreter.
    """
    truth, ran = getattr(reference, name), 0
    for sample in some(OPS[name].samples(dtype, ids), limit):
        case = f"{name}: {sample.case}"
        ours = [value.cpu() for value in tensors(kernel(*to_device(sample.args, device)))]
        ours = OPS[name].defined(sample.args, ours)
        exact = sample.exact and (rounds_exactly or dtype is None)
        expected = tensors(truth(*(sample.args if exact else in_double(sample.args))))
        expected = OPS[name].defined(sample.args, expected)
        for i, (value, good) in enumerate(itertools.zip_longest(ours, expected)):
            own = OPS[name].result_dtype(i, dtype, sample.args)
            check_equal(value, good, case) if exact else check_close(value, good, own, case)
        ran += 1
    assert ran, f"no samples of {name}"
