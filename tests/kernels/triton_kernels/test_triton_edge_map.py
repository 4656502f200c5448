"""Messages of edge programs in Triton: every step, setting and kind of leaf, against the float64 reference."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from kernel_checks import check_close, check_op, in_double, tensors
from ops.database_edge_map import EVERY_LEAF, GATV2, GINE, PROGRAMS, differentiable, grad_shape, leaves_of
from ops.samples import values
from ops.structures import structures
from ops.test_edge_map import EVERY_STEP, padded

from joestar.kernels import gpu, gpu_edge_map_grad, tune
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]
STRUCTURE = {s.name: s for s in structures()}


def call(name, program, width, reduce, dtype=torch.float32, ids=torch.int32):
    """Arguments of ``edge_map`` over a structure."""
    s = STRUCTURE[name].to(ids)
    leaves = leaves_of(program, width, s.num_src, s.num_dst, s.indices.numel(), s.edges, dtype)
    return s.indptr, s.indices, leaves, program, reduce


def with_grad(args):
    """Arguments of ``edge_map_grad``: all gradients there are."""
    return (*args, values(grad_shape(args), args[2][0].dtype, 5), differentiable(args[3]))


def check(args, case):
    """Results and gradients against the reference in float64."""
    dtype, again = args[2][0].dtype, with_grad(args)
    check_close(gpu.edge_map(*args), reference.edge_map(*in_double(args)), dtype, case)
    for ours, good in zip(gpu.edge_map_grad(*again), reference.edge_map_grad(*in_double(again)), strict=True):
        check_close(ours, good, dtype, case)


@pytest.mark.parametrize("program", [program for _, program in EVERY_STEP], ids=[name for name, _ in EVERY_STEP])
def test_every_step(program):
    for dtype in (torch.float32, torch.float64):
        check(call("isolated", program, 5, "sum", dtype), program)


def test_linked_gradients(atomic):
    """Without deterministic algorithms sources add up lists of their edges."""
    check_op(gpu.edge_map_grad, "edge_map_grad", torch.float32, torch.int32, "cpu", 14)
    check_op(gpu.edge_map_grad, "edge_map_grad", torch.float16, torch.int64, "cpu", 5)


HARD = [
    (GINE, 300, "mean"),  # rows of several tiles
    (EVERY_LEAF, 300, "sum"),
    (GATV2, 12, "heads:12"),  # more heads than are read one by one
    (GATV2, 1040, "heads:13"),  # heads of several tiles, the last one of fewer
    (GATV2, 300, "heads:1"),  # a head wider than a tile
    (EVERY_LEAF, 39, "heads:3"),
]


@pytest.mark.parametrize(("program", "width", "reduce"), HARD)
def test_hard_shapes(program, width, reduce):
    check(call("isolated", program, width, reduce), f"{program}, {width}, {reduce}")


@pytest.mark.parametrize("columns", [1, 7, 16])
@pytest.mark.parametrize("kind", ["narrow", "narrow_plain"])
def test_narrow_features(columns, kind, monkeypatch):
    monkeypatch.setattr("ops.database_edge_map.NARROW", columns)
    check(call("duplicates and loops", f"src {kind} | mul 0 1 | relu 2", 6, "sum"), f"{columns} columns")


@pytest.mark.parametrize(("program", "width", "reduce"), PROGRAMS)
def test_padding_is_never_read(program, width, reduce, atomic):
    """Padding of NaN: the same results and gradients, 0 behind."""
    exact = call("bipartite", program, width, reduce)
    more = padded(exact)
    whole = values(grad_shape(exact), torch.float32, 5)
    grad = whole.new_full(grad_shape(more), torch.nan)
    grad[: whole.shape[0]] = whole
    wanted = differentiable(program)
    found = [gpu.edge_map(*more), *gpu.edge_map_grad(*more, grad, wanted)]
    expected = [gpu.edge_map(*exact), *gpu.edge_map_grad(*exact, whole, wanted)]
    for ours, good in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[: good.shape[0]], good)
        assert not ours[good.shape[0] :].any()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("program", "width", "reduce"), [PROGRAMS[1], PROGRAMS[2], (EVERY_LEAF, 7, "mean")])
def test_every_setting(program, width, reduce, deterministic, monkeypatch):
    """Every candidate of the launch settings, over destinations with several edges each."""
    torch.use_deterministic_algorithms(deterministic)
    args = call("duplicates and loops", program, width, reduce)
    again = with_grad(args)
    chosen, tried = [0], []

    def choose(kernel, shape, candidates, launch, *rest, **kwargs):
        tried.append(len(candidates))
        return candidates[min(chosen[0], len(candidates) - 1)]

    monkeypatch.setattr(tune, "choose", choose)
    good = [reference.edge_map(*in_double(args)), *reference.edge_map_grad(*in_double(again))]
    while not tried or chosen[0] < max(tried):
        for ours, exact in zip([gpu.edge_map(*args), *gpu.edge_map_grad(*again)], good, strict=True):
            check_close(ours, exact, torch.float32, f"{program}, setting {chosen[0]}")
        chosen[0] += 1
    assert max(tried) >= 3


@pytest.mark.parametrize("grid", [1, 3])
def test_a_program_takes_several_tiles(grid, monkeypatch):
    """Gradients of vectors and weights are added up over tiles of destinations, then over programs."""
    configs = [{"ROWS": 2, "num_warps": 1, "GRID": grid}]
    monkeypatch.setattr(gpu_edge_map_grad, "_grid_configs", lambda *sizes: configs)
    for program, width, reduce in ((GINE, 6, "mean"), (EVERY_LEAF, 7, "sum"), (GATV2, 12, "heads:4")):
        for name in ("bipartite", "isolated"):
            check(call(name, program, width, reduce), f"{program}, {name}, {grid} programs")


def test_same_bits_in_every_run():
    args = with_grad(call("bipartite", GINE, 6, "sum"))
    first = tensors(gpu.edge_map_grad(*args))
    for ours, good in zip(tensors(gpu.edge_map_grad(*args)), first, strict=True):
        assert torch.equal(ours, good)
