"""Edge programs and their gradients: text, numerical gradients, subgradients, padding, registration."""

import pytest
import torch

from joestar.kernels.edge_program import BINARY, LEAVES, MEANING, UNARY, WITH_NUMBER, EdgeProgram, gradient

from .database_edge_map import GATV2, GINE, PROGRAMS, differentiable, grad_shape, leaves_of
from .samples import values
from .structures import structures

ops = torch.ops.joestar
STRUCTURE = {s.name: s for s in structures()}


def call(s, program, width, reduce, dtype=torch.float64):
    """Arguments of ``edge_map``; all that may have a gradient ask for one."""
    leaves = leaves_of(program, width, s.num_src, s.num_dst, s.indices.numel(), s.edges, dtype)
    leaves = [leaf.requires_grad_(w) for leaf, w in zip(leaves, differentiable(program), strict=True)]
    return s.indptr, s.indices, leaves, program, reduce


@pytest.mark.parametrize("text", [program for program, _, _ in PROGRAMS])
def test_text_of_a_program(text):
    program = EdgeProgram.parse(text)
    assert str(program) == text and EdgeProgram.parse(str(program)) == program
    assert program.result == len(program.leaves) + len(program.steps) - 1


def test_numbers_keep_their_bits():
    program = EdgeProgram(("src",), (("mul_scalar", 0, 0.1 + 0.2), ("leaky_relu", 1, 1e-30)))
    assert EdgeProgram.parse(str(program)) == program


@pytest.mark.parametrize("text", ["", "src | ", "src | relu", "src | relu 0.5", "src dst | add 0", "src | elu 0 x"])
def test_texts_that_are_no_program(text):
    with pytest.raises(ValueError, match="edge program: expected"):
        EdgeProgram.parse(text)


def test_gradients_have_no_dead_steps():
    line = gradient(EdgeProgram.parse(GINE), (False, True))
    assert line.steps == (("add", 0, 1), ("relu_grad", 2, 3)) and line.results == (-1, 4)
    line = gradient(EdgeProgram.parse("src dst | add 0 1"), (True, False))
    assert line.steps == () and line.results == (2, -1) and line.read == {2, -1}
    line = gradient(EdgeProgram.parse("src dst | mul 0 1 | relu 0"), (True, True))
    assert line.results == (3, -1)  # the product is not part of the result


EVERY_STEP = [*((name, f"src dst | {name} 0 1") for name in BINARY), *((name, f"src | {name} 0") for name in UNARY),
              *((name, f"src | {name} 0 -0.3") for name in WITH_NUMBER)]  # fmt: skip


@pytest.mark.parametrize("program", [program for _, program in EVERY_STEP], ids=[name for name, _ in EVERY_STEP])
def test_numerical_gradients_of_every_step(program):
    indptr, indices, leaves, *rest = call(STRUCTURE["isolated"], program, 3, "sum")
    assert torch.autograd.gradcheck(lambda *v: ops.edge_map(indptr, indices, list(v), *rest), leaves)


@pytest.mark.parametrize(("program", "width", "reduce"), PROGRAMS)
def test_numerical_gradients(program, width, reduce):
    args = call(STRUCTURE["isolated"], program, width, reduce)

    def run(*asked):
        given = iter(asked)
        leaves = [next(given) if leaf.requires_grad else leaf for leaf in args[2]]
        return ops.edge_map(*args[:2], leaves, *args[3:])

    assert torch.autograd.gradcheck(run, [leaf for leaf in args[2] if leaf.requires_grad])


