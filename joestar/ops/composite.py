"""Compositions of aten ops: single nodes in our graph, dissolved by AOTAutograd so that Inductor fuses them.

``count`` is always the 0-d int64 number of valid entries along a padded dimension.
"""

import math

import torch
from torch import Tensor

SCHEMAS = {
    "keyed_dropout": "(Tensor x, Tensor ids, Tensor key, int site, float p, bool relu=False,"
    " bool padded_columns=False) -> Tensor",
    "keyed_edge_dropout": "(Tensor x, Tensor indptr, Tensor dsts, Tensor key, int site, float p,"
    " bool padded_columns=False) -> Tensor",
    "mask_rows": "(Tensor x, Tensor count, int dim, Scalar value) -> Tensor",
    "only_valid": "(Tensor x) -> Tensor",
    "widened": "(Tensor x) -> Tensor",
    "narrowed": "(Tensor x, Tensor like) -> Tensor",
    "masked_mean": "(Tensor x, Tensor count, int dim, int[] dims, bool keepdim) -> Tensor",
    "masked_var": "(Tensor x, Tensor count, int dim, int[] dims, float correction, bool keepdim) -> Tensor",
    "masked_std": "(Tensor x, Tensor count, int dim, int[] dims, float correction, bool keepdim) -> Tensor",
    "masked_batch_norm": "(Tensor x, Tensor? weight, Tensor? bias, Tensor count, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    "synced_batch_norm": "(Tensor x, Tensor? weight, Tensor? bias, Tensor count, Tensor parts, float eps, int rank,"
    " int world) -> (Tensor, Tensor, Tensor, Tensor)",
    "cumulative_average": "(Tensor buffer, Tensor statistic, Tensor batches, Tensor count, int least) -> Tensor",
    "running_average": "(Tensor buffer, Tensor statistic, float momentum, Tensor count, int least) -> Tensor",
}


def keyed_dropout(
    x: Tensor, ids: Tensor, key: Tensor, site: int, p: float, relu: bool = False, padded_columns: bool = False
) -> Tensor:
    """Dropout whose mask is a function of (seed, epoch, step, site, row id, column): the same in any execution mode.

    The mask is an op of its own (``dropout_bits``), 32 columns to a word: cheap to make, and to keep for the backward
    pass.

    Args:
        x: ``[n, ...]``; ids: integer ``[n]``, what each row stands for; key: int64 ``[3]``; p: drop probability < 1;
        relu: apply ReLU first; the backward pass then needs no mask at all. padded_columns: the number of columns
        depends on the execution mode (attention among all rows): columns then find their bits whatever it is.
    """
    if p == 0:
        return torch.relu(x) if relu else x.clone()
    bits = torch.ops.joestar.dropout_bits(ids, key, site, p, math.prod(x.shape[1:]))
    return _by_position(x, bits, p) if padded_columns else torch.ops.joestar.dropout_apply(x, bits, p, relu)


def _by_position(x: Tensor, bits: Tensor, p: float) -> Tensor:
    """Dropout whose column ``c`` is bit ``c % 32`` of word ``c // 32``, whatever the number of words."""
    shift = torch.arange(32, dtype=torch.int32, device=x.device)
    keep = ((bits[:, :, None] >> shift) & 1).reshape(bits.shape[0], bits.shape[1] * 32) != 0
    keep = keep[:, : math.prod(x.shape[1:])].reshape(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def keyed_edge_dropout(
    x: Tensor, indptr: Tensor, dsts: Tensor, key: Tensor, site: int, p: float, padded_columns: bool = False
) -> Tensor:
    """``keyed_dropout`` for edge values ``[E, ...]``: an edge is (id of its destination, rank in the row)."""
    if p == 0:
        return x.clone()
    columns = math.prod(x.shape[1:])
    bits = torch.ops.joestar.edge_dropout_bits(indptr, x.shape[0], dsts, key, site, p, columns)
    return _by_position(x, bits, p) if padded_columns else torch.ops.joestar.dropout_apply(x, bits, p, False)


def mask_rows(x: Tensor, count: Tensor, dim: int, value) -> Tensor:
    """``x`` with every slice at position >= ``count`` along ``dim`` replaced by ``value``."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    valid = (torch.arange(x.shape[dim], device=x.device) < count).reshape(shape)
    return torch.where(valid, x, torch.full((), value, dtype=x.dtype, device=x.device))


def only_valid(x: Tensor) -> Tensor:
    """A copy of ``x``; in a padded program its padded entries are 0 (``lowering.rules.rowwise``)."""
    return x.clone()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are added up in: float32 for 16-bit numbers, as in PyTorch's own reductions."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """``x`` in the dtype that its values are added up in."""
    return x.to(_wide(x.dtype))


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """``x`` in the dtype of ``like``."""
    return x.to(like.dtype)


def _entries(x: Tensor, count: Tensor, dim: int, dims: list[int]) -> Tensor:
    """Valid entries that a reduction over ``dims`` adds up, in the dtype of sums."""
    others = math.prod(x.shape[d] for d in dims if d != dim)
    return (count * others).to(_wide(x.dtype))


def _mean(x: Tensor, count: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    total = mask_rows(x, count, dim, 0).sum(dims, keepdim=keepdim, dtype=_wide(x.dtype))
    return total / _entries(x, count, dim, dims)


def _var(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    centred = mask_rows(x - _mean(x, count, dim, dims, True), count, dim, 0)
    return (centred * centred).sum(dims, keepdim=keepdim) / (_entries(x, count, dim, dims) - correction)


def masked_mean(x: Tensor, count: Tensor, dim: int, dims: list[int], keepdim: bool) -> Tensor:
    """Mean over ``dims``, one of which (``dim``) is padded; in the dtype of ``x``, added up in at least float32."""
    return _mean(x, count, dim, dims, keepdim).to(x.dtype)


def masked_var(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Variance over ``dims``, one of which (``dim``) is padded; ``correction`` 1 is the unbiased estimate."""
    return _var(x, count, dim, dims, correction, keepdim).to(x.dtype)


def masked_std(x: Tensor, count: Tensor, dim: int, dims: list[int], correction: float, keepdim: bool) -> Tensor:
    """Square root of ``masked_var``, rounded once; where it is 0 its gradient is 0, as that of ``aten.std`` is."""
    var = _var(x, count, dim, dims, correction, keepdim)
    constant = var == 0
    return var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0).to(x.dtype)


def masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-mode batch norm of ``[n, C]`` over the valid rows.

    Returns:
        (y in the dtype of ``x``, batch mean, unbiased batch variance); statistics are at least float32, as PyTorch's
        are. The variance of one row is NaN: it has none. Padded rows of y are ``bias``.
    """
    total = count.to(_wide(x.dtype)).clamp(min=1)
    mean = mask_rows(x, count, 0, 0).sum(0, dtype=total.dtype) / total
    centred = mask_rows(x - mean, count, 0, 0)
    squares = (centred * centred).sum(0)
    y = centred * torch.rsqrt(squares / total + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.detach(), (squares / (count - 1)).detach()


def synced_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, parts: Tensor, eps: float, rank: int,
    world: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``masked_batch_norm`` over the rows of all ranks.

    Means and squares of the ranks are put together as Chan, Golub and LeVeque do it: no digits cancel.

    Args:
        parts: ``[n]``, what every row counts for, see ``ops.ranks.row_parts``.

    Returns:
        As ``masked_batch_norm``, and the number of rows.
    """
    dtype, columns = _wide(x.dtype), x.shape[1]
    part = parts.to(dtype).unsqueeze(1)
    own = part.sum()
    valid = mask_rows(x, count, 0, 0).to(dtype)
    mean = (valid * part).sum(0) / own.clamp(min=1e-9)
    squares = ((valid - mean).square() * part).sum(0)
    everyone = torch.ops.joestar.over_ranks(torch.cat([mean, squares, own.view(1)]), rank, world)
    means, many, numbers = everyone[:, :columns], everyone[:, columns:-1], everyone[:, -1:]
    rows = numbers.sum().round()
    total = rows.clamp(min=1)
    mean = (means * numbers).sum(0) / total
    squares = (many + numbers * (means - mean).square()).sum(0)
    y = mask_rows(x - mean, count, 0, 0) * torch.rsqrt(squares / total + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.detach(), (squares / (rows - 1)).detach(), rows.detach()


def running_average(buffer: Tensor, statistic: Tensor, momentum: float, count: Tensor, least: int) -> Tensor:
    """A running statistic after a batch of ``count`` rows, in its own dtype.

    A batch of fewer than ``least`` rows leaves it as it is: no rows have a mean, and one row has no variance.
    """
    wide = _wide(buffer.dtype)
    moved = torch.lerp(buffer.to(wide), statistic.to(wide), momentum).to(buffer.dtype)
    return torch.where(count >= least, moved, buffer)


def cumulative_average(buffer: Tensor, statistic: Tensor, batches: Tensor, count: Tensor, least: int) -> Tensor:
    """``running_average`` over all ``batches``, an integer that counts this one as well."""
    wide = _wide(buffer.dtype)
    moved = torch.lerp(buffer.to(wide), statistic.to(wide), 1 / batches.to(wide)).to(buffer.dtype)
    return torch.where(count >= least, moved, buffer)


def register(library: torch.library.Library) -> None:
    """Defines every composite op in the library."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, globals()[name], "CompositeImplicitAutograd")
