"""Compositions of aten ops: single nodes in our graph, dissolved by AOTAutograd so that Inductor fuses them.

``count`` is always the 0-d int64 number of valid entries along a padded dimension.
"""

import torch
from torch import Tensor

from joestar.ops.hashing import MASK, absorb, key_state, mix32, row_state

SCHEMAS = {
    "keyed_dropout": "(Tensor x, Tensor ids, Tensor key, int site, float p) -> Tensor",
    "keyed_edge_dropout": "(Tensor x, Tensor indptr, Tensor dsts, Tensor key, int site, float p) -> Tensor",
    "mask_rows": "(Tensor x, Tensor count, int dim, Scalar value) -> Tensor",
    "masked_mean": "(Tensor x, Tensor count, int dim, int[] dims, bool keepdim) -> Tensor",
    "masked_var": "(Tensor x, Tensor count, int dim, int[] dims, float correction, bool keepdim) -> Tensor",
    "masked_batch_norm": "(Tensor x, Tensor? weight, Tensor? bias, Tensor count, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    "overflow": "(Tensor[] counts, int[] bounds, Tensor flag) -> (Tensor, Tensor)",
}

DROPOUT_SITE = 1 << 20
"""Offset of dropout's call sites, so that they never meet those of sampling."""


def _keep(a: Tensor, b: Tensor, x: Tensor, p: float) -> Tensor:
    """Keeps an entry iff the hash of (row state, column) is at least ``p * 2**32``; ``[rows, columns...]`` like x.

    The column is mixed in by xor: Inductor computes with ``arange`` in 32 bits, where a product would overflow.
    """
    columns = x[0].numel() if x.shape[0] else 1
    column = torch.arange(columns, device=x.device)
    word = mix32(((a[:, None] ^ column) + b[:, None]) & MASK)
    return (word >= int(p * 2**32)).reshape((x.shape[0], *x.shape[1:]))


def _dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def keyed_dropout(x: Tensor, ids: Tensor, key: Tensor, site: int, p: float) -> Tensor:
    """Dropout whose mask is a function of (seed, epoch, step, site, row id, column): the same in any execution mode.

    Args:
        x: ``[n, ...]``; ids: integer ``[n]``, what each row stands for; key: int64 ``[3]``; p: drop probability < 1.
    """
    a, b = row_state(key_state(key, site + DROPOUT_SITE), ids)
    return _dropped(x, _keep(a, b, x, p), p)


def keyed_edge_dropout(x: Tensor, indptr: Tensor, dsts: Tensor, key: Tensor, site: int, p: float) -> Tensor:
    """``keyed_dropout`` for edge values ``[E, ...]``: an edge is (id of its destination, rank in the row)."""
    row = torch.ops.joestar.edge_dst(indptr, x.shape[0], indptr)
    a, b = row_state(key_state(key, site + DROPOUT_SITE), torch.index_select(dsts, 0, row))
    rank = torch.arange(x.shape[0], device=x.device) - torch.index_select(indptr, 0, row)
    a, b = absorb(a, b, rank & MASK)
    return _dropped(x, _keep(a, b, x, p), p)


def mask_rows(x: Tensor, count: Tensor, dim: int, value) -> Tensor:
    """``x`` with every slice at position >= ``count`` along ``dim`` replaced by ``value``."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    valid = (torch.arange(x.shape[dim], device=x.device) < count).reshape(shape)
    return torch.where(valid, x, torch.full((), value, dtype=x.dtype, device=x.device))


def _entries(x: Tensor, count: Tensor, dim: int, dims: list[int]) -> Tensor:
    """Valid entries that a reduction over ``dims`` adds up, in the dtype of x."""
    others = 1
    for d in dims:
        if d != dim:
            others *= x.shape[d]
    return (count * others).to(x.dtype)


def masked_mean(x: Tensor, count: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    """Mean over ``dims``, one of which (``dim``) is padded."""
    return mask_rows(x, count, dim, 0).sum(dims, keepdim=keepdim) / _entries(x, count, dim, dims)


def masked_var(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Variance over ``dims``, one of which (``dim``) is padded; ``correction`` 1 is the unbiased estimate."""
    centred = mask_rows(x - masked_mean(x, count, dim, dims, True), count, dim, 0)
    return (centred * centred).sum(dims, keepdim=keepdim) / (_entries(x, count, dim, dims) - correction)


def masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-mode batch norm of ``[n, C]`` over the valid rows: (y, batch mean, unbiased batch variance)."""
    mean = masked_mean(x, count, 0, [0], False)
    centred = mask_rows(x - mean, count, 0, 0)
    squares = (centred * centred).sum(0)
    total = count.to(x.dtype)
    y = (x - mean) * torch.rsqrt(squares / total + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y, mean.detach(), (squares / (total - 1).clamp(min=1)).detach()


def overflow(counts: list[Tensor], bounds: list[int], flag: Tensor) -> tuple[Tensor, Tensor]:
    """(true counts int64 ``[n]``, ok): ok is false while the sticky flag is set or any count exceeds its bound."""
    if not counts:
        return torch.zeros(0, dtype=torch.int64, device=flag.device), ~flag
    stacked = torch.stack(counts)
    exceeded = counts[0] > bounds[0]
    for count, bound in zip(counts[1:], bounds[1:], strict=True):
        exceeded = exceeded | (count > bound)
    return stacked, ~(flag | exceeded)


def register(library: torch.library.Library) -> None:
    """Defines every composite op in the library."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, globals()[name], "CompositeImplicitAutograd")
