"""Messages of an edge program, with all edges' values in memory; gradients are those of autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.kernels.edge_program import MEANING, EdgeProgram, check_leaves, check_wanted, grouped, heads_of
from joestar.ops.reference.structure import valid_edges


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
