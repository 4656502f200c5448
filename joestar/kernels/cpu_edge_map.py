"""Messages of an edge program on the CPU: some thousand edges at a time, so that their values stay in the cache.

Every function has the signature of its namesake in ``joestar.ops.reference``. Gradients are steps of the program's
gradient, not autograd's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.kernels.checks import check_ids, check_offsets, check_values, require
from joestar.kernels.cpu_spmm import scatter_dst
from joestar.kernels.edge_program import MEANING, EdgeProgram, check_leaves, check_wanted, gradient, grouped, heads_of

_CHUNK = 2**20
"""Numbers per value of a chunk of edges."""

STEPS = {
    **MEANING,
    "relu_grad": lambda grad, a: torch.where(a <= 0, 0, grad),
    "leaky_relu_grad": lambda grad, a, slope: torch.where(a > 0, grad, grad * slope),
    "elu_grad": lambda grad, a, alpha: torch.where(a > 0, grad, grad * alpha * torch.exp(a)),
    "sigmoid_grad": lambda grad, y: grad * y * (1 - y),
    "tanh_grad": lambda grad, y: grad * (1 - y * y),
    "abs_grad": lambda grad, a: grad * torch.sign(a),
    "silu_grad": lambda grad, a: grad * torch.sigmoid(a) * (1 + a * torch.sigmoid(-a)),
    "larger_grad": lambda grad, a, b: torch.where(a > b, grad, torch.where(a == b, grad / 2, 0)),
}
"""What all pointwise steps compute, those of gradients too."""


class _Chunk:
    """Edges ``first`` to ``last`` and their destinations, which are rows ``top`` to ``bottom``."""

    def __init__(self, indptr: Tensor, indices: Tensor, first: int, last: int):
        self.edges, self.src = slice(first, last), indices[first:last]
        edge = torch.arange(first, last, device="cpu")
        self.dst = torch.searchsorted(indptr, edge, right=True) - 1
        top, bottom = int(self.dst[0]), int(self.dst[-1]) + 1
        self.rows = slice(top, bottom)
        self.offsets = (indptr[top : bottom + 1] - first).clamp(0, last - first)

    def leaf(self, kind: str, tensors: tuple[Tensor, ...], wide: torch.dtype) -> Tensor:
        first = tensors[0]
        if kind in ("src", "dst"):
            return torch.index_select(first, 0, self.src if kind == "src" else self.dst).to(wide)
        if kind == "vector":
            return first.to(wide)
        value = first[self.edges].to(wide)
        if kind == "scalar":
            return value.reshape(-1, 1)
        return torch.nn.functional.linear(value, *(t.to(wide) for t in tensors[1:])) if "narrow" in kind else value

    def add_rows(self, out: Tensor, value: Tensor) -> None:
        """Adds the edges' values to the rows of their destinations."""
        out[self.rows] += scatter_dst(self.offsets, value.contiguous())


def _chunks(indptr: Tensor, indices: Tensor, width: int) -> Iterator[_Chunk]:
    count, size = int(indptr[-1]), max(1, _CHUNK // max(1, width))
    for first in range(0, count, size):
        yield _Chunk(indptr, indices, first, min(count, first + size))


def _run(steps: tuple, values: list[Tensor | None]) -> list[Tensor | None]:
    for name, *arguments in steps:
        values.append(STEPS[name](*(values[a] if isinstance(a, int) else a for a in arguments)))
    return values


def _checked(indptr, indices, leaves, program, reduce):
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    leaves, parsed = [check_values(leaf, "leaves") for leaf in leaves], EdgeProgram.parse(program)
    width = check_leaves(parsed, leaves, indptr.numel() - 1, indices.numel(), reduce)
    return indptr, indices, leaves, parsed, width, torch.promote_types(leaves[0].dtype, torch.float32)


def _degrees(indptr: Tensor, wide: torch.dtype) -> Tensor:
    return (indptr[1:] - indptr[:-1]).clamp(min=1).to(wide).unsqueeze(1)


def edge_map(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str) -> Tensor:
    """The values ``[E, W]`` of a program's edges, reduced to ``[num_dst, W]`` or ``[E, H]``, in the leaves' dtype."""
    indptr, indices, leaves, program, width, wide = _checked(indptr, indices, leaves, program, reduce)
    heads, groups = heads_of(reduce), grouped(program, leaves)
    rows = (indices.numel(), heads) if heads else (indptr.numel() - 1, width)
    out = torch.zeros(rows, dtype=wide, device="cpu")
    for chunk in _chunks(indptr, indices, width):
        values = [chunk.leaf(kind, group, wide) for kind, group in zip(program.leaves, groups, strict=True)]
        message = _run(program.steps, values)[-1].expand(chunk.src.numel(), width)
        if heads:
            out[chunk.edges] = message.reshape(-1, heads, width // heads).sum(-1)
        else:
            chunk.add_rows(out, message)
    if reduce == "mean":
        out /= _degrees(indptr, wide)
    return out.to(leaves[0].dtype)


def edge_map_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str, grad: Tensor, wanted: list[bool]
) -> list[Tensor]:
    """Gradients of ``edge_map`` for the tensors of ``leaves`` that are ``wanted``, else empty ``[0]``."""
    indptr, indices, leaves, program, width, wide = _checked(indptr, indices, leaves, program, reduce)
    line, heads = gradient(program, check_wanted(program, leaves, wanted)), heads_of(reduce)
    shape = [indices.numel(), heads] if heads else [indptr.numel() - 1, width]
    require(list(grad.shape) == shape, f"grad {shape}", f"{list(grad.shape)}")
    grad = check_values(grad, "grad").to(wide)
    if reduce == "mean":
        grad = grad / _degrees(indptr, wide)
    out = [
        torch.zeros(leaf.shape, dtype=wide, device="cpu") if w else None for leaf, w in zip(leaves, wanted, strict=True)
    ]
    groups, outs = grouped(program, leaves), grouped(program, out)
    for chunk in _chunks(indptr, indices, width):
        values = [
            chunk.leaf(kind, group, wide) if leaf in line.read else None
            for leaf, (kind, group) in enumerate(zip(program.leaves, groups, strict=True))
        ]
        edge_grad = grad[chunk.edges].repeat_interleave(width // heads, 1) if heads else grad[chunk.dst]
        values = _run(line.steps, [*values, edge_grad])
        for kind, group, own, result in zip(program.leaves, groups, outs, line.results, strict=True):
            if result >= 0:
                _add(kind, group, own, chunk, values[result])
    return [leaf.new_empty(0) if own is None else own.to(leaf.dtype) for leaf, own in zip(leaves, out, strict=True)]


def _add(kind: str, tensors: tuple, out: tuple, chunk: _Chunk, value: Tensor) -> None:
    """Adds the gradient ``[edges, W]`` of a leaf's value to those of its tensors."""
    if kind == "src":
        out[0].index_add_(0, chunk.src, value)
    elif kind == "dst":
        chunk.add_rows(out[0], value)
    elif kind == "edge":
        out[0][chunk.edges] = value
    elif kind == "scalar":
        out[0][chunk.edges] = value.sum(1).reshape(-1, *out[0].shape[1:])
    elif kind == "vector":
        out[0].add_(value.sum(0))
    else:
        if out[1] is not None:
            out[1].addmm_(value.t(), tensors[0][chunk.edges].to(value.dtype))
        if kind == "narrow" and out[2] is not None:
            out[2].add_(value.sum(0))
