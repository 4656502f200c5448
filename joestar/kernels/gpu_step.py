"""What a training step does besides the program, one kernel each: taking its batch, and noting what came of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import on_device
from joestar.kernels.gpu_mailbox import SHIFT, TAG, mailbox, show_host, tell


@triton.jit
def _take_batch(order, run, key, size, capacity, seeds, count, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.load(run + 1)
    first = tl.load(key + 2) * batch
    valid = tl.minimum(tl.maximum(tl.load(run) - first, 0), batch)
    position = tl.minimum(tl.where(slot < valid, first + slot, first), capacity - 1)
    tl.store(seeds + slot, tl.load(order + position, mask=slot < size), mask=slot < size)
    if tl.program_id(0) == 0:
        tl.store(count, valid)


@on_device
def take_batch(order: Tensor, run: Tensor, key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Batch ``key[2]`` of the seeds: (seeds ``[size]``, their true number); see ``joestar.ops.reference``."""
    seeds = order.new_empty(size)
    count = torch.empty((), dtype=torch.int64, device=order.device)
    grid = (triton.cdiv(size, 1024),)
    _take_batch[grid](order, run, key, size, order.numel(), seeds, count, BLOCK=1024)
    return seeds, count


@triton.jit
def _finish_step(key, flag, losses, run, loss, ok):
    step = tl.load(key + 2)
    fine = tl.load(ok).to(tl.int1)
    tl.store(losses + tl.load(run + 2) + step, tl.load(loss).to(losses.dtype.element_ty), mask=fine)
    tl.store(key + 2, step + fine.to(tl.int64))
    tl.store(flag, (fine == 0).to(tl.int8))


@on_device
def finish_step(key: Tensor, flag: Tensor, losses: Tensor, run: Tensor, loss: Tensor, ok: Tensor) -> None:
    """Notes the loss of a step and moves on, if ``ok``; else raises the flag; see ``joestar.ops.reference``."""
    _finish_step[(1,)](key, flag.view(torch.int8), losses, run, loss, ok.view(torch.int8), num_warps=1)


@triton.jit
def _overflow(counts, flag, out, ok, sequence, words, BOUNDS: tl.constexpr, COUNT: tl.constexpr, POST: tl.constexpr):
    fine = tl.load(flag) == 0
    tag = tl.full((), 0, tl.int64)
    if POST:
        number = tl.load(sequence) + 1
        tl.store(sequence, number)
        tag = number & TAG
    for i in tl.static_range(COUNT):
        count = tl.load(counts[i])
        tl.store(out + i, count)
        fine = fine & (count <= BOUNDS[i])
        if POST:
            tl.store(words + 1 + i, (count << SHIFT) | tag)
    tl.store(ok, fine.to(tl.int8))
    if POST:
        tl.store(words, (fine.to(tl.int64) << SHIFT) | tag)
        show_host(tag)


@on_device
def overflow(counts: list[Tensor], bounds: list[int], flag: Tensor) -> tuple[Tensor, Tensor]:
    """(true counts int64 ``[n]``, ok): ok is false while the sticky flag is set or any count exceeds its bound.

    Both are told to who hears, or else posted to the host where a mailbox is open (``kernels.gpu_mailbox``).
    """
    out = torch.empty(len(counts), dtype=torch.int64, device=flag.device)
    ok = torch.empty((), dtype=torch.bool, device=flag.device)
    sequence, words = mailbox() or (out, out)
    _overflow[(1,)](
        tuple(counts), flag.view(torch.int8), out, ok.view(torch.int8), sequence, words,
        BOUNDS=tuple(map(int, bounds)), COUNT=len(counts), POST=mailbox() is not None, num_warps=1,
    )  # fmt: skip
    tell(out, ok)
    return out, ok


@triton.jit
def _own_words(
    gradients, size, words, values, shares, ok, COUNT: tl.constexpr, DECISIVE: tl.constexpr, BLOCK: tl.constexpr
):
    if tl.load(shares + DECISIVE) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(gradients + at, tl.zeros((BLOCK,), gradients.dtype.element_ty), mask=at < size)
    if tl.program_id(0) == 0:
        for i in tl.static_range(COUNT):
            part = tl.load(shares + i + (i > 0)).to(words.dtype.element_ty)
            value = tl.load(values[i]).to(words.dtype.element_ty)
            tl.store(words + i, tl.where(part == 0, 0.0, value * part))
        tl.store(words + COUNT, (tl.load(ok) == 0).to(words.dtype.element_ty))


@on_device
def own_words(
    gradients: Tensor, words: Tensor, values: list[Tensor], shares: Tensor, ok: Tensor, decisive: int
) -> None:
    """What a rank adds to a sum over ranks besides its gradients: see ``joestar.ops.step.words``."""
    size = gradients.numel()
    _own_words[(max(1, triton.cdiv(size, 1024)),)](
        gradients, size, words, tuple(values), shares, ok.view(torch.int8),
        COUNT=len(values), DECISIVE=decisive, BLOCK=1024, num_warps=4,
    )  # fmt: skip
