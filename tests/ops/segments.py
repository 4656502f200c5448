"""Segment programs to test with: those of known layers, and random ones; and their tensors."""

import itertools
import random

import torch

from joestar.kernels.segment_gradient import grad_rows
from joestar.kernels.segment_program import BESIDE, FULL, HEAD, SIZES, SegmentProgram, sizes_of
from joestar.kernels.segment_steps import BINARY, UNARY
from joestar.ops.aggregate.segment import reference, reference_grad

from .samples import values
from .structures import structures

DOT = "src dst src narrow bits | add 0 3 | dot 1 5 | mul_scalar 6 0.5 | add 2 3 | mul 8 4 -> softmax 7 9"
ADDITIVE = "src dst edge vector | add 0 1 | add 4 2 | leaky_relu 5 0.2 | mul 6 3 | total 7 -> softmax 8 0"
PER_COLUMN = "src vector | mul 0 1 -> softmax 2 0"
OF_NODES = (
    "src_head dst_head edge_head src vector_head scalar | add 0 1 | add 6 2 | leaky_relu 7 0.2 | mul 8 4 | mul 9 5"
    " -> softmax 10 3"
)
SHARED = "src_head dst_head src_row | add 0 1 | tanh 3 | mul 2 3 -> softmax 4 2, sum 5"
SEVERAL = (
    "src scalar narrow_plain | mul 0 1 | tanh 1 | total 3 | maximum 5 4 | spread 6 | mul 7 2"
    " -> sum 8, mean 6, softmax 4 8, softmax 0 6"
)
STORED = (
    "edge_head edge_head src_row edge edge bits | add 0 1 | leaky_relu 6 0.2 | add 3 4 | mul 8 5 | add 2 9"
    " -> softmax 7 10"
)
"""Several values per edge that are trained, of heads and of rows."""
GINE = "src narrow | add 0 1 | relu 2 -> sum 3"
GATV2 = "src dst vector | add 0 1 | leaky_relu 3 0.2 | mul 4 2 | total 5 -> edges 6"
FILM = "dst dst+ src | mul 1 2 | add 3 0 | relu 4 -> mean 5"
GATED = (
    "src dst vector bits | add 0 1 | leaky_relu 4 0.2 | mul 5 2 | total 6 | mul_scalar 3 2.0 | mul 0 8 -> softmax 7 9"
)
"""GATv2's attention, with dropout of its coefficients."""
EVERY_LEAF = (
    "src dst edge scalar vector narrow narrow_plain | add 0 1 | mul 7 3 | add 8 2 | mul 9 4 | add 10 5 | add 11 6"
    " -> mean 12"
)
COLUMNS = "src dst dst+ src src+ src+ | mul 2 0 | add 6 1 | relu 7 | dot 3 4 | add 8 5 -> mean 10, softmax 9 5"
"""Leaves that are columns of one matrix."""
KEPT = "src edge scalar dst_head | mul 0 1 | mul 2 3 | mul 4 5 -> edges 6, mean 4, edges 2, mean 5"
"""Values per edge and column, and per head, beside reductions."""
MESSAGES = {
    "rows": ("src -> sum 0", 1, 5),
    "gine": (GINE, 1, 6),
    "gatv2": (GATV2, 2, 3),
    "every leaf": (EVERY_LEAF, 1, 5),
    "steps": ("src edge scalar | sub 0 1 | silu 3 | mul_scalar 4 -1.5 | maximum 5 2 -> sum 6", 1, 3),
    "of a vector": (
        "dst narrow_plain vector | minimum 0 1 | sigmoid 3 | add_scalar 4 1.5 | div 2 5 | neg 6 | total 7 -> edges 8",
        1, 17,
    ),
    "heads": ("src dst | mul 0 1 | tanh 2 | exp 3 | elu 4 0.7 | abs 5 | total 6 -> edges 7", 4, 2),
}  # fmt: skip
"""Of one result, and without a softmax."""
PROGRAMS = {
    **MESSAGES,
    "kept": (KEPT, 2, 3),
    "columns": (COLUMNS, 2, 3),
    "film": (FILM, 1, 5),
    "gatv2, added up": (GATED, 2, 3),
    "dot": (DOT, 2, 3),
    "additive": (ADDITIVE, 2, 3),
    "per column": (PER_COLUMN, 1, 5),
    "a score per edge": ("scalar src narrow | add 1 2 | tanh 3 -> softmax 0 4", 1, 5),
    "of nodes": (OF_NODES, 3, 2),
    "shared rows": (SHARED, 3, 4),
    "several": (SEVERAL, 2, 3),
    "stored": (STORED, 2, 3),
    "one head": (DOT, 1, 5),
    "heads of one column": (ADDITIVE, 3, 1),
}
"""Name -> (program, H, columns of a head)."""
NARROW = 3


