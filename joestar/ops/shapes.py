"""Shapes and dtypes that the fake implementations of several ops share."""

import torch


def count(like):
    """The true number of a set, on the device of ``like``."""
    return like.new_empty((), dtype=torch.int64)


def bound(size):
    """A size; -1 asks for a data-dependent one: an unbacked symbol, as in ``torch.nonzero``."""
    if isinstance(size, int) and size < 0:
        return torch.library.get_ctx().new_dynamic_size()
    return size


def edges(indices, rows, num_edges):
    """(offsets, sources, count) of edges that are made of those of a graph."""
    indptr = indices.new_empty((rows.shape[0] + 1,), dtype=torch.int64)
    return indptr, indices.new_empty((bound(num_edges),)), count(indices)


def words(x):
    """A bit per entry of ``x``, 32 to a word."""
    return x.new_empty((x.shape[0], (x.shape[1] + 31) // 32), dtype=torch.int32)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are added up in: float32 for 16-bit numbers, as in PyTorch's own reductions."""
    return torch.promote_types(dtype, torch.float32)
