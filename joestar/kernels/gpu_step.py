"""What a training step does besides the program, one kernel each: taking its batch, and noting what came of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import on_device


@triton.jit
def _take_batch(order, num_seeds, key, batch, size, capacity, seeds, count, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(key + 2) * batch
    valid = tl.minimum(tl.maximum(tl.load(num_seeds) - first, 0), batch)
    position = tl.minimum(tl.where(slot < valid, first + slot, first), capacity - 1)
    tl.store(seeds + slot, tl.load(order + position, mask=slot < size), mask=slot < size)
    if tl.program_id(0) == 0:
        tl.store(count, valid)


@on_device
def take_batch(order: Tensor, num_seeds: Tensor, key: Tensor, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """Batch ``key[2]`` of the seeds: (seeds ``[size]``, their true number); see ``joestar.ops.reference``."""
    seeds = order.new_empty(size)
    count = torch.empty((), dtype=torch.int64, device=order.device)
    grid = (triton.cdiv(size, 1024),)
    _take_batch[grid](order, num_seeds, key, batch, size, order.numel(), seeds, count, BLOCK=1024)
    return seeds, count


@triton.jit
def _finish_step(key, flag, losses, history, progress, offset, loss, ok, counts, n, BLOCK: tl.constexpr):
    step = tl.load(key + 2)
    fine = tl.load(ok).to(tl.int1)
    tl.store(losses + tl.load(offset) + step, tl.load(loss).to(tl.float32), mask=fine)
    at = tl.arange(0, BLOCK)
    tl.store(history + step * n + at, tl.load(counts + at, mask=at < n, other=0), mask=(at < n) & fine)
    after = step + fine.to(tl.int64)
    tl.store(key + 2, after)
    tl.store(flag, (fine == 0).to(tl.int8))
    tl.store(progress, (fine == 0).to(tl.int64))
    tl.store(progress + 1, after)


@on_device
def finish_step(
    key: Tensor, flag: Tensor, losses: Tensor, history: Tensor, progress: Tensor, offset: Tensor, loss: Tensor,
    ok: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Notes loss and counts of a step and moves on, if ``ok``; else raises the flag; see ``joestar.ops.reference``."""
    n = history.shape[1]
    block = max(16, triton.next_power_of_2(n))
    _finish_step[(1,)](
        key, flag.view(torch.int8), losses, history, progress, offset, loss, ok.view(torch.int8), counts, n,
        BLOCK=block, num_warps=1,
    )  # fmt: skip


@triton.jit
def _overflow(counts, flag, out, ok, BOUNDS: tl.constexpr, COUNT: tl.constexpr):
    fine = tl.load(flag) == 0
    for i in tl.static_range(COUNT):
        count = tl.load(counts[i])
        tl.store(out + i, count)
        fine = fine & (count <= BOUNDS[i])
    tl.store(ok, fine.to(tl.int8))


@on_device
def overflow(counts: list[Tensor], bounds: list[int], flag: Tensor) -> tuple[Tensor, Tensor]:
    """(true counts int64 ``[n]``, ok): ok is false while the sticky flag is set or any count exceeds its bound."""
    out = torch.empty(len(counts), dtype=torch.int64, device=flag.device)
    ok = torch.empty((), dtype=torch.bool, device=flag.device)
    _overflow[(1,)](
        tuple(counts), flag.view(torch.int8), out, ok.view(torch.int8), BOUNDS=tuple(map(int, bounds)),
        COUNT=len(counts), num_warps=1,
    )  # fmt: skip
    return out, ok
