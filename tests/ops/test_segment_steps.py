"""Steps of segment programs: their text, numerical gradients, and subgradients, which are PyTorch's."""

import pytest
import torch

from joestar.kernels.segment_gradient import segment_gradient
from joestar.kernels.segment_program import SegmentProgram
from joestar.kernels.segment_steps import BINARY, MEANING, UNARY, WITH_NUMBER

from .samples import values
from .segments import GINE, leaves_of, structure

ops = torch.ops.joestar
EVERY_STEP = [
    *((name, f"src dst | {name} 0 1 -> sum 2") for name in BINARY),
    *((name, f"src | {name} 0 -> sum 1") for name in UNARY),
    *((name, f"src | {name} 0 -0.3 -> sum 1") for name in WITH_NUMBER),
]
EACH = pytest.mark.parametrize("program", [text for _, text in EVERY_STEP], ids=[name for name, _ in EVERY_STEP])
SPECIAL = torch.tensor([[-1.0, -0.0, 0.0, 2.0]], dtype=torch.float64)


def test_every_step_is_there():
    """Whatever PyTorch function a step stands for, ``div`` and ``exp`` among them."""
    assert {name for name, _ in EVERY_STEP} == {*MEANING} and all(f"| {name} " in text for name, text in EVERY_STEP)


def test_numbers_keep_their_bits():
    program = SegmentProgram(("src",), (("mul_scalar", 0, 0.1 + 0.2), ("leaky_relu", 1, 1e-30)), (("sum", 2),))
    assert SegmentProgram.parse(str(program)) == program


@EACH
def test_numerical_gradients(program):
    s = structure("isolated")
    leaves = [leaf.requires_grad_() for leaf in leaves_of(program, 1, 3, s, torch.float64)]
    assert torch.autograd.gradcheck(lambda *v: ops.segment(s.indptr, s.indices, list(v), program, 1)[0], leaves)


@EACH
def test_subgradients_are_pytorchs(program):
    """At zeros and at ties, against autograd of the same function."""
    name, *numbers = program.split("| ")[1].partition(" ->")[0].split()
    pair = name in BINARY
    leaves = [SPECIAL.clone().requires_grad_() for _ in range(2 if pair else 1)]
    expected = MEANING[name](*leaves, *([] if pair else map(float, numbers[1:])))
    expected = torch.autograd.grad(expected.nan_to_num(0).sum(), leaves)
    (y,) = ops.segment(torch.tensor([0, 1]), torch.tensor([0]), leaves, program, 1)
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for ours, good in zip(found, expected, strict=True):
        if name == "div":
            ours, good = ours[:, [0, 3]], good[:, [0, 3]]
        torch.testing.assert_close(ours, good, rtol=1e-14, atol=0)


def gradient(program: str, *wanted: bool):
    return segment_gradient(SegmentProgram.parse(program), wanted)


def test_gradients_have_no_dead_steps():
    line = gradient(GINE, False, True)
    assert line.leaves == ("src", "narrow", "dst")
    assert line.steps == (("add", 0, 1), ("relu_grad", 2, 3)) and line.results == (-1, 4)
    line = gradient("src dst | add 0 1 -> sum 2", True, False)
    assert line.steps == () and line.results == (2, -1) and line.read == {2, -1}
    line = gradient("src dst | mul 0 1 | relu 0 -> sum 3", True, True)
    assert line.results == (3, -1)  # the product is not part of the result
    line = gradient("src_head src -> softmax 0 1", False, True)  # without a gradient of the scores
    assert [step[0] for step in line.steps] == ["sub", "exp", "mul", "mul"] and line.results[0] == -1
    assert 1 not in line.read  # nor are the rows read


def test_rows_of_a_table():
    """Sources' rows may be those of a larger table, by global ids."""
    s = structure("bipartite")
    rows, *others = leaves_of(GINE, 1, 6, s, torch.float64)
    where = torch.randperm(100, generator=torch.Generator().manual_seed(0))[: s.num_src]
    table = torch.full((100, 6), torch.nan, dtype=torch.float64)
    table[where] = rows
    (y,) = ops.segment(s.indptr, where[s.indices], [table, *others], GINE, 1)
    (good,) = ops.segment(s.indptr, s.indices, [rows, *others], GINE, 1)
    assert torch.equal(y, good) and y.abs().sum() > 0


def test_means_by_hand():
    """One destination after the other: the gradient's division by the degree is in the program."""
    s = structure("bipartite")
    x = values((s.num_src, 3), torch.float64, 0).requires_grad_()
    (y,) = ops.segment(s.indptr, s.indices, [x], "src | tanh 0 -> mean 1", 1)
    rows = [x[s.indices[a:b]].tanh() for a, b in zip(s.indptr[:-1].tolist(), s.indptr[1:].tolist(), strict=True)]
    expected = torch.stack([row.mean(0) if len(row) else row.sum(0) for row in rows])
    grad = values(tuple(y.shape), torch.float64, 1)
    torch.testing.assert_close(y, expected)
    found, good = (torch.autograd.grad(out, x, grad) for out in (y, expected))
    torch.testing.assert_close(found, good)


def test_values_of_edges_by_hand():
    """Per head and per column; 0 behind the last edge."""
    s = structure("padded")
    x, w = values((s.num_src, 4), torch.float64, 0), values((s.indices.numel(), 4), torch.float64, 1, s.edges)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    ys = ops.segment(s.indptr, s.indices, leaves, "src edge | mul 0 1 | total 2 -> edges 3, edges 2", 2)
    product = x[s.indices[: s.edges]] * w[: s.edges]
    good = [product.view(-1, 2, 2).sum(-1), product]
    grads = [values(tuple(y.shape), torch.float64, 2, s.edges) for y in ys]
    for y, expected in zip(ys, good, strict=True):
        torch.testing.assert_close(y[: s.edges], expected)
        assert not y[s.edges :].any() and y.shape[0] > s.edges
    found = torch.autograd.grad(ys, leaves, grads)
    expected = torch.autograd.grad(good, leaves, [grad[: s.edges] for grad in grads])
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1].nan_to_num(0))
