"""``joestar::gather_rows``: rows of a table that the device reads where it is, hot ones from a cache beside it.

The op of feature stores (``joestar.store``): what reads features in place does not match it, so ids that get here are
those of a block, each once. It has no gradient: stored features are not trained.
"""

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define


def gather_rows(table: Tensor, cache: Tensor | None, slot_of: Tensor | None, ids: Tensor) -> Tensor:
    """``table[ids]``; where ``slot_of[ids]`` is not negative, that row of ``cache`` instead.

    Args:
        table: ``[N, ...]``. cache: ``[H, ...]`` of the same rows and dtype; slot_of: int32 ``[N]``, -1 for a row that
            the cache does not hold; both or neither. ids: int32 or int64 ``[n]``.
    """
    rows = torch.index_select(table, 0, ids)
    if cache is None or cache.shape[0] == 0:
        return rows
    slot = torch.index_select(slot_of, 0, ids)
    hot = torch.index_select(cache, 0, slot.clamp(min=0))
    return torch.where((slot >= 0).view(-1, *[1] * (table.dim() - 1)), hot, rows)


def _setup(ctx, inputs, output):
    raise RuntimeError("gather_rows has no gradient: features of a store are not trained; gather with index_select")


def _backward(ctx, grad):
    return None, None, None, None


define(
    "gather_rows(Tensor table, Tensor? cache, Tensor? slot_of, Tensor ids) -> Tensor", gather_rows,
    fake=lambda table, cache, slot_of, ids: table.new_empty((ids.shape[0], *table.shape[1:])),
    gradient=(_setup, _backward), padding=Padding.RULE, cpu="cpu_store.gather_stored", cuda="gpu_fill.gather_stored",
)  # fmt: skip
