"""``joestar::gather_shards``: rows of a table whose parts lie with several processes, hot ones from a cache beside.

The op of ``joestar.store.Sharded``. As with ``gather_rows``, nothing that reads features in place matches it, so ids
that get here are those of a block, each once; and it has no gradient.
"""

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define


def gather_shards(
    shards: list[Tensor], pointers: Tensor, stripe: int, cache: Tensor | None, slot_of: Tensor | None, ids: Tensor
) -> Tensor:
    """``table[ids]``, where row ``i`` is with owner ``(i // stripe) % len(shards)``, the stripes of each one packed.

    Args:
        shards: one per owner, ``[rows, ...]``. pointers: int64 ``[len(shards) + 1]``, addresses of the shards and of
            the cache: what the GPU's kernel reads, not looked at here.
        cache: ``[H, ...]`` of the same rows and dtype; slot_of: int32 ``[N]``, -1 for a row that the cache does not
            hold; both or neither. ids: int32 or int64 ``[n]``.

    Raises:
        IndexError: for an id that is no row.
    """
    world, ids = len(shards), ids.long()
    numbers = torch.div(ids, stripe, rounding_mode="floor")
    owner, row = numbers % world, torch.div(numbers, world, rounding_mode="floor") * stripe + ids % stripe
    out = shards[0].new_empty((ids.numel(), *shards[0].shape[1:]))
    if slot_of is not None and cache.shape[0]:
        slot = torch.index_select(slot_of, 0, ids).long()
        owner, row = torch.where(slot < 0, owner, world), torch.where(slot < 0, row, slot)
        shards = [*shards, cache]
    for number, shard in enumerate(shards):
        places = torch.nonzero(owner == number).flatten()
        out[places] = torch.index_select(shard, 0, row[places])
    return out


def _setup(ctx, inputs, output):
    raise RuntimeError("gather_shards has no gradient: features of a store are not trained; gather with index_select")


def _backward(ctx, grad):
    return None, None, None, None, None, None


def _fake(shards, pointers, stripe, cache, slot_of, ids):
    return shards[0].new_empty((ids.shape[0], *shards[0].shape[1:]))


define(
    "gather_shards(Tensor[] shards, Tensor pointers, int stripe, Tensor? cache, Tensor? slot_of, Tensor ids) -> Tensor",
    gather_shards, fake=_fake, gradient=(_setup, _backward), padding=Padding.RULE, cuda="gpu_shards",
)  # fmt: skip
