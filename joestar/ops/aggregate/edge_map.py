"""``joestar::edge_map``: messages of an edge program, reduced.

References have all edges' values in memory; gradients are those of autograd.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.kernels.edge_program import MEANING, EdgeProgram, check_leaves, check_wanted, grouped, heads_of, width_of
from joestar.ops.registry import CSC, Padding, define, define_gradient
from joestar.ops.sampling.edge_dst import valid_edges

ops = torch.ops.joestar


def _leaf(kind: str, tensors: list[Tensor], src: Tensor, dst: Tensor) -> Tensor:
    first = tensors[0]
    if kind in ("src", "dst"):
        return first[src if kind == "src" else dst]
    if kind == "vector":
        return first
    if kind == "scalar":
        return first[: src.numel()].reshape(-1, 1)
    return F.linear(first[: src.numel()], *tensors[1:]) if "narrow" in kind else first[: src.numel()]


def _message(program: EdgeProgram, leaves: list[Tensor], src: Tensor, dst: Tensor, width: int) -> Tensor:
    wide = torch.promote_types(leaves[0].dtype, torch.float32)
    leaves = grouped(program, [leaf.to(wide) for leaf in leaves])
    values = [_leaf(kind, group, src, dst) for kind, group in zip(program.leaves, leaves, strict=True)]
    for name, *arguments in program.steps:
        values.append(MEANING[name](*(values[a] if isinstance(a, int) else a for a in arguments)))
    return values[-1].expand(src.numel(), width)


def edge_map(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str) -> Tensor:
    """The values ``[E, W]`` of a program's edges, reduced: per destination ``[num_dst, W]``, or per head ``[E, H]``.

    Args:
        indptr: int64 ``[num_dst + 1]``; indices: rows of the ``src`` leaves per edge, ``[E]``.
        leaves: the tensors of the program's leaves, all of one dtype; see ``joestar.kernels.edge_program``.
        reduce: "sum" or "mean" over in-edges, or "heads:H": sums over the columns of each head, 0 past the last edge.
    """
    parsed = EdgeProgram.parse(program)
    width = check_leaves(parsed, leaves, indptr.numel() - 1, indices.numel(), reduce)
    src, dst = valid_edges(indptr, indices)
    message = _message(parsed, leaves, src, dst, width)
    if heads := heads_of(reduce):
        per_head = message.reshape(src.numel(), heads, width // heads).sum(-1)
        return F.pad(per_head, (0, 0, 0, indices.numel() - src.numel())).to(leaves[0].dtype)
    out = message.new_zeros((indptr.numel() - 1, width)).index_add(0, dst, message)
    if reduce == "mean":
        out = out / (indptr[1:] - indptr[:-1]).clamp(min=1).to(out.dtype).unsqueeze(1)
    return out.to(leaves[0].dtype)


def edge_map_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str, grad: Tensor, wanted: list[bool]
) -> list[Tensor]:
    """Gradients of ``edge_map`` for the tensors of ``leaves`` that are ``wanted``, else empty ``[0]``."""
    check_wanted(EdgeProgram.parse(program), leaves, wanted)
    wide = torch.promote_types(leaves[0].dtype, torch.float32)
    with torch.enable_grad():
        own = [leaf.detach().to(wide, copy=True).requires_grad_(w) for leaf, w in zip(leaves, wanted, strict=True)]
        asked = [leaf for leaf in own if leaf.requires_grad]
        found = []
        if asked:
            y = edge_map(indptr, indices, own, program, reduce)
            found = torch.autograd.grad(y, asked, grad.to(wide), materialize_grads=True)
    given = iter(found)
    return [
        next(given).to(leaf.dtype).contiguous() if w else leaf.new_empty(0)
        for leaf, w in zip(leaves, wanted, strict=True)
    ]


def _fake(indptr, indices, leaves, program, reduce):
    heads = heads_of(reduce)
    width = width_of(EdgeProgram.parse(program), leaves)
    return leaves[0].new_empty((indices.shape[0], heads) if heads else (indptr.shape[0] - 1, width))


def _grad_fake(indptr, indices, leaves, program, reduce, grad, wanted):
    return [leaf.new_empty(leaf.shape if w else (0,)) for leaf, w in zip(leaves, wanted, strict=True)]


def _setup(ctx, inputs, output):
    indptr, indices, leaves, ctx.program, ctx.reduce = inputs
    check_wanted(EdgeProgram.parse(ctx.program), leaves, [leaf.requires_grad for leaf in leaves])
    ctx.save_for_backward(indptr, indices, *leaves)


def _backward(ctx, grad):
    indptr, indices, *leaves = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[2])
    grads = ops.edge_map_grad(indptr, indices, leaves, ctx.program, ctx.reduce, grad.contiguous(), wanted)
    return None, None, [g if w else None for g, w in zip(grads, wanted, strict=True)], None, None


_ORDER = (("src",), ("dst", "edge"), ("narrow", "narrow_plain"), ("scalar", "vector"))
"""Kinds of leaves whose dtype counts, the first that there are."""


def common_dtype(program: EdgeProgram, leaves: list[Tensor], short: torch.dtype) -> torch.dtype:
    """The dtype of the rows of sources, else of other rows; products would give ``short``."""
    groups = list(zip(program.leaves, grouped(program, leaves), strict=True))
    for kinds in _ORDER:
        found = [tensors[0].dtype for kind, tensors in groups if kind in kinds]
        if found:
            return short if "narrow" in kinds else functools.reduce(torch.promote_types, found)
    return short


def _autocast(device: str):
    def run(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str) -> Tensor:
        dtype = leaves[0].dtype
        if any(leaf.dtype != dtype for leaf in leaves):
            dtype = common_dtype(EdgeProgram.parse(program), leaves, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            cast = [leaf.to(dtype) for leaf in leaves]
            return torch.ops.joestar.edge_map(indptr, indices, cast, program, reduce)

    return run


define(
    f"edge_map({CSC}, Tensor[] leaves, str program, str reduce) -> Tensor", edge_map, fake=_fake,
    gradient=(_setup, _backward), padding=Padding.SAFE, cpu="cpu_edge_map", cuda="gpu_edge_map", autocast=_autocast,
)  # fmt: skip
define_gradient(
    f"edge_map_grad({CSC}, Tensor[] leaves, str program, str reduce, Tensor grad, bool[] wanted) -> Tensor[]",
    edge_map_grad, fake=_grad_fake, cpu="cpu_edge_map", cuda="gpu_edge_map_grad",
)  # fmt: skip
