"""Masks of keyed dropout, 32 columns to a word."""

import math

import torch
from torch import Tensor

from joestar.kernels.dropout import DROPOUT_SITE, KEEP_DIGITS, keep_numerator
from joestar.ops.hashing import absorb, draw, key_state, row_state
from joestar.ops.reference.structure import edge_dst


def dropout_bits(ids: Tensor, key: Tensor, site: int, p: float, columns: int) -> Tensor:
    """Which entries dropout keeps, int32 ``[n, ceil(columns / 32)]``: bit ``c // W`` of word ``c % W`` is column c.

    A row's state is that of its id. 32 independent coins of probability ``1 - p`` come from as many random words as
    that probability has binary digits: from the last digit on, ``mask = word | mask`` for a 1, ``word & mask`` for a 0.

    Args:
        ids: integer ``[n]``, what each row stands for; key: int64 ``[3]``; p: drop probability in ``[0, 1)``.
    """
    return _bits(*row_state(key_state(key, site + DROPOUT_SITE), ids), p, columns)


def edge_dropout_bits(
    indptr: Tensor, num_edges: int, dsts: Tensor, key: Tensor, site: int, p: float, columns: int
) -> Tensor:
    """``dropout_bits`` for edge values: an edge is (id of its destination, rank in the row). ``[num_edges, words]``."""
    row = edge_dst(indptr, num_edges, indptr)
    if not dsts.numel():
        return torch.zeros((num_edges, -(-columns // 32)), dtype=torch.int32, device=indptr.device)
    a, b = row_state(key_state(key, site + DROPOUT_SITE), dsts[row])
    rank = torch.arange(num_edges, device=indptr.device) - indptr[row]
    return _bits(*absorb(a, b, rank & 0xFFFFFFFF), p, columns)


def dropout_apply(x: Tensor, bits: Tensor, p: float, relu: bool) -> Tensor:
    """``x`` ``[n, ...]`` where its bit is set (and it is positive, with ``relu``), over ``1 - p``; else 0.

    Bit ``c // W`` of word ``c % W`` is column c, W words to a row: neighbouring columns read neighbouring words.
    """
    rows, words = bits.shape
    shift = torch.arange(32, dtype=torch.int32, device=x.device)
    keep = ((bits[:, None, :] >> shift[:, None]) & 1).reshape(rows, words * 32) != 0
    keep = keep[:, : math.prod(x.shape[1:])].reshape(x.shape)
    if relu:
        keep = keep & (x > 0)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device)).contiguous()


def relu_dropout_grad(grad: Tensor, y: Tensor, p: float) -> Tensor:
    """Gradient of ``dropout_apply`` with ReLU, whose result was ``y``: ``grad / (1 - p)`` where ``y > 0``, else 0.

    The result is positive exactly where an entry was positive and kept: no mask is needed.
    """
    zero = torch.zeros((), dtype=grad.dtype, device=grad.device)
    return torch.where(y > 0, grad * (1.0 / (1.0 - p)), zero).contiguous()


def _bits(a: Tensor, b: Tensor, p: float, columns: int) -> Tensor:
    keep = keep_numerator(p)
    lowest = (keep & -keep).bit_length() - 1
    word = torch.arange(-(-columns // 32), device=a.device) * 32
    mask = torch.zeros((a.numel(), word.numel()), dtype=torch.int64, device=a.device)
    for digit in range(lowest, KEEP_DIGITS):
        random = draw(a[:, None], b[:, None], word + digit)
        mask = random | mask if keep >> digit & 1 else random & mask
    return torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32)
