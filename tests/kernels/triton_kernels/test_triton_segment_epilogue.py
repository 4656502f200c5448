"""Segment programs with an epilogue in Triton's interpreter, and the errors of the launcher."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.segments import structure
from ops.structures import structures
from ops.test_segment_bias_relu import ACTIVATED, check_activated, given

from joestar.kernels import gpu, gpu_segment, tune
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.segment_program import WIDEST_ACTIVATED, SegmentProgram

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")


@pytest.mark.parametrize("width", [1, 33, 128])
@pytest.mark.parametrize("name", ["film", "gine"])
def test_values(name, width):
    check_activated(gpu.segment_bias_relu, name, width, structure("padded", torch.int32), torch.float32, 2e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
@pytest.mark.parametrize("name", ACTIVATED)
def test_every_structure(name, dtype, tolerance):
    for s in structures():
        check_activated(gpu.segment_bias_relu, name, 40, s, dtype, tolerance)


@pytest.mark.parametrize("place", range(4))
def test_every_setting(place, monkeypatch):
    """Whatever is chosen by timing; bits of rows that are one tile."""
    monkeypatch.setattr(tune, "choose", lambda kernel, shape, given, *rest: given[min(place, len(given) - 1)])
    for width in (5, 128, WIDEST_ACTIVATED):
        check_activated(gpu.segment_bias_relu, "rows", width, structure("isolated"), torch.float32, 2e-5)


def test_rows_are_one_tile():
    for width in (1, 31, 200, WIDEST_ACTIVATED):
        sizes = gpu_segment.tile_of(SegmentProgram.parse("src -> sum 0"), width, 1)
        assert sizes["HEADS"] == 1 and sizes["BLOCK"] >= width


def test_nan_is_passed_on():
    """A model that has diverged must not train on as if nothing were."""
    indptr, indices, leaves, program, heads = given("rows", 5, torch.float32)
    y, _ = gpu.segment_bias_relu(indptr, indices, [leaves[0] * torch.nan], program, heads, None, None, 1.0, None)
    assert y[indptr.diff() > 0].isnan().all() and not y[indptr.diff() == 0].any()


@pytest.mark.parametrize(
    ("place", "match"), [(0, r"bias torch.float32 \[5\]"), (1, r"bits torch.int32"), (2, r"addend torch.float32")]
)
def test_errors(place, match):
    args = given("rows", 5, torch.float32)
    wrong = [None, None, None]
    wrong[place] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=match):
        gpu.segment_bias_relu(*args, wrong[0], wrong[1], 1.0, wrong[2])
