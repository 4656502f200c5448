"""Gradients of segment programs whose first pass hands something over to the second: against float64, in Triton."""

import itertools

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from ops.segments import PROGRAMS, compare, random_program, structure
from ops.test_segment_handover import EVERY_CUT

from joestar.kernels import gpu, gpu_segment_grad
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.kernels.segment_handover import cut

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled")
RUN = gpu.segment, gpu.segment_grad


@pytest.fixture
def cuts(monkeypatch):
    """What was handed over, of gradients that are cut as the test asks."""
    made = []

    def ask(asked):
        def forced(line, *sizes):
            made.append(cut(line, asked))
            return made[-1]

        monkeypatch.setattr(gpu_segment_grad, "handover", forced)
        return made

    return ask


@pytest.mark.parametrize(
    ("name", "heads", "gates", "rows"), [("dot", 2, 0, 0), ("film", 0, 1, 1), ("gatv2, added up", 2, 1, 0)]
)
def test_values(name, heads, gates, rows, cuts):
    """Also of sources' edges in any order."""
    made = cuts((True, True, True))
    compare(RUN, *PROGRAMS[name], structure("padded", torch.int32), torch.float32, 2e-5)
    assert (len(made[-1].heads), len(made[-1].gates), len(made[-1].rows)) == (heads, gates, rows)


@pytest.mark.fuzz
@pytest.mark.parametrize("asked", EVERY_CUT)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_cut(name, asked, cuts, atomic):
    """Without deterministic algorithms: sources add up lists of their edges."""
    cuts(asked)
    for s in ("isolated", "bipartite", "duplicates and loops"):
        compare(RUN, *PROGRAMS[name], structure(s), torch.float32, 2e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (1, 9), (3, 12), (40, 8), (1, 300), (3, 100)])
@pytest.mark.parametrize("name", ["dot", "film", "gatv2, added up", "columns"])
def test_bytes_of_bits(name, heads, width, cuts):
    """Heads of less, and of no multiple of eight columns; of several tiles."""
    cuts((True, True, True))
    for dtype, tolerance in ((torch.float32, 4e-5), (torch.bfloat16, 3e-2), (torch.float64, 1e-11)):
        compare(RUN, PROGRAMS[name][0], heads, width, structure("isolated"), dtype, tolerance)


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, 90, 30))
def test_random_programs(first, cuts):
    for seed in range(first, first + 30):
        for asked in itertools.islice(EVERY_CUT, 1, None):
            made = cuts(asked)
            compare(RUN, random_program(seed), 1 + seed % 3, 1 + seed % 4, structure("padded"), torch.float64, 1e-10)
            if not (made[-1].heads or made[-1].gates or made[-1].rows):
                break


@pytest.mark.parametrize("value", [torch.nan, 0.0, -0.0, torch.inf])
def test_gates_are_those_of_relu(value, cuts):
    """NaN and infinity, in the argument of a ReLU and of a leaky one: the bits say what the steps would."""
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1], dtype=torch.int32)
    for step in ("relu 2", "leaky_relu 2 0.2"):
        program = f"src dst | add 0 1 | {step} -> sum 3"
        leaves = [torch.tensor([[value, 1.0], [-2.0, value]]), torch.zeros(2, 2)]
        found = []
        for asked in ((False, False, False), (True, True, True)):
            made = cuts(asked)
            grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            found.append(gpu.segment_grad(indptr, indices, leaves, program, 1, [grad], [True, True]))
        assert len(made[-1].gates) == 1
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
