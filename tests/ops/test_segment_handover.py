"""What the first pass of a segment program's gradient hands over to the second."""

import itertools

import pytest

from joestar.kernels.segment_gradient import segment_gradient
from joestar.kernels.segment_handover import cut, handover
from joestar.kernels.segment_program import SegmentProgram
from ops.segments import FILM, GATED, GINE, PER_COLUMN

EVERY_CUT = tuple(itertools.product((False, True), repeat=3))
ATTENTION = (
    "narrow_plain dst src src+ bits | add 2 0 | mul 1 5 | total 6 | mul_scalar 7 0.5 | add 3 0 | mul_scalar 4 2.0"
    " | mul 9 10 -> softmax 8 11"
)


def made(text: str, wanted=None, heads: int = 4, width: int = 128):
    program = SegmentProgram.parse(text).apart
    if wanted is None:
        wanted = tuple(kind not in ("bits", "src_row") for kind in program.leaves)
    line = segment_gradient(program, wanted)
    return line, handover(line, heads, width, 4, 4)


def read(found, own: int) -> set[str]:
    """Kinds of the leaves that the second pass reads, of the program's own and what is handed over."""
    return {kind for leaf, kind in enumerate(found.second.leaves) if leaf in found.second.read and leaf < own}


def test_attention_hands_over_numbers_of_heads():
    """Two rows of destinations are left, and no scores: neither edge features nor bits of dropout are read again."""
    line, found = made(ATTENTION)
    assert (len(found.heads), found.gates, found.rows) == (2, (), ())
    assert read(found, len(line.leaves)) == {"dst"}
    assert {step[0] for step in found.second.steps} == {"spread", "mul"}


def test_film_hands_over_a_row_and_bits():
    """``grad / degree * gamma`` and where the ReLU lets it through: one row in place of three."""
    line, found = made(FILM, heads=1)
    assert (found.heads, found.gates, len(found.rows)) == ((), ((6, "relu_grad"),), 1)
    assert not read(found, len(line.leaves))
    assert [step[0] for step in found.second.steps] == ["relu_grad"]


def test_gatv2_hands_over_both():
    line, found = made(GATED)
    assert (len(found.heads), found.gates, found.rows) == (2, ((8, "leaky_relu_grad"),), ())
    assert read(found, len(line.leaves)) == {"vector", "dst"}


@pytest.mark.parametrize("text", [GINE, PER_COLUMN, "dst src src+ | add 0 1 | sigmoid 3 | mul 4 2 -> sum 5"])
def test_nothing_is_handed_over_where_it_saves_nothing(text):
    line, found = made(text, heads=1)
    assert (found.heads, found.gates, found.rows) == ((), (), ())
    assert found.second.leaves == line.leaves


@pytest.mark.parametrize("asked", EVERY_CUT)
def test_without_a_first_pass_nothing_is(asked):
    """Only gradients of sources are wanted."""
    line = segment_gradient(SegmentProgram.parse(FILM).apart, (False, False, True))
    found = cut(line, asked)
    assert (found.heads, found.gates, found.rows) == ((), (), ())


@pytest.mark.parametrize("asked", EVERY_CUT)
@pytest.mark.parametrize("text", [ATTENTION, FILM, GATED])
def test_the_first_pass_keeps_its_numbers(text, asked):
    """Steps are added behind the gradient's own."""
    program = SegmentProgram.parse(text).apart
    line = segment_gradient(program, tuple(kind not in ("bits", "src_row") for kind in program.leaves))
    found = cut(line, asked)
    assert found.first.steps[: len(line.steps)] == line.steps and found.first.results == line.results
    handed = len(found.heads) + len(found.gates) + len(found.rows)
    assert len(found.second.leaves) == len(line.leaves) + handed
    assert found.second.read >= set(range(len(line.leaves), len(line.leaves) + handed))
