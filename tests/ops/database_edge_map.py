"""The op database: messages of edge programs."""

import torch

from joestar.kernels.edge_program import EdgeProgram

from .samples import EDGES, NOT_FLOAT, NUM_DST, NUM_SRC, TINY, WIDE, Op, Sample, every, values

GINE = "src narrow | add 0 1 | relu 2"
GATV2 = "src dst vector | add 0 1 | leaky_relu 3 0.2 | mul 4 2"
EVERY_LEAF = (
    "src dst edge scalar vector narrow narrow_plain | add 0 1 | mul 7 3 | add 8 2 | mul 9 4 | add 10 5 | add 11 6"
)
PROGRAMS = (
    ("src", 5, "sum"),
    (GINE, 6, "sum"),
    (GATV2, 6, "heads:2"),
    (EVERY_LEAF, 5, "mean"),
    ("src edge scalar | sub 0 1 | silu 3 | mul_scalar 4 -1.5 | maximum 5 2", 3, "sum"),
    ("dst narrow_plain vector | minimum 0 1 | sigmoid 3 | add_scalar 4 1.5 | div 2 5 | neg 6", 17, "heads:1"),
    ("src dst | mul 0 1 | tanh 2 | exp 3 | elu 4 0.7 | abs 5", 8, "heads:4"),
)
"""(program, W, reduction)"""
NARROW = 3


def leaves_of(program: str, width: int, num_src: int, num_dst: int, edges: int, valid: int, dtype) -> list:
    """Tensors for a program's leaves; NaN in edges' rows from ``valid`` on."""
    out = []
    for kind in EdgeProgram.parse(program).leaves:
        seed = 10 * len(out)
        rows = {"src": num_src, "dst": num_dst, "edge": edges}
        if kind in rows:
            out.append(values((rows[kind], width), dtype, seed, valid if kind == "edge" else None))
        elif kind == "scalar":
            out.append(values((edges, 1), dtype, seed, valid))
        elif kind == "vector":
            out.append(values((width,), dtype, seed))
        else:
            out += [values((edges, NARROW), dtype, seed, valid), values((width, NARROW), dtype, seed + 1)]
            out += [values((width,), dtype, seed + 2)] if kind == "narrow" else []
    return out


def differentiable(program: str) -> list[bool]:
    """Which of the tensors may have a gradient."""
    out = []
    for kind in EdgeProgram.parse(program).leaves:
        out += {"narrow": [False, True, True], "narrow_plain": [False, True]}.get(kind, [True])
    return out


def _edge_map(dtype, ids):
    for s in every(ids):
        for program, width, reduce in PROGRAMS:
            leaves = leaves_of(program, width, s.num_src, s.num_dst, s.indices.numel(), s.edges, dtype)
            yield Sample(f"{s.name}, {program}, {reduce}", (s.indptr, s.indices, leaves, program, reduce))


def grad_shape(args: tuple) -> tuple:
    """Shape of the result of ``edge_map`` for these arguments."""
    indptr, indices, leaves, _, reduce = args
    heads = reduce.partition(":")[2]
    width = leaves[0].shape[1]
    return (indices.numel(), int(heads)) if heads else (indptr.numel() - 1, width)


def _edge_map_grad(dtype, ids):
    for position, sample in enumerate(_edge_map(dtype, ids)):
        shape, edges = grad_shape(sample.args), int(sample.args[0][-1])
        grad = values(shape, dtype, 5, edges if "heads" in sample.args[-1] else None)
        wanted = differentiable(sample.args[3])
        yield Sample(sample.case, (*sample.args, grad, wanted))
        if position % 3 == 0:
            some = [w and i % 2 == position % 2 for i, w in enumerate(wanted)]
            yield Sample(f"{sample.case}, some", (*sample.args, grad, some))


def _large(dtype, program: str = GINE, reduce: str = "sum") -> tuple:
    return (*WIDE, leaves_of(program, 40, NUM_SRC, NUM_DST, EDGES, EDGES, dtype), program, reduce)


def _large_grad(dtype) -> tuple:
    args = _large(dtype)
    return (*args, values(grad_shape(args), dtype, 5), differentiable(GINE))


_ROW, _F = torch.ones(1, 4), torch.ones(1, 2)
_REFUSED = (
    ((*TINY, [torch.ones(1, 4, dtype=torch.int64)], "src", "sum"), NOT_FLOAT),
    ((*TINY, [_ROW], "source", "sum"), "leaves out of src, dst"),
    ((*TINY, [_ROW], "src | relu 1", "sum"), "values before 1"),
    ((*TINY, [_ROW], "src | square 0", "sum"), "steps out of"),
    ((*TINY, [_ROW, _ROW], "src", "sum"), "1 tensors"),
    ((*TINY, [_ROW, _ROW.double()], "src dst | add 0 1", "sum"), "one dtype"),
    ((*TINY, [_ROW], "src", "max"), "'sum', 'mean' or 'heads:H'"),
    ((*TINY, [_ROW], "src", "heads:3"), "columns in 3 heads; got 4"),
    ((*TINY, [_ROW, torch.ones(2, 4)], "src dst | add 0 1", "sum"), r"dst \[1, 4\]; got \[2, 4\]"),
    ((*TINY, [_ROW, torch.ones(1, 5)], "src edge | add 0 1", "sum"), r"edge \[1, 4\]; got \[1, 5\]"),
    ((*TINY, [_ROW, torch.ones(2, 4)], "src src | add 0 1", "sum"), r"sources' rows \[1, 4\]; got \[2, 4\]"),
    ((*TINY, [_ROW, _F, torch.ones(4, 3)], "src narrow_plain | add 0 1", "sum"), r"a weight \[4, K\]"),
    ((*TINY, [torch.ones(1, 17), torch.ones(4, 17)], "narrow_plain", "sum"), "1 to 16 columns"),
)

OPS = {
    "edge_map": Op(_edge_map, _large, errors=_REFUSED),
    "edge_map_grad": Op(
        _edge_map_grad, _large_grad,
        errors=(
            ((*TINY, [_ROW], "src", "sum", _F, [True]), r"grad \[1, 4\]"),
            ((*TINY, [_F, torch.ones(4, 2)], "narrow_plain", "sum", _ROW, [True, True]), "no gradient of narrow"),
        ),
    ),
}  # fmt: skip
