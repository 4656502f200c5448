"""Keyed dropout: masks as bits, 32 columns to a word; their use; and ``joestar::keyed_dropout``, made of both."""

import math

import torch
from torch import Tensor

from joestar.kernels.dropout import DROPOUT_SITE, KEEP_DIGITS, keep_numerator
from joestar.ops.hashing import absorb, draw, key_state, row_state
from joestar.ops.once import refusing
from joestar.ops.registry import Padding, compose, define, define_gradient, define_structural
from joestar.ops.sampling.edge_dst import edge_dst

ops = torch.ops.joestar


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


def _bits(a: Tensor, b: Tensor, p: float, columns: int) -> Tensor:
    keep = keep_numerator(p)
    lowest = (keep & -keep).bit_length() - 1
    word = torch.arange(-(-columns // 32), device=a.device) * 32
    mask = torch.zeros((a.numel(), word.numel()), dtype=torch.int64, device=a.device)
    for digit in range(lowest, KEEP_DIGITS):
        random = draw(a[:, None], b[:, None], word + digit)
        mask = random | mask if keep >> digit & 1 else random & mask
    return torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32)


def dropout_apply(x: Tensor, bits: Tensor, p: float, relu: bool) -> Tensor:
    """``x`` ``[n, ...]`` where its bit is set (and it is positive or NaN, with ``relu``), over ``1 - p``; else 0.

    Bit ``c // W`` of word ``c % W`` is column c, W words to a row: neighbouring columns read neighbouring words.
    """
    rows, words = bits.shape
    shift = torch.arange(32, dtype=torch.int32, device=x.device)
    keep = ((bits[:, None, :] >> shift[:, None]) & 1).reshape(rows, words * 32) != 0
    keep = keep[:, : math.prod(x.shape[1:])].reshape(x.shape)
    if relu:
        keep = keep & ~(x <= 0)  # NaN passes ReLU
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device)).contiguous()


def relu_dropout_grad(grad: Tensor, y: Tensor, p: float) -> Tensor:
    """Gradient of ``dropout_apply`` with ReLU, whose result was ``y``: ``grad / (1 - p)`` or, where ``y <= 0``, 0.

    The result is positive exactly where an entry was positive and kept: no mask is needed.
    """
    zero = torch.zeros((), dtype=grad.dtype, device=grad.device)
    return torch.where(~(y <= 0), grad * (1.0 / (1.0 - p)), zero).contiguous()


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


def _edge_bits_fake(indptr, num_edges, dsts, key, site, p, columns):
    return dsts.new_empty((num_edges, (columns + 31) // 32), dtype=torch.int32)


def _setup(ctx, inputs, output):
    _, bits, ctx.p, ctx.relu = inputs
    ctx.save_for_backward(output if ctx.relu else bits)


def _backward(ctx, grad):
    (saved,) = ctx.saved_tensors
    if ctx.relu:
        grad_x = refusing("joestar::dropout_apply", ops.relu_dropout_grad(grad, saved, ctx.p), (grad,))
    else:
        grad_x = ops.dropout_apply(grad, saved, ctx.p, False)
    return grad_x, None, None, None


define_structural(
    "dropout_bits(Tensor ids, Tensor key, int site, float p, SymInt columns) -> Tensor", dropout_bits,
    fake=lambda ids, key, site, p, columns: ids.new_empty((ids.shape[0], (columns + 31) // 32), dtype=torch.int32),
    cpu="cpu_dropout", cuda="gpu_dropout",
)  # fmt: skip
define_structural(
    "edge_dropout_bits(Tensor indptr, SymInt num_edges, Tensor dsts, Tensor key, int site, float p, SymInt columns)"
    " -> Tensor", edge_dropout_bits, fake=_edge_bits_fake, cpu="cpu_dropout", cuda="gpu_dropout",
)  # fmt: skip
define(
    "dropout_apply(Tensor x, Tensor bits, float p, bool relu) -> Tensor", dropout_apply,
    fake=lambda x, bits, p, relu: x.new_empty(x.shape), gradient=(_setup, _backward), twice=True,
    padding=Padding.SAFE, cpu="cpu_dropout", dissolved=("cuda",),
)  # fmt: skip
define_gradient(
    "relu_dropout_grad(Tensor grad, Tensor y, float p) -> Tensor", relu_dropout_grad,
    fake=lambda grad, y, p: grad.new_empty(grad.shape), cpu="cpu_dropout", dissolved=("cuda",),
)  # fmt: skip
compose(
    "keyed_dropout(Tensor x, Tensor ids, Tensor key, int site, float p, bool relu=False, bool padded_columns=False)"
    " -> Tensor", keyed_dropout,
)  # fmt: skip
compose(
    "keyed_edge_dropout(Tensor x, Tensor indptr, Tensor dsts, Tensor key, int site, float p,"
    " bool padded_columns=False) -> Tensor", keyed_edge_dropout,
)  # fmt: skip
