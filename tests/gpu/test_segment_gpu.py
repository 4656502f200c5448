"""Segment programs, compiled: every dtype, random programs, and a size whose settings are timed."""

import pytest
import torch
import torch.nn.functional as F
from ops.segments import PROGRAMS, compare, random_program, structure
from ops.structures import structures, wide
from ops.test_segment import bits_of_many_heads, hostile

import joestar
from joestar.bench.planted import planted
from joestar.bench.user_models import FOLDER, example
from joestar.kernels import gpu

from .moved import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


RUN = on_gpu(gpu.segment), on_gpu(gpu.segment_grad)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str,
)  # fmt: skip
def test_values_and_gradients(dtype, tolerance):
    for program, heads, width in PROGRAMS.values():
        for s in structures() if dtype == torch.float32 else [structure("padded", torch.int32)]:
            compare(RUN, program, heads, width, s, dtype, tolerance)


@pytest.mark.long
def test_random_programs():
    for seed in range(30):
        compare(RUN, random_program(seed), 1 + seed % 3, 1 + seed % 4, structure("padded"), torch.float32, 1e-4)


def test_hostile_scores():
    hostile(on_gpu(gpu.segment), torch.float32)


def test_bits_of_many_heads():
    bits_of_many_heads(on_gpu(gpu.segment))


@pytest.mark.parametrize("program", ["src | mul 0 0 -> sum 1", "src scalar | mul 0 1 | total 2 -> edges 3"])
def test_float16_under_autocast(program):
    """What PyTorch computes in float32 is more than float16 holds: squares, and sums of columns."""
    leaves = [torch.full((4, 6), 300.0), torch.full((4,), 100.0)][: 2 if "scalar" in program else 1]
    indptr, indices = torch.tensor([0, 1, 4], device="cuda"), torch.tensor([0, 1, 2, 3], device="cuda")
    with torch.autocast("cuda", torch.float16):
        (y,) = torch.ops.joestar.segment(indptr, indices, [leaf.cuda().half() for leaf in leaves], program, 1)
    expected = [[180000.0]] * 4 if "scalar" in program else [[90000.0] * 6, [270000.0] * 6]
    assert y.dtype == torch.float32 and y.tolist() == expected


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "heads", "width"),
    [("dot", 4, 32), ("additive", 1, 47), ("per column", 1, 300), ("a score per edge", 1, 300)],
)
def test_large(name, heads, width, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        compare(RUN, PROGRAMS[name][0], heads, width, wide().to(torch.int32), torch.float32, 1e-3)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["dot_attention", "softmax_aggregation", "gat_edges", "gatv2"])
def test_training(name):
    """Losses with one op for the whole attention, with stored values, and with what passes take by themselves."""
    module, losses = example(FOLDER, name), []
    by_softmax = {"disable_passes": ("attention", "gather-attention")}  # which take additive scores, as of gat_edges
    for choice in ("fused", "stored", None):
        chosen = {"choices": {f"softmax:hop{hop}": choice for hop in range(2)}, **by_softmax} if choice else {}
        torch.manual_seed(0)
        graph = planted("tiny", torch.device("cuda"))
        options = module.prepare(graph) if hasattr(module, "prepare") else {}
        net = module.Net(graph.ndata["x"].shape[1], 32, 2, graph.num_classes, 0.3, **options).cuda()
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [5, 4]), F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-2),
            **chosen,
        )  # fmt: skip
        losses.append(torch.stack([loss.clone() for loss in step.epoch(graph.train_idx[:400], 100, shuffle=False)]))
        fired = [p for p in step.report().programs[0].places if p.pattern == "softmax-aggregate" and p.fired]
        assert choice is None or len(fired) == (2 if choice == "fused" else 0)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-3, atol=1e-3)
