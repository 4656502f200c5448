"""Segment programs, compiled: every dtype, random programs, and a size whose settings are timed."""

import pytest
import torch
from ops.segments import PROGRAMS, compare, random_program, structure
from ops.structures import structures, wide
from ops.test_segment import hostile

from joestar.kernels import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _moved(value, device: str):
    if isinstance(value, list):
        return [_moved(entry, device) for entry in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def on_gpu(function):
    """``function`` of the arguments' copies on the GPU; results on the CPU."""
    return lambda *args: _moved(function(*(_moved(value, "cuda") for value in args)), "cpu")


RUN = on_gpu(gpu.segment), on_gpu(gpu.segment_grad)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str,
)  # fmt: skip
def test_values_and_gradients(dtype, tolerance):
    for program, heads, width in PROGRAMS.values():
        for s in structures() if dtype == torch.float32 else [structure("padded", torch.int32)]:
            compare(RUN, program, heads, width, s, dtype, tolerance)


def test_random_programs():
    for seed in range(30):
        compare(RUN, random_program(seed), 1 + seed % 3, 1 + seed % 4, structure("padded"), torch.float32, 1e-4)


def test_hostile_scores():
    hostile(on_gpu(gpu.segment), torch.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "heads", "width"), [("dot", 4, 32), ("additive", 1, 47), ("per column", 1, 300)])
def test_large(name, heads, width, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        compare(RUN, PROGRAMS[name][0], heads, width, wide().to(torch.int32), torch.float32, 1e-3)
    finally:
        torch.use_deterministic_algorithms(False)