def random_program(seed: int) -> str:
    """Any leaves, one to five choices of steps of tame growth, one or two results, a softmax more often than not.

    Exponentials are those of numbers in (-1, 1), divisors lie in (0.3, 1.3).
    """
    rng = random.Random(seed)
    leaves = ["src", *rng.choices([*SIZES], k=rng.randint(1, 3))]
    rng.shuffle(leaves)
    pairs = enumerate(itertools.pairwise(leaves), 1)
    beside = tuple(leaf for leaf, (before, kind) in pairs if kind == before and kind in BESIDE)
    steps: list[tuple] = []

    def pick(least: int = 0) -> int:
        sizes = sizes_of(leaves, steps)
        return rng.choice([value for value, size in enumerate(sizes) if size >= least])

    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["binary", "binary", "unary", "number", "dot", "total", "spread", "div", "exp"])
        if kind == "binary":
            steps.append((rng.choice([op for op in BINARY if op != "div"]), pick(), pick()))
        elif kind == "unary":
            steps.append((rng.choice([op for op in UNARY if op != "exp"]), pick()))
        elif kind == "number":
            steps.append(
                (rng.choice(["leaky_relu", "elu", "add_scalar", "mul_scalar"]), pick(), rng.choice([0.3, 0.7]))
            )
        elif kind == "exp":
            steps.append(("tanh", pick()))
            steps.append(("exp", len(leaves) + len(steps) - 1))
        elif kind == "div":
            above, below = pick(), pick()
            steps.append(("sigmoid", below))
            steps.append(("add_scalar", len(leaves) + len(steps) - 1, 0.3))
            steps.append(("div", above, len(leaves) + len(steps) - 1))
        elif kind == "dot":
            steps.append(("dot", *rng.sample([pick(FULL), pick()], 2)))
        else:
            steps.append((kind, pick(FULL if kind == "total" else 0)))
    results = []
    for _ in range(rng.randint(1, 2)):
        last = len(leaves) + len(steps) - 1
        name = rng.choice(["softmax", "softmax", "sum", "mean", "edges"])
        results.append((name, last, pick()) if name == "softmax" else (name, last))
    return str(SegmentProgram(tuple(leaves), tuple(steps), tuple(results), beside))


def leaves_of(program: str, heads: int, width: int, s, dtype) -> list:
    """Tensors for a program's leaves over a structure; NaN in edges' rows behind the last one."""
    edges, columns, out = s.indices.numel(), {FULL: heads * width, HEAD: heads}, []
    parsed = SegmentProgram.parse(program)
    for leaf, kind in enumerate(parsed.leaves):
        if leaf in parsed.beside:
            wider = out.pop()
            out.append(torch.cat([wider, values((wider.shape[0], columns[FULL]), dtype, 100 + leaf)], 1))
            continue
        seed, size = 10 * len(out), columns.get(SIZES[kind], 1)
        family = kind.removesuffix("_head")
        if family in ("src", "dst", "edge"):
            rows = {"src": s.num_src, "dst": s.num_dst, "edge": edges}[family]
            out.append(values((rows, size), dtype, seed, s.edges if family == "edge" else None))
        elif kind == "src_row":
            out.append(values((s.num_src, width), dtype, seed))
        elif family == "vector":
            out.append(values((size,), dtype, seed))
        elif kind == "scalar":
            out.append(values((edges,), dtype, seed, s.edges))
        elif kind == "bits":
            generator = torch.Generator().manual_seed(seed)
            words = (edges, -(-heads // 32))
            out.append(torch.randint(-(2**31), 2**31, words, generator=generator, dtype=torch.int32))
        else:
            out += [values((edges, NARROW), dtype, seed, s.edges), values((size, NARROW), dtype, seed + 1)]
            out += [values((size,), dtype, seed + 2)] if kind == "narrow" else []
    return out


def differentiable(program: str) -> list[bool]:
    """Which of the tensors may have a gradient."""
    out, parsed = [], SegmentProgram.parse(program)
    for kind in (kind for leaf, kind in enumerate(parsed.leaves) if leaf not in parsed.beside):
        out += {"narrow": [False, True, True], "narrow_plain": [False, True], "bits": [False], "src_row": [False]}.get(
            kind, [True]
        )
    return out


def wide(leaves: list) -> list:
    """The same in float64."""
    return [leaf if leaf.dtype == torch.int32 else leaf.double() for leaf in leaves]


def compare(run, program: str, heads: int, width: int, s, dtype, tolerance: float) -> None:
    """``run``: (the op, its gradient). Both against autograd of plain PyTorch in float64."""
    leaves = leaves_of(program, heads, width, s, dtype)
    args = (s.indptr, s.indices, leaves, program, heads)
    ours, good = run[0](*args), reference(s.indptr, s.indices, wide(leaves), program, heads)
    results = len(SegmentProgram.parse(program).results)
    wanted, parsed = differentiable(program), SegmentProgram.parse(program)
    grads = [
        values(tuple(y.shape), dtype, seed, s.edges if parsed.results[seed][0] == "edges" else None)
        for seed, y in enumerate(good[:results])
    ]
    rows = [grad_rows(parsed, heads, heads * width, s.indptr, y, grads) for y in (ours, good)]
    found = run[1](*args, rows[0], wanted)
    expected = reference_grad(s.indptr, s.indices, wide(leaves), program, heads, rows[1], wanted)
    for position, (a, b) in enumerate(zip([*ours, *found], [*good, *expected], strict=True)):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        case = f"{program}, {heads} heads, {s.name}, tensor {position}"
        assert a.shape == b.shape and torch.isfinite(a).all(), case
        error = (a.double() - b.double()).abs().max().item() if b.numel() else 0.0
        assert error <= tolerance * scale, f"{case}: error {error:.3g} at values up to {scale:.3g}"


def structure(name: str, ids=torch.int64):
    """One of ``structures`` by name."""
    return next(s for s in structures() if s.name == name).to(ids)
