"""Segment programs with an epilogue: values, what they are made of, registration and errors."""

import pytest
import torch

from joestar.kernels.dropout import positive_bits

from .segments import PROGRAMS, SHARED, leaves_of, structure

ops = torch.ops.joestar
ACTIVATED = ("rows", "gine", "film", "steps", "every leaf")
"""Programs whose rows can be activated."""


def epilogues(n, width, dtype):
    """(bias, bits, scale, addend), each with and without."""
    random = torch.Generator().manual_seed(3)
    bias, addend = (torch.randn(*shape, generator=random).to(dtype) for shape in ((width,), (n, width)))
    bits = torch.randint(-(2**31), 2**31, (n, -(-width // 32)), generator=random, dtype=torch.int32)
    yield bias, bits, 2.0, addend
    yield None, bits, 2.0, addend
    yield bias, None, 1.0, None
    yield None, None, 1.0, addend
    yield None, None, 1.0, None


def check_activated(run, name, width, s, dtype, tolerance):
    """``run`` against the program and the epilogue by themselves in float64."""
    program, heads, _ = PROGRAMS[name]
    leaves = leaves_of(program, heads, width, s, dtype)
    exact = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
    (rows,) = ops.segment(s.indptr, s.indices, exact, program, heads)
    for bias, bits, scale, addend in epilogues(s.num_dst, width, dtype):
        y, kept = run(s.indptr, s.indices, leaves, program, heads, bias, bits, scale, addend)
        wide = rows + sum(part.double() for part in (bias, addend) if part is not None)
        drop = 1.0 if bits is None else ops.dropout_apply(torch.ones_like(rows), bits, 0.0, False)
        assert y.dtype == dtype and tuple(y.shape) == (s.num_dst, width)
        torch.testing.assert_close(y.double(), torch.relu(wide) * drop * scale, atol=tolerance, rtol=tolerance)
        every = torch.full(kept.shape, -1, dtype=torch.int32)
        assert torch.equal(kept, positive_bits(y, every if bits is None else bits))


@pytest.mark.parametrize("name", ACTIVATED)
def test_values(name):
    for at in ("padded", "no rows", "isolated"):
        check_activated(ops.segment_bias_relu, name, 37, structure(at, torch.int32), torch.float64, 1e-12)


def given(name="film", width=5, dtype=torch.float64):
    s = structure("padded", torch.int32)
    program, heads, _ = PROGRAMS.get(name, (name, 1, width))
    return s.indptr, s.indices, leaves_of(program, heads, width, s, dtype), program, heads


def test_registration():
    args = given()
    n = args[0].numel() - 1
    for bias, bits, scale, addend in epilogues(n, 5, torch.float64):
        torch.library.opcheck(
            ops.segment_bias_relu, (*args, bias, bits, scale, addend), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("name", ["dot", "kept", "gatv2", "of nodes", SHARED])
def test_what_cannot_be_activated(name):
    with pytest.raises(ValueError, match="expected one sum or mean of at most 256 columns, without heads"):
        ops.segment_bias_relu(*given(name, 6), None, None, 1.0, None)


def test_not_wider_than_a_tile():
    with pytest.raises(ValueError, match="of 257"):
        ops.segment_bias_relu(*given("rows", 257), None, None, 1.0, None)