SPECIAL = torch.tensor([[-1.0, -0.0, 0.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize("program", [program for _, program in EVERY_STEP], ids=[name for name, _ in EVERY_STEP])
def test_subgradients_are_pytorchs(program):
    """At zeros and at ties, against autograd of the same function."""
    name, *numbers = program.split("| ")[1].split()
    pair = name in BINARY
    leaves = [SPECIAL.clone().requires_grad_() for _ in range(2 if pair else 1)]
    expected = MEANING[name](*leaves, *([] if pair else map(float, numbers[1:])))
    expected = torch.autograd.grad(expected.nan_to_num(0).sum(), leaves)
    y = ops.edge_map(torch.tensor([0, 1]), torch.tensor([0]), leaves, program, "sum")
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for ours, good in zip(found, expected, strict=True):
        if name == "div":
            ours, good = ours[:, [0, 3]], good[:, [0, 3]]
        torch.testing.assert_close(ours, good, rtol=1e-14, atol=0)


def padded(args, rows=3, edges=5):
    """The same edges, with rows and edges behind them: rows of NaN, NaN for edges, ids of a source."""
    indptr, indices, leaves, program, reduce = args
    out, own = [], iter(leaves)
    for kind in EdgeProgram.parse(program).leaves:
        for part in range(LEAVES[kind]):
            leaf = next(own)
            more = {"dst": rows, "edge": edges, "scalar": edges, "narrow": edges, "narrow_plain": edges}.get(kind, 0)
            filler = leaf.new_full((0 if part else more, *leaf.shape[1:]), torch.nan)
            out.append(torch.cat([leaf.detach(), filler]).requires_grad_(leaf.requires_grad))
    indptr = torch.cat([indptr, indptr[-1:].expand(rows)])
    return indptr, torch.cat([indices, indices[:1].expand(edges)]), out, program, reduce


@pytest.mark.parametrize(("program", "width", "reduce"), PROGRAMS)
def test_padding_is_never_read(program, width, reduce):
    """Results and gradients are those without padding, which are NaN in places that must not be read, and 0 behind."""
    exact = call(STRUCTURE["bipartite"], program, width, reduce)
    results, whole = [], values(grad_shape(exact), torch.float64, 3)
    for args in (exact, padded(exact)):
        y = ops.edge_map(*args)
        grad = torch.cat([whole, whole.new_full((y.shape[0] - whole.shape[0], whole.shape[1]), torch.nan)])
        asked = [leaf for leaf in args[2] if leaf.requires_grad]
        results.append((y, *torch.autograd.grad(y, asked, grad)))
    for good, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours[: good.shape[0]], good)
        assert not ours[good.shape[0] :].any()


def test_rows_of_a_table():
    """Sources' rows may be those of a larger table, by global ids."""
    s = STRUCTURE["bipartite"]
    args = call(s, GINE, 6, "sum")
    where = torch.randperm(100)[: s.num_src]
    table = torch.full((100, 6), torch.nan, dtype=torch.float64)
    table[where] = args[2][0].detach()
    y = ops.edge_map(s.indptr, where[s.indices], [table, *args[2][1:]], *args[3:])
    assert torch.equal(y, ops.edge_map(*args)) and y.abs().sum() > 0


def test_features_have_no_gradient():
    indptr, indices, leaves, *rest = call(STRUCTURE["bipartite"], GINE, 6, "sum")
    leaves[1] = leaves[1].requires_grad_()
    with pytest.raises(ValueError, match="no gradient of narrow features"):
        ops.edge_map(indptr, indices, leaves, *rest)


@pytest.mark.parametrize("position", range(len(PROGRAMS)))
def test_registration(position):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, checked in (("isolated", checks), ("padded", (*checks, "test_aot_dispatch_dynamic"))):
        args = call(STRUCTURE[name], *PROGRAMS[position])
        torch.library.opcheck(ops.edge_map, args, test_utils=checked)
        plain = (*args[:2], [leaf.detach() for leaf in args[2]], *args[3:])
        grad = values(grad_shape(args), torch.float64, 5)
        torch.library.opcheck(ops.edge_map_grad, (*plain, grad, differentiable(args[3])), test_utils=checked)


@pytest.mark.parametrize(("program", "reduce"), [(GINE, "mean"), (GATV2, "heads:2")])
def test_many_chunks(program, reduce, monkeypatch):
    """A CPU takes some edges at a time: chunks may end within a destination."""
    from joestar.kernels import cpu_edge_map

    args = call(STRUCTURE["hub"], program, 6, reduce)
    grad, leaves = values(grad_shape(args), torch.float64, 5), [leaf.detach() for leaf in args[2]]
    again = (*args[:2], leaves, *args[3:], grad, differentiable(program))
    whole = [ops.edge_map(*args).detach(), *ops.edge_map_grad(*again)]
    monkeypatch.setattr(cpu_edge_map, "_CHUNK", 6 * 7)
    parts = [ops.edge_map(*args).detach(), *ops.edge_map_grad(*again)]
    for ours, good in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, good)
