"""Segment programs in Triton: values and gradients of known layers and of random programs, against float64."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.samples import values
from ops.segments import (
    MESSAGES,
    PROGRAMS,
    compare,
    differentiable,
    leaves_of,
    random_program,
    structure,
)
from ops.structures import structures
from ops.test_segment import bits_of_many_heads, hostile, padded
from ops.test_segment_steps import EVERY_STEP

from joestar.kernels import gpu, gpu_links, gpu_segment_grad, tune
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.segment_gradient import grad_rows
from joestar.kernels.segment_program import SegmentProgram

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")
RUN = gpu.segment, gpu.segment_grad


@pytest.mark.parametrize("name", ["dot", "several", "every leaf", "kept", "columns"])
def test_values_and_gradients(name):
    compare(RUN, *PROGRAMS[name], structure("padded", torch.int32), torch.float32, 2e-5)


def test_a_score_per_edge_of_wide_rows():
    """One head of more columns than a tile: what the softmax leaves is a number per destination."""
    compare(RUN, PROGRAMS["a score per edge"][0], 1, 300, structure("isolated"), torch.float32, 4e-5)


def test_bits_of_many_heads():
    bits_of_many_heads(gpu.segment)


def test_hostile_scores():
    hostile(gpu.segment, torch.float32)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_structure(name, atomic):
    """Without deterministic algorithms: sources add up lists of their edges."""
    for s in structures():
        compare(RUN, *PROGRAMS[name], s, torch.float32, 2e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_other_dtypes(dtype, tolerance):
    for program, heads, width in PROGRAMS.values():
        compare(RUN, program, heads, width, structure("padded", torch.int32), dtype, tolerance)


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(first):
    s = structure("padded")
    for seed in range(first, first + 20):
        compare(RUN, random_program(seed), 1 + seed % 3, 1 + seed % 4, s, torch.float64, 1e-10)


@pytest.mark.fuzz
def test_random_programs_of_wide_rows():
    for seed in range(20):
        compare(RUN, random_program(seed), 1, 300, structure("isolated"), torch.float64, 1e-9)


@pytest.mark.fuzz
@pytest.mark.parametrize("program", [program for _, program in EVERY_STEP], ids=[name for name, _ in EVERY_STEP])
def test_every_step(program):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        compare(RUN, program, 1, 5, structure("isolated"), dtype, tolerance)


@pytest.mark.fuzz
@pytest.mark.parametrize("count", [1, 7, 16])
@pytest.mark.parametrize("kind", ["narrow", "narrow_plain"])
def test_narrow_features(count, kind, monkeypatch):
    monkeypatch.setattr("ops.segments.NARROW", count)
    program = f"src {kind} | mul 0 1 | relu 2 -> sum 3"
    compare(RUN, program, 1, 6, structure("duplicates and loops"), torch.float32, 2e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", MESSAGES)
def test_padding_is_never_read(name, atomic):
    """Padding of NaN: the same results and gradients, 0 behind."""
    program, heads, width = PROGRAMS[name]
    parsed, s, found = SegmentProgram.parse(program), structure("bipartite", torch.int32), []
    exact = (s.indptr, s.indices, leaves_of(program, heads, width, s, torch.float32), program, heads)
    for args in (exact, padded(exact)):
        ys, of_edges = gpu.segment(*args), parsed.results[0][0] == "edges"
        true = exact[1].numel() if of_edges else s.num_dst
        grad = torch.cat([values((true, ys[0].shape[1]), torch.float32, 5), ys[0][true:] + torch.nan])
        rows = grad_rows(parsed, heads, heads * width, args[0], ys, [grad])
        found.append([*ys, *gpu.segment_grad(*args, rows, differentiable(program))])
    for good, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours[: good.shape[0]], good)
        assert not ours[good.shape[0] :].any()


WIDE = [
    ("dot", 1, 300),  # a head wider than a tile
    ("dot", 40, 8),  # heads of several tiles, and of two words of bits
    ("additive", 3, 100),  # heads that are no power of two
    ("per column", 1, 700),  # columns of several tiles
    ("several", 5, 70),
    ("gine", 1, 300),
    ("every leaf", 1, 300),
    ("every leaf", 3, 13),  # of no heads
    ("gatv2", 12, 1),
    ("gatv2", 13, 80),
    ("kept", 1, 300),
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "heads", "width"), WIDE)
def test_wide_rows(name, heads, width):
    compare(RUN, PROGRAMS[name][0], heads, width, structure("isolated"), torch.float32, 4e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["dot", "per column", "several", "gine", "gatv2", "every leaf"])
def test_every_setting(name, deterministic, monkeypatch):
    """Every candidate of the launch settings, over destinations with several edges each."""
    torch.use_deterministic_algorithms(deterministic)
    chosen, tried = [0], []

    def choose(kernel, shape, candidates, *rest, **kwargs):
        tried.append(len(candidates))
        return candidates[min(chosen[0], len(candidates) - 1)]

    monkeypatch.setattr(tune, "choose", choose)
    while not tried or chosen[0] < max(tried):
        compare(RUN, *PROGRAMS[name], structure("duplicates and loops"), torch.float32, 2e-5)
        chosen[0] += 1
    assert max(tried) >= 3


@pytest.mark.fuzz
def test_a_program_takes_several_tiles(monkeypatch):
    """Gradients of vectors and weights are added up over tiles of destinations, then over programs."""
    for grid in (1, 3):
        configs = [{"ROWS": 2, "num_warps": 1, "GRID": grid}]
        monkeypatch.setattr(gpu_segment_grad, "_grid_configs", lambda *sizes, configs=configs: configs)
        for name in ("dot", "additive", "of nodes", "gine", "every leaf"):
            compare(RUN, *PROGRAMS[name], structure("bipartite"), torch.float32, 2e-5)


def test_no_racing_kernel_is_launched(monkeypatch):
    """In deterministic mode, which the fixtures switch on; two runs give the same bits."""
    monkeypatch.setattr(gpu_links, "_link_edges", None)
    s, (program, heads, width) = structure("isolated"), PROGRAMS["dot"]
    leaves = leaves_of(program, heads, width, s, torch.float32)
    args = (s.indptr, s.indices, leaves, program, heads)
    outputs = gpu.segment(*args)
    rows = grad_rows(SegmentProgram.parse(program), heads, heads * width, s.indptr, outputs, outputs)
    first, second = (gpu.segment_grad(*args, rows, differentiable(program)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and first[0].abs().sum() > 0
